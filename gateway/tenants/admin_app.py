"""The operator's endpoints, on a port of their own: keys, limits, drain. No route of it is open, and none is public.

Who may call: the holder of `admin_token`, or of a key whose line says `admin=true`. Neither is ever shown.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import ConfigError, InvalidRequest, NotFound, PermissionDenied
from gateway.app import answer_errors
from gateway.auth import bearer_key
from gateway.observation import Observer
from gateway.tenants.key_file import KeyEntry, digest_of
from gateway.tenants.key_ring import KeyRing
from gateway.tenants.rate_limits import Level, RateLimitStore


@dataclass(frozen=True, slots=True)
class AdminDesk:
    """What the endpoints work on. `begin_drain` returns how many requests are still in work."""

    keys: KeyRing
    limits: RateLimitStore
    begin_drain: Callable[[], Awaitable[int]]


def build_admin_app(desk: AdminDesk, token: str) -> ASGIApp:
    """The whole application. With `token` empty only admin keys are let in."""
    app = FastAPI(title="shoal admin", redirect_slashes=False, docs_url=None, redoc_url=None, openapi_url=None,
                  telemetry={"tracing": False, "metrics": False, "logs": False})
    answer_errors(app)
    _add_routes(app, desk)
    return Observer(AdminGuard(app, desk.keys, token))


class AdminGuard:
    """ASGI middleware; raises `Unauthenticated`, and `PermissionDenied` for a key that is no admin's."""

    def __init__(self, app: ASGIApp, keys: KeyRing, token: str) -> None:
        self._app, self._keys = app, keys
        self._token_digest = digest_of(token.encode()) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(bearer_key(scope))
        await self._app(scope, receive, send)

    def _check(self, key: bytes) -> None:
        if self._token_digest is not None and hmac.compare_digest(digest_of(key), self._token_digest):
            return
        if not self._keys.find(key).is_admin:
            raise PermissionDenied("this API key is not an admin's")


def _add_routes(app: FastAPI, desk: AdminDesk) -> None:
    @app.get("/keys")
    async def keys() -> Response:
        """What is known of each key but the key."""
        return _json({"object": "list", "data": [_key_body(entry) for entry in desk.keys.entries]})

    @app.post("/reload")
    async def reload() -> Response:
        """Look at the key file now."""
        try:
            changed = await desk.keys.reload()
        except ConfigError as error:
            raise InvalidRequest(f"the keys stay as they were: {error.message}", param="api_key_file") from None
        return _json({"changed": changed, "num_keys": len(desk.keys.entries), "num_tenants": desk.keys.num_tenants})

    @app.get("/limits/{name}")
    async def limits(name: str) -> Response:
        """What is left of a tenant's limits, and takes nothing of them."""
        tenant = desk.keys.tenant(name)
        if tenant is None:
            raise NotFound("no key is of this tenant")
        standing = await desk.limits.show(tenant) if tenant.limits else None
        return _json({"tenant": tenant.name, "requests": _level_body(standing.requests if standing else None),
                      "tokens": _level_body(standing.tokens if standing else None)})

    @app.post("/drain")
    async def drain() -> Response:
        """Take no new requests from now on, and say so to load balancers; the process stays until it is stopped."""
        return _json({"status": "draining", "num_requests": await desk.begin_drain()})


def _key_body(entry: KeyEntry) -> dict[str, Any]:
    return {"name": entry.name or None, "tenant": entry.tenant, "line": entry.line or None,
            "models": None if entry.models is None else sorted(entry.models),
            "expires": entry.expires.isoformat() if entry.expires else None, "priority": entry.priority,
            "admin": entry.is_admin}


def _level_body(level: Level | None) -> dict[str, Any] | None:
    """None: not limited."""
    return None if level is None else {
        "limit_per_minute": level.limit, "remaining": level.remaining, "full_in_s": level.full_in_s}


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
