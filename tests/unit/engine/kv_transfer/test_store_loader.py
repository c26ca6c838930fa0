"""A load that is expected to take longer than computing is not done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.service_record import Fingerprint
from engine.kv_transfer.store_loader import StoreLoader

PRINT = Fingerprint("m", "r", "float32", 16, 1, 1, 8)


def loader(tokens_per_s: float, bytes_per_s: float) -> StoreLoader:
    engine: Any = SimpleNamespace(
        stats=SimpleNamespace(prefill_tokens_per_s=tokens_per_s), facts=SimpleNamespace(block_bytes=1000))
    made = StoreLoader(engine, SimpleNamespace(), PRINT)  # type: ignore[arg-type]
    made.counts.bytes_per_s = bytes_per_s
    return made


@pytest.mark.parametrize(("tokens_per_s", "bytes_per_s", "worth"), [
    (160.0, 20_000.0, True),  # a block: 0.05 s to load, 0.1 s to compute
    (160.0, 5_000.0, False),  # 0.2 s to load
    (0.0, 5_000.0, True),  # unknown rates: try, and know next time
    (160.0, 0.0, True),
])
def test_a_load_is_worth_it_only_when_it_is_faster(tokens_per_s: float, bytes_per_s: float, worth: bool) -> None:
    made = loader(tokens_per_s, bytes_per_s)
    assert made.is_worth(8) is worth
    assert made.counts.num_declined == (0 if worth else 1)


def test_nothing_to_load_is_never_worth_a_call() -> None:
    made = loader(160.0, 20_000.0)
    assert not made.is_worth(0)
    assert not made.is_worth(-3)
