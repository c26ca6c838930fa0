"""The flags of `shoal bench serve`, named as in `vllm bench serve` where both have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bench.serve.options import DatasetOptions

_QUICK = {"num_prompts": 16, "input_len": 64, "output_len": 16}
_QUICK_CONCURRENCY, _QUICK_SECONDS = 4, 30.0


def serve(
    url: Annotated[list[str] | None, typer.Argument(
        metavar="[URL]", help="Server to load; default: the stack that runs here.")] = None,
    dataset_name: Annotated[str, typer.Option(
        help="random, mixed, poisson, shared_prefix, interference, multi_turn, custom or timed_trace.")] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="JSONL of custom or timed_trace.")] = None,
    num_prompts: Annotated[int | None, typer.Option(
        help="Requests; conversations of multi_turn, long prompts of interference [default: the workload's].")] = None,
    input_len: Annotated[int | None, typer.Option(
        help="Prompt tokens: of random each, of poisson the mean; what is new in shared_prefix, multi_turn.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Tokens to generate; of poisson the mean.")] = None,
    prefix_len: Annotated[int | None, typer.Option(help="Shared tokens of shared_prefix and multi_turn.")] = None,
    num_turns: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = 4,
    think_time_s: Annotated[float, typer.Option(min=0, help="Between an answer and the next turn.")] = 0.0,
    duration_s: Annotated[float, typer.Option(min=0.1, help="How long requests arrive, of poisson.")] = 20.0,
    num_streams: Annotated[int, typer.Option(min=1, help="Steady streams of interference.")] = 64,
    long_prompt_every_s: Annotated[float, typer.Option(min=0, help="Gap of the long prompts of interference.")] = 0.5,
    vocab_size: Annotated[int, typer.Option(
        min=0, help="Token ids are below it; 0: as --tokenizer, or a known model's folder, says, else 151936.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the workload and the arrivals.")] = None,
    request_rate: Annotated[float, typer.Option(help="Per second, an open loop; inf: no limit.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: bursts; inf: even gaps.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most requests at once, a closed loop.")] = None,
    endpoint_type: Annotated[str, typer.Option(
        help="openai: /v1/completions with token ids; openai-chat: /v1/chat/completions.")] = "openai",
    model: Annotated[str, typer.Option(help="Default: the first that the server lists.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Folder of the model's tokenizer, for --vocab-size.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: the server's.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate --output-len tokens.")] = False,
    extra_body: Annotated[str, typer.Option(help="JSON object that is added to each request.")] = "{}",
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the run, with prompts of their own.")] = 0,
    deadline_s: Annotated[float, typer.Option(help="A request that takes longer is aborted.")] = 600.0,
    max_seconds: Annotated[float, typer.Option(help="The run ends then, with the results so far.")] = float("inf"),
    client_lag_limit_ms: Annotated[float, typer.Option(help="Warn when the client itself is later (p99).")] = 10.0,
    goodput: Annotated[list[str] | None, typer.Option(
        help="Limits in ms: --goodput ttft:500 tpot:30 e2el:9000.")] = None,
    metric_percentiles: Annotated[str, typer.Option(help="Comma-separated.")] = "50,90,95,99",
    label: Annotated[str, typer.Option(help="For the result file.")] = "",
    api_key: Annotated[str, typer.Option(envvar=["OPENAI_API_KEY", "SHOAL_API_KEY"], help="Key of the server.")] = "",
    state_dir: Annotated[Path | None, typer.Option(help="State folder of the stack, without a URL.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures, as all areas do.")] = None,
    result_file: Annotated[Path | None, typer.Option("--result", help="Write vLLM's result JSON.")] = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="With one entry a request in it.")] = False,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a PNG (needs the extra bench).")] = None,
    client_capacity: Annotated[bool, typer.Option(
        "--client-capacity", help="Measure only how many chunks per second this client can read.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small run, at most 40 s on 2 cores.")] = False,
) -> None:
    """Load a server that speaks the OpenAI API, open or closed loop, and measure what clients see."""
    from stack.__main__ import one_line_errors

    with one_line_errors():
        from bench.serve.options import DatasetOptions, ServeOptions, parse_goodput, parse_percentiles
        from bench.serve.runner import Files, run
        from stack.api_client import gateway_url

        if client_capacity:
            _capacity(json_file, quick)
            return
        dataset = DatasetOptions(
            dataset_name, dataset_path, num_prompts, input_len, output_len, prefix_len, num_turns, think_time_s,
            duration_s, num_streams, long_prompt_every_s, vocab_size, seed)
        if quick:
            dataset = _smaller(dataset)
            max_concurrency, max_seconds = max_concurrency or _QUICK_CONCURRENCY, min(max_seconds, _QUICK_SECONDS)
            ignore_eos = True
        given, limits = _split(url or [], goodput or [])
        at = gateway_url(given, state_dir)
        options = ServeOptions(
            url=at, model=model or _first_model(at, api_key), dataset=dataset, endpoint_type=endpoint_type,
            request_rate=request_rate, burstiness=burstiness, max_concurrency=max_concurrency,
            num_warmups=num_warmups, temperature=temperature, ignore_eos=ignore_eos, extra_body=_object(extra_body),
            api_key=api_key, deadline_s=deadline_s, max_seconds=max_seconds, lag_limit_ms=client_lag_limit_ms,
            percentiles=parse_percentiles(metric_percentiles), goodput=parse_goodput(limits), label=label,
            tokenizer=tokenizer)
        raise typer.Exit(run(options, Files(json_file, result_file, plot_file, save_detailed)))


def _split(arguments: list[str], goodput: list[str]) -> tuple[str, list[str]]:
    """The URL, and the limits with those that stand behind `--goodput LIMIT` and so look like arguments."""
    from common.errors import ConfigError

    more = [argument for argument in arguments if argument.partition(":")[0] in ("ttft", "tpot", "e2el")]
    urls = [argument for argument in arguments if argument not in more]
    if len(urls) > 1 or (more and not goodput):
        raise ConfigError(f"one URL at most, got {' '.join(arguments)}", param="url")
    return "".join(urls), [*goodput, *more]


def _smaller(dataset: DatasetOptions) -> DatasetOptions:
    """What was not asked for becomes small."""
    from dataclasses import replace

    small: dict[str, Any] = {name: value for name, value in _QUICK.items() if getattr(dataset, name) is None}
    if dataset.name == "mixed":
        small = {"num_prompts": dataset.num_prompts or 4}
    if dataset.name in ("shared_prefix", "multi_turn") and dataset.prefix_len is None:
        small["prefix_len"] = 128
    if dataset.name == "multi_turn" and dataset.num_prompts is None:
        small["num_prompts"] = 6
    return replace(dataset, **small)


def _capacity(json_file: Path | None, quick: bool) -> None:
    from bench.figures import report
    from bench.serve.capacity import measure

    report("shoal bench serve: the client alone", measure(quick=quick), json_file)


def _first_model(url: str, api_key: str) -> str:
    from common.errors import Unavailable
    from stack.api_client import ApiClient

    with ApiClient(url, api_key) as api:
        models = api.models()
    if not models:
        raise Unavailable(f"{url} lists no model")
    return models[0]


def _object(text: str) -> dict[str, Any]:
    from common.errors import ConfigError

    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body: {error}", param="extra_body") from None
    if not isinstance(parsed, dict):
        raise ConfigError("--extra-body: must be a JSON object", param="extra_body")
    return parsed
