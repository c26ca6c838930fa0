"""A preempted sequence gets its KV back from a store, through whoever serves its fetch."""

from __future__ import annotations

import math

from engine.store_swap import StoreSwap
from tests.unit.engine.builders import Engine, ask, oracle, prompt


def test_nothing_is_fetched_before_a_rate_is_told() -> None:
    swap = StoreSwap(1000)
    assert swap.load_s(4) == math.inf
    swap.bytes_per_s = 2000.0
    assert swap.load_s(4) == 2.0


def test_a_sequence_runs_on_from_what_its_fetch_brought() -> None:
    engine = Engine(num_blocks=7, max_num_batched_tokens=64, max_awaiting_fraction=1.0, max_kv_events=1000)
    swap = StoreSwap(engine.core.block_bytes)
    swap.bytes_per_s = 1e12
    engine.core.use_swap(swap)
    stored: dict[bytes, bytes] = {}
    for name, seed in (("a", 3), ("b", 60)):
        engine.core.add(ask(name, prompt(34, seed), max_tokens=35))
    served = 0  # of the blocks that the cache had lost
    while engine.core.has_work:
        engine.step()
        for event in engine.core.take_kv_events():  # the write-back, which sees each block once it is public
            for block_hash, block_id in engine.core.pin(getattr(event, "hashes", ())).items():
                stored[block_hash] = bytes(engine.core.block_view(block_id))
                engine.core.unpin([block_id])
        for fetch in swap.take_fetches():
            served += 1
            for block_hash, block_id in list(zip(fetch.hashes, fetch.block_ids, strict=True))[fetch.num_present :]:
                engine.core.block_view(block_id)[:] = stored[block_hash]
            engine.core.land(fetch.sequence_id, len(fetch.hashes) * engine.core.config.block_size)
            engine.core.start(fetch.sequence_id)
    assert served > 0
    assert engine.core.stats().num_swapped_in_blocks > 0
    assert engine.tokens == {"a": oracle(prompt(34, 3), 35), "b": oracle(prompt(34, 60), 35)}
