"""Real gRPC over real TLS: who is let in, and what the others are told."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from common import rpc
from common.clients.channels import ChannelPool
from common.clients.kv_push import GrpcPusher
from common.errors import Unavailable
from common.hand_off import GRPC, PrefillOrder, Ticket
from common.wire_security import PLAINTEXT, WireSecurity
from proto import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, router_pb2, router_pb2_grpc
from tests.certificates import Ca

TOKEN, OTHER_TOKEN = "0123456789abcdef-1", "0123456789abcdef-2"


class Echo(router_pb2_grpc.RouterServicer, decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.KvTransferServicer):
    """A call of each kind: unary, both ways streamed, streamed up."""

    async def Route(self, request: Any, context: Any) -> router_pb2.RouteResponse:  # noqa: N802
        return router_pb2.RouteResponse()

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[decode_pb2.StepBatch]:  # noqa: N802
        yield decode_pb2.StepBatch(step_id=7)

    async def Push(self, request_iterator: Any, context: Any) -> prefill_pb2.KvChunkAck:  # noqa: N802
        return prefill_pb2.KvChunkAck(num_bytes=sum([len(chunk.payload) async for chunk in request_iterator]))


@asynccontextmanager
async def served(security: WireSecurity) -> AsyncIterator[str]:
    server, health, echo = rpc.new_server(security), HealthServicer(), Echo()
    router_pb2_grpc.add_RouterServicer_to_server(echo, server)
    decode_pb2_grpc.add_DecodeServicer_to_server(echo, server)
    prefill_pb2_grpc.add_KvTransferServicer_to_server(echo, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0', security)}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def call_all(address: str, security: WireSecurity) -> None:
    """A call of each kind, as our clients make them; raises what the first that fails raises."""
    channels = ChannelPool(security)
    try:
        channel = channels.get(address)
        await router_pb2_grpc.RouterStub(channel).Route(router_pb2.RouteRequest(), timeout=5)
        batches = decode_pb2_grpc.DecodeStub(channel).Generate(_no_commands(), timeout=5)
        assert [batch.step_id async for batch in batches] == [7]
        await GrpcPusher(order_to(address), channels).push(0, [memoryview(b"block")])
    finally:
        await channels.close()


def order_to(address: str) -> PrefillOrder:
    ticket = Ticket(GRPC, "decode-0", "i", address, "", block_bytes=64, num_blocks=1)
    return PrefillOrder("t", 1, "m", (1, 2), (), 0, ticket, 5.0)


async def _no_commands() -> AsyncIterator[decode_pb2.GenerateCommand]:
    return
    yield


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> WireSecurity:
    folder = tmp_path_factory.mktemp("tls")
    ca = Ca(folder)
    cert, key = ca.issue("service", ("shoal.internal",))
    return WireSecurity(ca.path.read_bytes(), cert.read_bytes(), key.read_bytes(), False, "shoal.internal", (TOKEN,))


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> WireSecurity:
    folder = tmp_path_factory.mktemp("other")
    ca = Ca(folder, "other-ca")
    cert, key = ca.issue("service", ("shoal.internal",))
    return WireSecurity(ca.path.read_bytes(), cert.read_bytes(), key.read_bytes(), False, "shoal.internal", (TOKEN,))


async def test_calls_of_every_kind_go_over_tls_with_the_token(security: WireSecurity) -> None:
    async with served(security) as address:
        await call_all(address, security)


async def test_a_client_of_another_ca_or_in_plaintext_or_of_another_name_is_refused(
    security: WireSecurity, other_ca: WireSecurity
) -> None:
    async with served(security) as address:
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await call_all(address, other_ca)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await call_all(address, dataclasses.replace(PLAINTEXT, tokens=security.tokens))
        with pytest.raises(Unavailable, match="Hostname Verification Check failed"):
            await call_all(address, dataclasses.replace(security, server_name="other.internal"))


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize(("tokens", "message"), [((), "the call has none"), ((OTHER_TOKEN,), "is not the one")])
async def test_a_call_without_the_token_is_told_why(
    security: WireSecurity, tls: bool, tokens: tuple[str, ...], message: str
) -> None:
    mine = security if tls else WireSecurity(tokens=security.tokens)
    async with served(mine) as address:
        with pytest.raises(Unavailable, match=f"refused this caller: .*{message}") as caught:
            await call_all(address, dataclasses.replace(mine, tokens=tokens))
        assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
        assert caught.value.__cause__.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("tokens", [(), (OTHER_TOKEN,)])
async def test_streams_without_the_token_are_refused_before_their_handler(
    security: WireSecurity, tokens: tuple[str, ...]
) -> None:
    async with served(security) as address:
        channels = ChannelPool(dataclasses.replace(security, tokens=tokens))
        call = decode_pb2_grpc.DecodeStub(channels.get(address)).Generate(_no_commands(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(Unavailable, match="refused this caller"):
            await GrpcPusher(order_to(address), channels).push(0, [memoryview(b"block")])
        await channels.close()


async def test_an_old_token_is_accepted_while_it_is_listed(security: WireSecurity) -> None:
    async with served(dataclasses.replace(security, tokens=(OTHER_TOKEN, TOKEN))) as address:
        await call_all(address, security)


async def test_the_token_goes_to_other_machines_over_tls_alone_unless_plaintext_is_allowed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "is_loopback", lambda host: host == "::1")  # this machine plays another one
    mine = WireSecurity(tokens=(TOKEN,))
    async with served(mine) as address:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await call_all(address, mine)
        await call_all(address, dataclasses.replace(mine, insecure=True))


async def test_health_needs_no_token(security: WireSecurity) -> None:
    async with served(security) as address:
        channels = ChannelPool(dataclasses.replace(security, tokens=()))
        answer = await health_pb2_grpc.HealthStub(channels.get(address)).Check(
            health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await channels.close()


async def test_with_client_auth_a_caller_must_show_a_certificate_of_the_ca(
    security: WireSecurity, other_ca: WireSecurity
) -> None:
    async with served(dataclasses.replace(security, client_auth=True)) as address:
        await call_all(address, security)
        for cert, key in ((b"", b""), (other_ca.cert, other_ca.key)):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await call_all(address, dataclasses.replace(security, cert=cert, key=key))


def test_no_other_module_opens_a_channel_or_a_port_by_itself() -> None:
    """Credentials are added in one place; a health check of a container, which loads little, is the other."""
    root = Path(__file__).parents[3]
    services = ("common", "gateway", "tokenizer_svc", "router_svc", "prefill_svc", "decode_svc", "kvstore_svc", "stack")
    paths = [path for name in services for path in (root / name).rglob("*.py")]
    sources = {str(path.relative_to(root)): path.read_text() for path in paths}
    raw = {name for name, text in sources.items() if "secure_channel(" in text or "secure_port(" in text}
    assert raw == {"common/rpc.py", "stack/healthcheck.py"}
    assert {name for name, text in sources.items() if "open_channel(" in text} == {
        "common/rpc.py", "common/clients/channels.py"}
