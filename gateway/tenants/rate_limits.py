"""Rate limits of tenants: what a limit leaves, how it is told, and the guard that asks before a request goes in.

A limit is a bucket that holds one minute's worth and fills steadily, so a rested tenant may use it all at once. A POST
takes one request when it goes in. Its tokens are taken once it has ended, well or not, when they are known; who leaves
before the first token of output pays for the prompt, once a worker has it. A tenant whose bucket of tokens is empty, or
in debt, is refused until it holds one token again. So what runs is never cut off, and a tenant can owe no more than the
requests that it had running. GET and HEAD take nothing, nor does a refused POST.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import RateLimited, ShoalError, Unavailable
from gateway.errors import error_response
from gateway.observation import observation
from gateway.tenants import metrics
from gateway.tenants.tenant import Tenant, tenant_of

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Level:
    """Of one bucket. Debt shows as 0 remaining."""

    limit: int  # per minute
    remaining: int
    full_in_s: float
    one_in_s: float  # until one can be taken; 0: now


@dataclass(frozen=True, slots=True)
class Standing:
    """What is left of a tenant's limits; None: not limited. `refused_by` names the limit that a request met."""

    requests: Level | None
    tokens: Level | None
    refused_by: Literal["", "requests", "tokens"] = ""

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`; reset is when the bucket is full again."""
        found = {}
        for kind, level in (("requests", self.requests), ("tokens", self.tokens)):
            if level is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(level.limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(level.remaining)
                found[f"x-ratelimit-reset-{kind}"] = duration(level.full_in_s)
        return found

    def error(self) -> RateLimited:
        """What a refused request is told."""
        level = self.tokens if self.refused_by == "tokens" else self.requests
        assert level is not None
        return RateLimited(
            f"rate limit of {level.limit} {self.refused_by} per minute reached; try again in "
            f"{duration(level.one_in_s)}", retry_after_s=level.one_in_s)


def duration(seconds: float) -> str:
    """Rounded up, as OpenAI writes it: `20ms`, `1s`, `6m0s`, `1h0m0s`."""
    ms = math.ceil(seconds * 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    whole = math.ceil(ms / 1000)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if whole >= 60 else ''}{whole % 60}s"


class RateLimitStore(Protocol):
    """Counts that all gateways share. Every call is bounded in time and raises `Unavailable` for want of an answer."""

    async def admit(self, tenant: Tenant) -> Standing:
        """Take one request, if no limit forbids it."""

    async def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Take tokens that were used, be they there or not."""

    async def show(self, tenant: Tenant) -> Standing:
        """Take nothing."""


class RateLimitGuard:
    """ASGI middleware behind the key guard. `allow_on_failure`: whether a request goes in when the store is away.

    Counted are tenants that `has_tenant`: one that is gone by the end of its request gets no series again.
    """

    def __init__(
        self, app: ASGIApp, store: RateLimitStore, has_tenant: Callable[[str], bool], *, allow_on_failure: bool
    ) -> None:
        self._app, self._store = app, store
        self._has_tenant, self._allow_on_failure = has_tenant, allow_on_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant, takes_one = tenant_of(scope), scope["method"] not in ("GET", "HEAD")
        standing = await self._ask(tenant, takes_one) if tenant.limits else None
        if standing is not None and standing.refused_by:
            if self._has_tenant(tenant.name):
                metrics.RATE_LIMITED.labels(tenant.name, standing.refused_by).inc()
            await _refuse(standing, scope, receive, send)
            return
        if takes_one and self._has_tenant(tenant.name):
            metrics.TENANT_REQUESTS.labels(tenant.name).inc()
        try:
            await self._app(scope, receive, _adding(send, standing.headers()) if standing is not None else send)
        finally:
            await self._settle(tenant, scope)

    async def _ask(self, tenant: Tenant, takes_one: bool) -> Standing | None:
        """None: not known. Raises `Unavailable` where that is no reason to let a request in."""
        try:
            return await (self._store.admit(tenant) if takes_one else self._store.show(tenant))
        except Unavailable as error:
            metrics.RATE_LIMIT_FAILURES.labels("admit" if takes_one else "show").inc()
            if takes_one and not self._allow_on_failure:
                raise Unavailable("rate limits cannot be checked now", retry_after_s=1.0) from error
            return None

    async def _settle(self, tenant: Tenant, scope: Scope) -> None:
        """Before the connection is free for its next request, which so finds the tokens of this one taken."""
        seen = observation(scope)
        usage = seen.charged
        if usage is None:
            return
        if self._has_tenant(tenant.name):
            counts = usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens
            for kind, num_tokens in zip(metrics.TOKEN_KINDS, counts, strict=True):
                metrics.TENANT_TOKENS.labels(tenant.name, kind).inc(num_tokens)
        if tenant.limits.tokens_per_minute is not None:
            try:
                await self._store.charge(tenant, usage.num_prompt_tokens + usage.num_output_tokens)
            except Unavailable:
                metrics.RATE_LIMIT_FAILURES.labels("charge").inc()


async def _refuse(standing: Standing, scope: Scope, receive: Receive, send: Send) -> None:
    error: ShoalError = standing.error()
    observation(scope).failed(error)
    await error_response(error, standing.headers())(scope, receive, send)


def _adding(send: Send, headers: dict[str, str]) -> Send:
    """`send` that adds headers to the answer, whatever it is."""
    added: Headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return send_with_headers
