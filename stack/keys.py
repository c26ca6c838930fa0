"""`shoal keys new`: draws an API key, shows it once and keeps its digest in the gateway's key file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError
from gateway.tenants.key_file import (
    KeyEntry,
    digest_of,
    distinct,
    entry_line,
    limits_by_tenant,
    parse_key_file,
    read_key_file,
)

_PREFIX = "sk-shoal-"


def new_key(file: Path, facts: Mapping[str, str]) -> str:
    """Append a new key with these fields of a key line, and return the key. The file is made if there is none.

    Raises `ConfigError`, and changes nothing, for a field that is wrong or a file that the gateway would not take.
    """
    key = _PREFIX + secrets.token_urlsafe(32)
    said = {name: value for name, value in facts.items() if value}
    for name, value in said.items():
        if any(character.isspace() for character in value):
            raise ConfigError(f"{name}={value!r}: must hold no space", param=name)
    words = [f"{name}={value}" for name, value in said.items()]
    (entry,) = _parsed(" ".join((f"sha256:{digest_of(key.encode()).hex()}", *words)).encode(), "the new key")
    old = read_key_file(str(file)) if file.exists() else b""
    new = (b"\n" if old and not old.endswith(b"\n") else b"") + entry_line(entry).encode() + b"\n"
    _parsed(old + new, str(file))
    _append(file, new)
    return key


def _parsed(content: bytes, file: str) -> tuple[KeyEntry, ...]:
    """All that a gateway checks when it takes the file."""
    entries = distinct(parse_key_file(content, file))
    limits_by_tenant(entries)
    return entries


def _append(file: Path, line: bytes) -> None:
    """In one write, so that a gateway that reads meanwhile sees the line whole or not at all."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
