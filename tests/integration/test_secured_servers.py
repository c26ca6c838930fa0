"""NATS and Valkey that ask for credentials and TLS: what the URLs carry, and what a refused service says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.bus import NatsBus
from common.errors import ShoalError, Unavailable
from common.registry import RedisRegistry
from common.service_record import ServiceRecord
from tests.certificates import Ca
from tests.delay_proxy import DelayProxy
from tests.secured_servers import SecuredServer, nats_with_jwt

SECRET = "p@ss/word"
QUOTED = "p%40ss%2Fword"


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Ca:
    return Ca(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def nats_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    with SecuredServer("nats", tmp_path_factory.mktemp("nats"), "--user", "shoal", "--pass", SECRET) as server:
        yield server


@pytest.fixture(scope="module")
def valkey_password(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    with SecuredServer("valkey", tmp_path_factory.mktemp("valkey"), "--requirepass", SECRET) as server:
        yield server


async def bus_works(url: str, ca: str = "") -> None:
    bus = await NatsBus.connect(url, "test", 5, ca)
    heard = asyncio.Event()

    async def on_message(_subject: str, _payload: bytes) -> None:
        heard.set()

    try:
        await bus.subscribe("a", on_message)
        await bus.publish("a", b"x")
        async with asyncio.timeout(5):
            await heard.wait()
    finally:
        await bus.close()


async def registry_works(url: str, ca: str = "") -> None:
    registry = await RedisRegistry.connect(url, 5, ca)
    try:
        lease = await registry.register(ServiceRecord("demo", "d0", "i0", "h:1"), 5)
        assert [record.service_id for record in await registry.list()] == ["d0"]
        await lease.release()
    finally:
        await registry.close()


async def test_the_bus_signs_in_with_user_and_password(nats_user: SecuredServer) -> None:
    await bus_works(f"nats://shoal:{QUOTED}@127.0.0.1:{nats_user.port}")


@pytest.mark.parametrize("user_info", ["", "shoal:wrong@", "wrong@"])
async def test_a_bus_without_the_right_password_says_that_it_was_refused(
    nats_user: SecuredServer, user_info: str
) -> None:
    with pytest.raises(Unavailable, match=r"(?i)NATS at 127.0.0.1:.*authorization violation") as caught:
        await NatsBus.connect(f"nats://{user_info}127.0.0.1:{nats_user.port}", "test", 1)
    assert "wrong" not in caught.value.message


async def test_the_bus_signs_in_with_a_token(tmp_path: Path) -> None:
    with SecuredServer("nats", tmp_path, "--auth", SECRET) as server:
        await bus_works(f"nats://{QUOTED}@127.0.0.1:{server.port}")


async def test_the_bus_signs_in_with_a_creds_file(tmp_path: Path) -> None:
    arguments, creds = nats_with_jwt(tmp_path / "jwt")
    with SecuredServer("nats", tmp_path / "data", *arguments) as server:
        await bus_works(f"nats://127.0.0.1:{server.port}?creds={creds}")
        with pytest.raises(ShoalError, match="creds file '/none': No such file"):
            await NatsBus.connect(f"nats://127.0.0.1:{server.port}?creds=/none", "test", 1)


async def test_the_bus_speaks_tls_with_a_server_that_its_ca_knows(tmp_path: Path, ca: Ca) -> None:
    cert, key = ca.issue("nats")
    tls = ("--tls", "--tlscert", str(cert), "--tlskey", str(key), "--user", "shoal", "--pass", SECRET)
    with SecuredServer("nats", tmp_path, *tls) as server:
        url = f"tls://shoal:{QUOTED}@127.0.0.1:{server.port}"
        await bus_works(url, str(ca.path))
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await NatsBus.connect(url, "test", 1, str(Ca(tmp_path, "other").path))


async def test_a_password_is_not_sent_in_plaintext_where_the_url_says_tls(nats_user: SecuredServer, ca: Ca) -> None:
    for user_info in (f"shoal:{QUOTED}@", f"{QUOTED}@"):
        with pytest.raises(Unavailable, match="offers no TLS"):
            await NatsBus.connect(f"tls://{user_info}127.0.0.1:{nats_user.port}", "test", 1, str(ca.path))


async def test_a_server_without_tls_is_refused_where_the_url_says_tls(tmp_path: Path, ca: Ca) -> None:
    with SecuredServer("nats", tmp_path) as server, pytest.raises(Unavailable, match="offers no TLS"):
        await NatsBus.connect(f"tls://127.0.0.1:{server.port}", "test", 1, str(ca.path))


async def test_the_registry_signs_in_with_a_password(valkey_password: SecuredServer) -> None:
    await registry_works(f"redis://:{QUOTED}@127.0.0.1:{valkey_password.port}/0")


@pytest.mark.parametrize("user_info", ["", ":wrong@", "someone:wrong@"])
async def test_a_registry_without_the_right_password_says_so_at_once(
    valkey_password: SecuredServer, user_info: str
) -> None:
    with pytest.raises(Unavailable, match=r"Redis at 127.0.0.1:\d+/0 refused the credentials: ") as caught:
        await RedisRegistry.connect(f"redis://{user_info}127.0.0.1:{valkey_password.port}/0", 60)
    assert ":wrong" not in caught.value.message


async def test_the_registry_speaks_tls_with_a_server_that_its_ca_knows(
    valkey_password: SecuredServer, ca: Ca, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ca.issue("valkey"))
    async with DelayProxy(valkey_password.port, 0, context) as proxy:
        url = f"rediss://:{QUOTED}@127.0.0.1:{proxy.port}/0"
        await registry_works(url, str(ca.path))
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await RedisRegistry.connect(url, 0.3, str(Ca(tmp_path, "other").path))
