from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.server_url import NatsServer, masked, open_redis


@pytest.mark.parametrize(("text", "shown"), [
    ("redis://u:secret@h:1/0", "redis://***@h:1/0"),
    ("nats://secret@h:1", "nats://***@h:1"),
    ("redis://:se/cr@et@h/0", "redis://***@h/0"),
    ("rediss://h/0?password=secret&db=1", "rediss://h/0?password=***&db=1"),
    ("redis://h:1/0", "redis://h:1/0"),
])
def test_no_form_of_credentials_is_shown(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(("url", "server"), [
    ("nats://h", NatsServer("nats://h:4222", "", None, "", False)),
    ("h:1", NatsServer("nats://h:1", "", None, "", False)),
    ("tls://u:p%40ss@h:1", NatsServer("tls://h:1", "u", "p@ss", "", True)),
    ("nats://token@h:1", NatsServer("nats://h:1", "token", None, "", False)),
    ("nats://[::1]:1?creds=/run/c.creds", NatsServer("nats://[::1]:1", "", None, "/run/c.creds", False)),
])
def test_a_nats_url_carries_credentials_and_tls(url: str, server: NatsServer) -> None:
    assert NatsServer.parse(url) == server


@pytest.mark.parametrize("url", ["http://u:secret@h", "nats://u:secret@h:port", "nats://u:secret@h?x=1", "nats://"])
def test_what_is_no_nats_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^nats_url: ") as caught:
        NatsServer.parse(url)
    assert "secret" not in caught.value.message


def test_what_is_no_redis_url_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match=r"^redis_url: ") as caught:
        open_redis("http://u:secret@h")
    assert "secret" not in caught.value.message
