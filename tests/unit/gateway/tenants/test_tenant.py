from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import PermissionDenied
from common.generation import ModelFacts
from gateway.order import Order
from gateway.tenants.tenant import ANYBODY, Caller, RateLimits, Tenant

KEY = b"k" * 32
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
SALTS = st.text(st.characters(), max_size=8)


def order(**changes: object) -> Order:
    return Order("r", ModelFacts("m", 512, 0), "p", 4, seed=1, **changes)  # type: ignore[arg-type]


@example("ab", "c", "a", "bc")
@given(NAMES, SALTS, NAMES, SALTS)
def test_salts_are_equal_only_for_one_tenant_and_one_salt(one: str, salt: str, two: str, other: str) -> None:
    same = Tenant(one, salt_key=KEY).salted(salt) == Tenant(two, salt_key=KEY).salted(other)
    assert same == ((one, salt) == (two, other))


def test_a_salt_cannot_be_made_without_the_deployments_secret() -> None:
    theirs = Tenant("acme", salt_key=KEY).salted("s")
    assert theirs == Tenant("acme", RateLimits(1), salt_key=KEY).salted("s"), "all gateways and limits alike"
    assert theirs != Tenant("acme", salt_key=b"x" * 32).salted("s")
    assert "acme" not in theirs
    assert KEY.hex() not in repr(Tenant("acme", salt_key=KEY))


def test_the_default_tenant_keeps_the_clients_salt() -> None:
    asked = order(cache_salt="s", priority=3)
    assert ANYBODY.signed(asked) is asked
    assert Tenant(salt_key=KEY).salted("") == ""


def test_an_order_is_signed_with_the_tenants_salt_and_never_gets_more_urgent_than_the_key() -> None:
    caller = Caller(Tenant("acme", salt_key=KEY), priority=5)
    signed = caller.signed(order(cache_salt="s", priority=-100))
    assert (signed.cache_salt, signed.priority) == (caller.tenant.salted("s"), 5)
    assert caller.signed(order(priority=9)).priority == 9
    assert Caller(caller.tenant).signed(order(priority=-100)).priority == -100


def test_a_key_for_some_models_is_for_no_others() -> None:
    caller = Caller(models=frozenset({"a"}))
    caller.check_model("a")
    with pytest.raises(PermissionDenied) as error:
        caller.check_model("b")
    assert (error.value.http_status, error.value.openai_type, error.value.param) == (403, "permission_error", "model")
    assert ANYBODY.may_use("b")
