"""The `shoal` command. Each command imports what it needs when it runs, so that `shoal --help` is instant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="shoal", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Serve large language models as independent services.")
model_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")
app.add_typer(model_app, name="model")
keys_app = typer.Typer(no_args_is_help=True, help="API keys of the gateway.")
app.add_typer(keys_app, name="keys")

Url = Annotated[str, typer.Option(help="Gateway to talk to; default: the stack that runs here.")]
ApiKey = Annotated[str, typer.Option(envvar="SHOAL_API_KEY", help="API key of the gateway.")]
StateDir = Annotated[Path | None, typer.Option(help="State folder of the stack [default: ~/.cache/shoal/stack].")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def one_line_errors(config_code: int = 2) -> Iterator[None]:
    """Every error that we raise ends as one line on stderr: `config_code` for configuration, exit code 1 otherwise."""
    from common.errors import ConfigError, ShoalError

    try:
        yield
    except ShoalError as error:
        typer.echo(f"shoal: {error.message}", err=True)
        raise typer.Exit(config_code if isinstance(error, ConfigError) else 1) from None


@app.command()
def up(
    model: Annotated[str, typer.Option(help="Known name or Hugging Face folder.")] = "SmolLM2-135M-Instruct",
    prefill: Annotated[int, typer.Option(help="Workers that only prefill.")] = 0,
    decode: Annotated[int, typer.Option(help="Workers that decode, and prefill only if they must.")] = 0,
    mixed: Annotated[int | None, typer.Option(
        help="Workers that prefill and decode [default: 1, or 0 with --prefill or --decode].")] = None,
    kvstore: Annotated[int, typer.Option(help="KV stores.")] = 1,
    router: Annotated[int, typer.Option(help="Routers.")] = 1,
    gateway: Annotated[int, typer.Option(help="Gateways, on consecutive ports.")] = 1,
    tokenizer: Annotated[int, typer.Option(help="Tokenizers.")] = 1,
    host: Annotated[str, typer.Option(help="Address the gateways bind.")] = "127.0.0.1",
    ssl_certfile: Annotated[str, typer.Option(help="Certificate of the gateways; they then speak HTTPS.")] = "",
    ssl_keyfile: Annotated[str, typer.Option(help="Its key.")] = "",
    insecure: Annotated[bool, typer.Option(
        "--insecure", help="Allow plaintext beyond loopback: HTTP on --host, --nats-url, --redis-url.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first gateway; 0: a free one.")] = 8000,
    api_key: Annotated[str, typer.Option(envvar="SHOAL_API_KEY", help="Key that clients must send.")] = "",
    nats_url: Annotated[str, typer.Option(
        envvar="SHOAL_NATS_URL", help="NATS to use instead of the embedded one.")] = "",
    redis_url: Annotated[str, typer.Option(
        envvar="SHOAL_REDIS_URL", help="Redis or Valkey to use instead of the embedded one.")] = "",
    state_dir: StateDir = None,
    runner: Annotated[str, typer.Option(help="torch; mock-echo and mock-hash are for tests.")] = "torch",
    transport: Annotated[str, typer.Option(help="Hand-off of KV: auto, shm or grpc.")] = "auto",
    store_policy: Annotated[str | None, typer.Option(help="Workers: write back all cached blocks, or none.")] = None,
    kvstore_dram_bytes: Annotated[int, typer.Option(min=0, help="Memory of each KV store.")] = 512 << 20,
    kvstore_ssd_bytes: Annotated[int, typer.Option(min=0, help="Disk of each KV store.")] = 2 << 30,
    drain_timeout_s: Annotated[float, typer.Option(min=0, max=3600, help="How long a stop lets work finish.")] = 30.0,
    dtype: Annotated[str | None, typer.Option(help="Workers: auto, float32 or bfloat16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Workers: tokens of one request.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Workers: requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Workers: token budget of a step.")] = None,
    kv_cache_bytes: Annotated[int | None, typer.Option(help="Workers: memory for the KV cache.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Workers: token slots of a KV block.")] = None,
    torch_threads: Annotated[int | None, typer.Option(help="Workers: threads of each.")] = None,
    device: Annotated[str | None, typer.Option(help="Workers: cpu, cuda (a GPU each), cuda:N, auto.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Workers: part of a GPU's memory.")] = None,
    log_format: Annotated[str, typer.Option(help="console or json.")] = "console",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all logs, not only warnings.")] = False,
) -> None:
    """Start NATS, Valkey and all services on this machine; Ctrl-C drains and stops."""
    from common.errors import ConfigError
    from common.host_port import without_brackets

    with one_line_errors():
        from stack import ports
        from stack.console import Console
        from stack.gateway_tls import secured_gateway
        from stack.model_progress import ensure_model
        from stack.plan import StackOptions, default_mixed
        from stack.state_file import default_state_dir
        from stack.up import up as run

        host = without_brackets(host)
        gateway_flags = tuple(f"--{name}={value}" for name, value in (
            ("ssl-certfile", ssl_certfile), ("ssl-keyfile", ssl_keyfile)) if value)
        http_tls = secured_gateway(host, gateway_flags, insecure=insecure, nats_url=nats_url, redis_url=redis_url)
        if log_format not in ("console", "json"):
            raise ConfigError(f"--log-format must be console or json, got {log_format!r}", param="log_format")
        engine = {"dtype": dtype, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
                  "max_num_batched_tokens": max_num_batched_tokens, "kv_cache_bytes": kv_cache_bytes,
                  "block_size": block_size, "torch_threads": torch_threads, "store_policy": store_policy,
                  "device": device, "gpu_memory_utilization": gpu_memory_utilization}
        options = StackOptions(
            model_path=ensure_model(model).resolve(), state_dir=(state_dir or default_state_dir()).resolve(),
            prefill=prefill, decode=decode, mixed=default_mixed(prefill, decode) if mixed is None else mixed,
            kvstore=kvstore, router=router, gateway=gateway, tokenizer=tokenizer,
            host=host, port=port or ports.free_port(host), http_tls=http_tls, gateway_flags=gateway_flags,
            insecure=insecure, api_key=api_key, nats_url=nats_url, redis_url=redis_url,
            runner=runner, transport=transport, kvstore_dram_bytes=kvstore_dram_bytes,
            kvstore_ssd_bytes=kvstore_ssd_bytes, drain_timeout_s=drain_timeout_s,
            engine_flags={name: str(value) for name, value in engine.items() if value is not None})
        run(options, Console(log_format, verbose))


@app.command()
def status(state_dir: StateDir = None, redis_url: str = "", nats_url: str = "", as_json: AsJson = False) -> None:
    """Who is alive; exit code 1 when something is down."""
    with one_line_errors():
        from stack.status import print_status

        raise typer.Exit(0 if print_status(state_dir, redis_url, nats_url, as_json) else 1)


@app.command()
def healthcheck(
    grpc: Annotated[str, typer.Option(help="host:port of a service; its health must be SERVING.")] = "",
    http: Annotated[str, typer.Option(help="URL that must answer 200, for example http://127.0.0.1:8000/ready.")] = "",
    service: Annotated[str, typer.Option(help="gRPC: which health; empty: whether it takes work.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.1, max=600, help="Deadline of the whole check.")] = 3.0,
    tls: Annotated[bool | None, typer.Option(
        "--tls/--no-tls", show_default=False,
        help="gRPC: whether the port speaks TLS [default: with SHOAL_TLS_CA, but not at SHOAL_HEALTH_PORT].")] = None,
) -> None:
    """Ask one service whether it takes work: exit code 0 or 1; for health checks of containers."""
    with one_line_errors(config_code=1):
        from stack.healthcheck import check

        check(grpc, http, service, timeout_s, tls)


@app.command()
def smoke(url: Url = "", api_key: ApiKey = "", state_dir: StateDir = None) -> None:
    """Try the running stack from end to end; starts one of its own when none runs."""
    with one_line_errors():
        from stack.smoke import smoke as run

        raise typer.Exit(0 if run(url, api_key, state_dir) else 1)


@app.command()
def chat(
    url: Url = "",
    model: Annotated[str, typer.Option(help="Default: the first that the gateway lists.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    api_key: ApiKey = "",
    state_dir: StateDir = None,
) -> None:
    """Talk to a model; after each answer its TTFT, speed and cached tokens. Ctrl-C cancels the answer only."""
    with one_line_errors():
        from stack.chat import chat as run

        run(url, model, system, temperature, api_key, state_dir)


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(help="Requests, JSON lines in OpenAI's Batch format.")],
    output: Annotated[Path, typer.Argument(help="Answers; what is in it already is not asked again.")],
    errors: Annotated[Path | None, typer.Option(
        help="Requests that failed, and why [default: OUTPUT with .errors.jsonl].")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once.")] = 32,
    timeout_s: Annotated[float, typer.Option(min=1, max=86400, help="Deadline of each request.")] = 600.0,
    url: Url = "", api_key: ApiKey = "", state_dir: StateDir = None,
) -> None:
    """Answer a file of requests; a run that was cut short goes on where it was. Exit code 1 when some failed."""
    with one_line_errors():
        from stack.batch_command import run

        raise typer.Exit(0 if run(source, output, errors, url, api_key, state_dir, concurrency, timeout_s) else 1)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(
        help="Spans as OTLP JSON lines, which the collector's file exporter writes; - is the standard input.")],
    request_id: Annotated[str, typer.Option(
        help="What the client sent as x-request-id or was answered, or the trace's id [default: the newest].")] = "",
    lines: Annotated[int, typer.Option(min=3, max=1000, help="At most; the shortest spans are left out.")] = 60,
) -> None:
    """Draw where a request's time went, a line for each span."""
    with one_line_errors():
        from stack.waterfall import print_trace

        print_trace(file, request_id, lines)


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="Which model.")] = "SmolLM2-135M-Instruct",
    to: Annotated[Path | None, typer.Option(help="Folder to make [default: in ~/.cache/shoal].")] = None,
) -> None:
    """Fetch the small real model once and print its folder."""
    with one_line_errors():
        from stack.model_progress import fetch_model

        typer.echo(fetch_model(name, to))


@model_app.command("convert")
def model_convert(
    file: Annotated[Path, typer.Argument(help="The GGUF file, quantised or not.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; it takes 4 bytes a parameter.")],
) -> None:
    """Turn a GGUF file into a folder for `shoal up --model`, float32, and print it."""
    with one_line_errors():
        from stack.model_progress import convert_model

        typer.echo(convert_model(file, out))


@keys_app.command("new")
def keys_new(
    tenant: Annotated[str, typer.Option(help="Whose key it is; limits and prefix hits are a tenant's.")],
    file: Annotated[Path, typer.Option(
        envvar=["SHOAL_GATEWAY_API_KEY_FILE", "SHOAL_API_KEY_FILE"], help="Key file of the gateway; made if missing.")],
    name: Annotated[str, typer.Option(help="What the key is called in lists.")] = "",
    requests_per_minute: Annotated[str, typer.Option(metavar="N", help="Limit of the tenant, all keys together.")] = "",
    tokens_per_minute: Annotated[str, typer.Option(metavar="N", help="Limit of the tenant, prompt and output.")] = "",
    models: Annotated[str, typer.Option(help="Models that it is for, with commas between [default: all].")] = "",
    expires: Annotated[str, typer.Option(help="Date or moment of its end, UTC unless it says [default: never].")] = "",
    priority: Annotated[str, typer.Option(metavar="N", help="Its requests run no sooner than those of N.")] = "",
    admin: Annotated[bool, typer.Option("--admin", help="It opens the admin port as well.")] = False,
) -> None:
    """Draw a key and print it, this once; the file gets its digest, and a running gateway takes it within seconds."""
    with one_line_errors():
        from stack.keys import new_key

        typer.echo(new_key(file, {
            "tenant": tenant, "name": name, "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute, "models": models, "expires": expires, "priority": priority,
            "admin": "true" if admin else ""}))


@app.command("collect-env")
def collect_env(as_json: AsJson = False) -> None:
    """What this machine is and has installed, for a report; secrets are masked."""
    from stack.environment import print_environment

    print_environment(as_json)


@app.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench(context: typer.Context) -> None:
    """Measure: `shoal bench AREA [--quick] [--json FILE]`."""
    import importlib

    importlib.import_module("bench.cli").app(args=context.args, prog_name="shoal bench")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
