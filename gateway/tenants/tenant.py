"""Whom a request is for and what its key allows. Both come from authentication, never from what a client says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Final

from starlette.types import Scope

from common.errors import PermissionDenied
from gateway.order import Order

DEFAULT_TENANT: Final = "default"
_SCOPE_KEY: Final = "shoal.caller"


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What all keys of one tenant may use together, on all gateways; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __bool__(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


@dataclass(frozen=True, slots=True)
class Tenant:
    """`name` is of the operator's key file, so it may be a metric's label. `salt_key` is the deployment's secret."""

    name: str = DEFAULT_TENANT
    limits: RateLimits = RateLimits()
    salt_key: bytes = field(default=b"", repr=False)

    def salted(self, cache_salt: str) -> str:
        """The salt of this tenant's block hashes: no two tenants have one in common, whatever their clients send.

        The default tenant's is the client's own. All others' are keyed, so that it cannot send one of theirs.
        """
        if self.name == DEFAULT_TENANT:
            return cache_salt
        salt = hashlib.blake2b(key=self.salt_key, digest_size=16, person=b"shoal tenant")
        for part in (self.name.encode(), cache_salt.encode("utf-8", "surrogatepass")):
            salt.update(len(part).to_bytes(4, "big") + part)
        return salt.hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of one key. `models` None: all of them; `priority` None: whatever the request says."""

    tenant: Tenant = Tenant()
    models: frozenset[str] | None = None
    priority: int | None = None
    is_admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raises `PermissionDenied` for a model, known to exist, that the key is not for."""
        if not self.may_use(model):
            raise PermissionDenied(
                "this API key is not for this model; /v1/models lists those that it is for", param="model")

    def check_sees_all(self) -> None:
        """Raises `PermissionDenied` for a key whose holder is not to know of other tenants."""
        if self.tenant.name != DEFAULT_TENANT and not self.is_admin:
            raise PermissionDenied("metrics tell of all tenants: they want an admin's key, or the metrics port")

    def signed(self, order: Order) -> Order:
        """The order within the tenant's own cache, and no more urgent than the key allows."""
        salt = self.tenant.salted(order.cache_salt)
        priority = order.priority if self.priority is None else max(order.priority, self.priority)
        if salt == order.cache_salt and priority == order.priority:
            return order
        return replace(order, cache_salt=salt, priority=priority)


ANYBODY: Final = Caller()


def caller_of(scope: Scope) -> Caller:
    """Whose key the request carried; `ANYBODY` where none is wanted."""
    found: Caller = scope.get(_SCOPE_KEY, ANYBODY)
    return found


def tenant_of(scope: Scope) -> Tenant:
    return caller_of(scope).tenant


def log_facts(scope: Scope) -> dict[str, str]:
    """What the log says of the caller, once a key has told who it is."""
    return {"tenant": tenant_of(scope).name} if _SCOPE_KEY in scope else {}


def set_caller(scope: Scope, caller: Caller) -> None:
    """Only the key guard does."""
    scope[_SCOPE_KEY] = caller
