"""Whole services over TLS, with a token, client certificates, and a NATS and a Valkey that ask for a password."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from common import rpc
from common.clients.channels import ChannelPool
from common.errors import InternalError, Unavailable
from common.registry import RedisRegistry
from common.wire_security import PLAINTEXT, WireSecurity
from proto import router_pb2, router_pb2_grpc
from stack.__main__ import app
from stack.api_client import ApiClient
from stack.healthcheck import check
from tests.certificates import Ca
from tests.factories import tiny_llama
from tests.secured_servers import SecuredServer
from tests.stack import RunningStack

SECRET, TOKEN = "p4ss-of-the-servers", "token-of-the-services"
NAME = "shoal.internal"
PROMPT = "All the services of this deployment know each other by certificate and by token. " * 12


@dataclass(frozen=True)
class Secured:
    stack: RunningStack
    ca: Path
    env: dict[str, str]
    redis_url: str

    @property
    def model(self) -> str:
        return self.stack.model


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    ca = Ca(folder)
    cert, key = ca.issue("service", (NAME,))
    http_cert, http_key = ca.issue("gateway")
    token_file = folder / "token"
    token_file.write_text(TOKEN + "\n")
    env = {"SHOAL_TLS_CERT": str(cert), "SHOAL_TLS_KEY": str(key), "SHOAL_TLS_CA": str(ca.path),
           "SHOAL_TLS_CLIENT_AUTH": "true", "SHOAL_TLS_SERVER_NAME": NAME, "SHOAL_SERVICE_TOKEN_FILE": str(token_file)}
    with (SecuredServer("nats", folder / "nats", "--user", "shoal", "--pass", SECRET) as nats,
          SecuredServer("valkey", folder / "valkey", "--requirepass", SECRET) as valkey):
        redis_url = f"redis://:{SECRET}@127.0.0.1:{valkey.port}/0"
        env["SHOAL_ROUTER_HANDOFF_PATIENCE"] = "1000"  # prompts are handed off, however slow this machine is
        urls = {"SHOAL_NATS_URL": f"nats://shoal:{SECRET}@127.0.0.1:{nats.port}", "SHOAL_REDIS_URL": redis_url}
        with RunningStack(
            folder, runner="torch", model=tiny_llama(folder / "tiny", tokenizer_from=smollm2), prefill=1, decode=1,
            transport="grpc", ssl_certfile=str(http_cert), ssl_keyfile=str(http_key), env={**env, **urls},
        ) as stack:
            yield Secured(stack, ca.path, {**env, **urls}, redis_url)


def test_a_request_goes_through_every_service_over_tls(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routed, prefilled elsewhere, pushed by gRPC, streamed back: each hop with certificate and token."""
    monkeypatch.setenv("SHOAL_TLS_CA", str(secured.ca))
    assert secured.stack.url.startswith("https://")
    with ApiClient(secured.stack.url) as client:
        body = {"model": secured.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        whole = client.call("POST", "/v1/completions", body)
        assert whole[0] == 200, whole
        assert whole[1]["usage"]["completion_tokens"] == 8
        events = [event for event in client.stream("/v1/completions", body) if event is not None]
        for number in range(10):  # a router that has just started may not know the prefill worker yet
            if secured.stack.metrics("prefill-0")["shoal_kv_sent_bytes_total"]:
                break
            assert client.call("POST", "/v1/completions", {**body, "prompt": f"{number}: {PROMPT}"})[0] == 200
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == whole[1]["choices"][0]["text"]
    assert secured.stack.metrics("prefill-0")["shoal_kv_sent_bytes_total"] > 0
    assert secured.stack.metrics("router-0")["shoal_router_degraded"] == 0


def test_plain_http_and_an_unknown_ca_get_no_answer(secured: Secured) -> None:
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(secured.stack.url.replace("https:", "http:") + "/health", timeout=5)
    with pytest.raises(httpx2.HTTPError, match="certificate verify failed"):
        httpx2.get(secured.stack.url + "/health", timeout=5, verify=ssl.create_default_context())


async def _route(secured: Secured, security: WireSecurity) -> router_pb2.RouteResponse:
    registry = await RedisRegistry.connect(secured.redis_url, 5)
    address = next(r.address for r in await registry.list() if r.service == "router")
    await registry.close()
    channels = ChannelPool(security)
    try:
        return await router_pb2_grpc.RouterStub(channels.get(address)).Route(router_pb2.RouteRequest(), timeout=5)
    finally:
        await channels.close()


def test_a_stranger_is_told_why_it_is_refused(secured: Secured) -> None:
    cert, key = (Path(secured.env[name]).read_bytes() for name in ("SHOAL_TLS_CERT", "SHOAL_TLS_KEY"))
    known = {"ca": secured.ca.read_bytes(), "cert": cert, "key": key, "server_name": NAME}
    for security, message in (
        (PLAINTEXT, "cannot be reached"),
        (WireSecurity(ca=known["ca"], server_name=NAME, tokens=(TOKEN,)), "cannot be reached"),  # no certificate
        (WireSecurity(**known), "the call has none"),
        (WireSecurity(**known, tokens=("token-of-somebody",)), "is not the one of this service"),
    ):
        with pytest.raises(Unavailable, match=message):
            asyncio.run(_route(secured, security))


def test_no_secret_is_printed_logged_or_on_a_command_line(secured: Secured) -> None:
    state = secured.stack.state
    shown = {path.name: path.read_text(errors="replace") for path in Path(state.log_dir).glob("*.log")}
    shown["up"] = secured.stack.process.printed()
    shown["collect-env"] = _shoal(secured, "collect-env").stdout
    shown["status"] = _shoal(secured, "status", "--state-dir", str(secured.stack.process.state_dir)).stdout
    shown |= {name: Path(f"/proc/{process.pid}/cmdline").read_text() for name, process in state.processes.items()}
    assert "router-0" in shown["status"]
    assert "SHOAL_REDIS_URL" in shown["collect-env"]
    for name, text in shown.items():
        assert SECRET not in text, name
        assert TOKEN not in text, name


def _shoal(secured: Secured, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "stack", *argv], capture_output=True, text=True, check=True,
                          timeout=60, env={**os.environ, **secured.env})


@pytest.mark.parametrize(("argv", "message"), [
    (["tokenizer_svc", "--models", "m=/none"], "tokenizer: host='0.0.0.0': not a loopback address"),
    (["gateway"], "gateway: host='0.0.0.0': not a loopback address"),
])
def test_a_start_in_plaintext_beyond_loopback_is_refused_in_one_line(argv: list[str], message: str) -> None:
    ended = subprocess.run([sys.executable, "-m", *argv, "--host", "0.0.0.0"], capture_output=True, text=True,
                           check=False, timeout=60)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith(message)


def test_shoal_up_is_refused_in_plaintext_beyond_loopback_before_it_starts_anything() -> None:
    ended = CliRunner().invoke(app, ["up", "--host", "0.0.0.0"])
    assert ended.exit_code == 2
    assert ended.stderr.startswith("shoal: host='0.0.0.0': not a loopback address")


def test_the_health_check_of_a_container_speaks_tls_where_the_service_does(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = secured.stack.service("tokenizer-0").address
    with pytest.raises(Unavailable, match="UNAVAILABLE"):
        check(address, "", "", 5)
    for name, value in secured.env.items():
        monkeypatch.setenv(name, value)
    check(address, "", "", 5)


async def test_a_service_answers_probes_in_plaintext_on_its_health_port_alone(tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from common.registry import MemoryRegistry
    from common.service_host import LIVE, ServiceHost
    from router_svc.config import RouterConfig
    from stack.ports import free_port

    ca = Ca(tmp_path)
    cert, key = ca.issue("service")
    port = free_port("127.0.0.1")
    host = ServiceHost(RouterConfig(tls_cert=str(cert), tls_key=str(key), tls_ca=str(ca.path), service_token=TOKEN,
                                    health_port=port), MemoryRegistry())
    await host.listen()
    channel = rpc.open_channel(f"127.0.0.1:{port}")
    stub = health_pb2_grpc.HealthStub(channel)

    async def status(name: str) -> int:
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status)

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await status(LIVE), await status("")) == (serving, not_serving)
    await host.register()
    assert (await status(LIVE), await status("")) == (serving, serving)
    await host.begin_drain()
    assert (await status(LIVE), await status("")) == (serving, not_serving)
    with pytest.raises(InternalError, match="UNIMPLEMENTED"):
        await channel.unary_unary("/shoal.v1.Router/Route")(b"")
    await channel.close()
    await host.close()
