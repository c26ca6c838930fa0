from __future__ import annotations

import pytest

from common.host_port import host_of, host_port, without_brackets


@pytest.mark.parametrize(("host", "joined"), [
    ("10.1.2.3", "10.1.2.3:80"), ("decode-0.example", "decode-0.example:80"), ("::1", "[::1]:80")])
def test_an_ipv6_address_has_brackets_before_a_port_and_the_host_comes_back(host: str, joined: str) -> None:
    assert host_port(host, 80) == joined
    assert host_of(joined) == host


def test_brackets_are_taken_off_once() -> None:
    assert [without_brackets(text) for text in ("[::1]", "::1", "h", "")] == ["::1", "::1", "h", ""]
