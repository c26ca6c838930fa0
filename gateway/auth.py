"""API keys: one guard in front of every route but a written list, so that a new route is guarded by default.

A path is open only when it equals an entry of `OPEN_PATHS` byte for byte, as the router will see it: another case, a
doubled or trailing slash or an encoded slash is not on the list. `/ready` is open without a query only: `?verbose`
tells what is there. Metrics are guarded here and open on the metrics port. The scheme is `Bearer`, written so, once.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import Unauthenticated
from gateway.tenants.key_ring import KeyRing
from gateway.tenants.tenant import set_caller

OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/ready"})


class KeyGuard:
    """ASGI middleware; raises `Unauthenticated`. With no keys it lets everything through, else it notes the caller."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._keys.is_open and not _is_open(scope):
            set_caller(scope, self._keys.find(bearer_key(scope)))
        await self._app(scope, receive, send)


def bearer_key(scope: Scope) -> bytes:
    """The key that a request carries. Raises `Unauthenticated`."""
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    if not sent:
        raise Unauthenticated("no API key: send it as 'Authorization: Bearer KEY'")
    if len(sent) > 1:
        raise Unauthenticated("more than one Authorization header")
    scheme, _, key = sent[0].partition(b" ")
    if scheme != b"Bearer" or not key:
        raise Unauthenticated("the Authorization header must read 'Bearer KEY'")
    return bytes(key)


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS and not (scope["path"] == "/ready" and scope["query_string"])
