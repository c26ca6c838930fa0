from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.tenants.key_ring import KeyRing
from stack.__main__ import app


def keys_new(*argv: str) -> Result:
    return CliRunner().invoke(app, ["keys", "new", *argv])


def test_a_new_key_is_printed_once_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old-key")  # without a line end
    made = keys_new("--tenant", "acme", "--file", str(file), "--name", "laptop", "--requests-per-minute", "60",
                    "--tokens-per-minute", "1000", "--models", "a,b", "--expires", "2099-01-31", "--priority", "3",
                    "--admin")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key not in file.read_text()
    ring = KeyRing("", str(file))
    caller = ring.find(key.encode())
    assert (caller.tenant.name, caller.priority, caller.is_admin) == ("acme", 3, True)
    assert caller.models == {"a", "b"}
    assert (caller.tenant.limits.requests_per_minute, caller.tenant.limits.tokens_per_minute) == (60, 1000)
    assert ring.find(b"old-key").tenant.name == "default"


def test_a_missing_file_is_made_for_its_owner_alone_and_each_key_is_another(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first, second = (keys_new("--tenant", "t", "--file", str(file)).stdout.strip() for _ in range(2))
    assert first != second
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ring = KeyRing("", str(file))
    assert ring.find(first.encode()) == ring.find(second.encode())


@pytest.mark.parametrize(("flags", "named"), [
    (("--tenant", "a b"), "tenant"), (("--tenant", "t", "--models", "a\nplain-key"), "models"),
    (("--tenant", "t", "--requests-per-minute", "0"), "requests_per_minute"),
    (("--tenant", "t", "--expires", "soon"), "expires"),
    (("--tenant", "acme", "--requests-per-minute", "6"), "requests_per_minute")])
def test_a_key_that_the_gateway_would_not_take_is_not_written(
    tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    file = tmp_path / "keys"
    assert keys_new("--tenant", "acme", "--file", str(file), "--requests-per-minute", "5").exit_code == 0
    before = file.read_bytes()
    refused = keys_new("--file", str(file), *flags)
    assert refused.exit_code == 2
    assert named in refused.stderr
    assert refused.stdout == ""
    assert file.read_bytes() == before
