"""The file of API keys: one key a line, as a SHA-256 digest with what it allows, or plain.

    # a comment
    sha256:<64 hex digits> tenant=acme name=laptop models=a,b expires=2027-01-31 priority=5 admin=true
    sha256:<64 hex digits> tenant=acme requests_per_minute=600 tokens_per_minute=100000
    a-plain-key

Limits are the tenant's: they may stand on any of its lines, and lines that name one must agree. All else is the key's
own. A plain key is of the tenant `default`. A digest needs no salt: the keys that we draw are 256 random bits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from common.errors import ConfigError
from gateway.tenants.tenant import DEFAULT_TENANT, RateLimits

NO_LIMITS: Final = RateLimits()
MIN_KEY_CHARS: Final = 4
MAX_KEYS: Final = 10_000
MAX_TENANTS: Final = 1_000  # each is a label of a few metrics
MAX_FILE_BYTES: Final = 8 * 1024 * 1024
MAX_REQUESTS_PER_MINUTE: Final = 1_000_000
MAX_TOKENS_PER_MINUTE: Final = 100_000_000  # the counts in Redis stay whole numbers below 2**53
MAX_PRIORITY: Final = 1_000
_HASHED: Final = "sha256:"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODEL: Final = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key. `limits` are what its line says of its tenant's. `line` is 0 for a key that comes from no file."""

    digest: bytes = field(repr=False)  # SHA-256 of the key
    tenant: str = DEFAULT_TENANT
    name: str = ""
    limits: RateLimits = NO_LIMITS
    models: frozenset[str] | None = None
    expires: datetime | None = None  # the first moment at which it is no longer accepted
    priority: int | None = None
    is_admin: bool = False
    line: int = field(default=0, compare=False)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def plain_entry(key: str, where: str, line: int = 0) -> KeyEntry:
    """Raises `ConfigError`, which does not show the key, for one that no header can carry.

    And for one that says it is a digest, or in the file (`line` > 0) looks like one: taken for a key, the digest would
    open the gateway itself.
    """
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{where}: a key must have at least {MIN_KEY_CHARS} printable ASCII characters and no space",
            param=where.partition("=")[0])
    if key.lower().startswith(_HASHED) or (line and _DIGEST.fullmatch(key.lower())):
        raise ConfigError(
            f"{where}: looks like the digest of a key and not like a key; a digest follows {_HASHED} in lower case",
            param=where.partition("=")[0])
    return KeyEntry(digest_of(key.encode()), line=line)


def read_key_file(file: str) -> bytes:
    """Raises `ConfigError` for a file that cannot be read or is too large."""
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"api_key_file={file!r}: {error.strerror or error}", param="api_key_file") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file={file!r}: larger than {MAX_FILE_BYTES} bytes", param="api_key_file")
    return content


def parse_key_file(content: bytes, file: str) -> tuple[KeyEntry, ...]:
    """All keys of the file; at least one. Raises `ConfigError` naming the line, without any key."""
    where = f"api_key_file={file!r}"
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8 text", param="api_key_file") from None
    entries = [_entry(line.strip(), f"{where} line {number}", number) for number, line in enumerate(lines, 1)
               if line.strip() and not line.strip().startswith("#")]
    if not entries:
        raise ConfigError(f"{where}: holds no key", param="api_key_file")
    return tuple(entries)


def distinct(entries: Iterable[KeyEntry]) -> tuple[KeyEntry, ...]:
    """Each key once. Raises `ConfigError` for a key that is there twice with different facts, and for too many."""
    kept: dict[bytes, KeyEntry] = {}
    for entry in entries:
        known = kept.setdefault(entry.digest, entry)
        if known != entry:
            raise ConfigError(f"api_key_file: line {entry.line} is the key of line {known.line} again, with other facts"
                              if known.line else f"api_key_file: line {entry.line} is a key of api_keys, which allow "
                              "everything", param="api_key_file")
    if len(kept) > MAX_KEYS:
        raise ConfigError(f"api_key_file: at most {MAX_KEYS} keys, not {len(kept)}", param="api_key_file")
    return tuple(kept.values())


def limits_by_tenant(entries: Iterable[KeyEntry]) -> dict[str, RateLimits]:
    """The limits of each tenant. Raises `ConfigError` where two lines of one tenant differ, and for too many."""
    merged: dict[str, RateLimits] = {}
    for entry in entries:
        known = merged.setdefault(entry.tenant, entry.limits)
        merged[entry.tenant] = RateLimits(**{
            name: _agreed(name, getattr(known, name), getattr(entry.limits, name), entry)
            for name in ("requests_per_minute", "tokens_per_minute")})
    if len(merged) > MAX_TENANTS:
        raise ConfigError(f"api_key_file: at most {MAX_TENANTS} tenants, not {len(merged)}", param="api_key_file")
    return merged


def entry_line(entry: KeyEntry) -> str:
    """The line that `parse_key_file` reads as this entry."""
    facts: dict[str, Any] = {
        "tenant": entry.tenant, "name": entry.name or None, "requests_per_minute": entry.limits.requests_per_minute,
        "tokens_per_minute": entry.limits.tokens_per_minute,
        "models": None if entry.models is None else ",".join(sorted(entry.models)),
        "expires": entry.expires.isoformat() if entry.expires else None, "priority": entry.priority,
        "admin": "true" if entry.is_admin else None}
    said = " ".join(f"{name}={value}" for name, value in facts.items() if value is not None)
    return f"{_HASHED}{entry.digest.hex()} {said}"


def _agreed(name: str, known: int | None, said: int | None, entry: KeyEntry) -> int | None:
    if known is not None and said is not None and known != said:
        raise ConfigError(
            f"api_key_file line {entry.line}: {name}={said} of tenant {entry.tenant!r}, and another of its lines "
            f"says {known}", param="api_key_file")
    return known if said is None else said


def _entry(line: str, where: str, number: int) -> KeyEntry:
    if not line.startswith(_HASHED):
        return plain_entry(line, where, number)
    digest, *words = line.removeprefix(_HASHED).split() or [""]
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: {_HASHED} must be followed by 64 hex digits in lower case", param="api_key_file")
    facts: dict[str, Any] = {}
    for number_of_word, word in enumerate(words, 2):
        name, _, text = word.partition("=")
        if name not in _FIELDS:  # not shown: where a line end is missing, it is the next key
            raise ConfigError(f"{where}: word {number_of_word} is no field; known are {', '.join(_FIELDS)}",
                              param="api_key_file")
        if name in facts:
            raise ConfigError(f"{where}: {name} is there twice", param="api_key_file")
        try:
            facts[name] = _FIELDS[name](text)
        except ValueError as error:
            raise ConfigError(f"{where}: {name}: {error}", param="api_key_file") from None
    limits = RateLimits(facts.pop("requests_per_minute", None), facts.pop("tokens_per_minute", None))
    return KeyEntry(bytes.fromhex(digest), limits=limits, is_admin=facts.pop("admin", False), line=number, **facts)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit")
    return text


def _models(text: str) -> frozenset[str]:
    models = text.split(",")
    if not all(_MODEL.fullmatch(model) for model in models):
        raise ValueError("must be model names with commas between them")
    return frozenset(models)


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("must be a date (2027-01-31) or a moment (2027-01-31T12:00:00Z)") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def _whole(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return int(text)
    return number


_FIELDS: Final[dict[str, Callable[[str], Any]]] = {
    "tenant": _name, "name": _name, "requests_per_minute": _whole(1, MAX_REQUESTS_PER_MINUTE),
    "tokens_per_minute": _whole(1, MAX_TOKENS_PER_MINUTE), "models": _models, "expires": _moment,
    "priority": _whole(-MAX_PRIORITY, MAX_PRIORITY), "admin": _boolean}
