"""API keys: one guard in front of every route but a written list, so that a new route is guarded by default.

A path is open only when it equals an entry of `OPEN_PATHS` byte for byte, as the router will see it: another case, a
doubled or trailing slash or an encoded slash is not on the list. `/ready` is open without a query only: `?verbose`
tells what is there. Metrics are guarded here and open on the metrics port. The scheme is `Bearer`, written so, once.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import ConfigError, Unauthenticated

OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/ready"})
MIN_KEY_CHARS = 4


def load_keys(listed: str, file: str) -> tuple[str, ...]:
    """Keys from a comma list and a file (one a line). Raises `ConfigError`; no key is ever shown."""
    keys = [k.strip() for k in listed.split(",") if k.strip()]
    if file:
        try:
            lines = Path(file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file={file!r}: {error}", param="api_key_file") from None
        keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"api_key_file={file!r}: holds no key", param="api_key_file")
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"api_keys: a key must have at least {MIN_KEY_CHARS} printable ASCII characters and no space",
                param="api_keys")
    return tuple(dict.fromkeys(keys))


class KeyGuard:
    """ASGI middleware; raises `Unauthenticated`. With no keys it lets everything through."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(k.encode()) for k in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not _is_open(scope):
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if not sent:
            raise Unauthenticated("no API key: send it as 'Authorization: Bearer KEY'")
        if len(sent) > 1:
            raise Unauthenticated("more than one Authorization header")
        scheme, _, key = sent[0].partition(b" ")
        if scheme != b"Bearer" or not key:
            raise Unauthenticated("the Authorization header must read 'Bearer KEY'")
        given = _digest(key)
        # All are compared, so that time tells neither which key is near nor how many there are before it.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(matches):
            raise Unauthenticated("this API key is not accepted")


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS and not (scope["path"] == "/ready" and scope["query_string"])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
