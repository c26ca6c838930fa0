"""Who is preempted, and what comes back from a lower tier."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from common.block_hash import BlockHash
from common.errors import ConfigError, DeadlineExceeded, InvalidRequest
from engine.arena_swap import ArenaSwap
from engine.outputs import FinishReason
from tests.unit.engine.builders import Engine, ask, oracle, prompt
from tests.unit.engine.test_core_equality import SlowSwap


def preempted(engine: Engine, deadline: float | None = None, **low: int) -> None:
    """Two answers that do not fit together, of which one has been preempted; the second one has a deadline."""
    for index, name in enumerate("ab"):
        engine.add(ask(
            name, prompt(34, first=ord(name)), max_tokens=35, priority=low.get(name, 0),
            deadline=deadline if index else None))
        engine.step()
        assert index or not engine.core.stats().num_preemptions
    while not engine.core.stats().num_preemptions:
        engine.step()


def check(engine: Engine) -> None:
    for name in "ab":
        assert engine.tokens[name] == oracle(prompt(34, first=ord(name)), 35)
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks


def test_the_victim_is_of_the_lowest_class_and_the_latest_of_it() -> None:
    for low, victim in (({}, "b"), ({"a": 1}, "a"), ({"a": 1, "b": 1}, "b"), ({"b": -1}, "a")):
        engine = Engine(num_blocks=7)
        preempted(engine, **low)
        assert [request.request_id for request in engine.core._roster.waiting] == [victim]
        engine.run()
        check(engine)


def test_without_a_lower_tier_and_a_cache_everything_is_computed_again() -> None:
    engine = Engine(num_blocks=7, enable_prefix_caching=False)
    preempted(engine)
    lost = engine.core._roster.waiting.head
    assert lost is not None
    num_lost = lost.num_lost_tokens
    assert num_lost >= 47
    engine.run()
    stats = engine.core.stats()
    assert (stats.num_recomputed_tokens, stats.num_swapped_in_blocks, stats.num_preemptions) == (num_lost, 0, 1)
    check(engine)


def test_blocks_come_back_from_an_arena() -> None:
    engine = Engine(num_blocks=7, enable_prefix_caching=False, poisons=True, max_awaiting_fraction=1.0)
    engine.core.use_swap(ArenaSwap(engine.core, 100 * engine.core.block_bytes))
    preempted(engine)
    engine.run()
    stats = engine.core.stats()
    assert stats.num_swapped_out_blocks == stats.num_swapped_in_blocks >= 2
    assert stats.num_recomputed_tokens < 16
    check(engine)


def test_what_the_arena_lost_is_computed_again() -> None:
    engine = Engine(num_blocks=7, enable_prefix_caching=False, poisons=True, max_awaiting_fraction=1.0)
    arena = ArenaSwap(engine.core, 100 * engine.core.block_bytes)
    engine.core.use_swap(arena)
    preempted(engine)
    arena._kept.popitem(last=False)
    engine.run()
    assert engine.core.stats().num_swapped_in_blocks == engine.core.stats().num_swapped_out_blocks - 1
    check(engine)


class PricedSwap(ArenaSwap):
    seconds = math.inf

    def load_s(self, num_blocks: int) -> float:
        return self.seconds


@pytest.mark.parametrize(("at_save", "at_load", "num_out", "num_in"), [
    (math.inf, 0.0, 0, 0), (0.0, math.inf, 3, 0), (0.0, 1e9, 3, 0), (0.0, 0.0, 3, 3)])
def test_costs_are_compared_when_it_is_saved_and_when_it_is_loaded(
    at_save: float, at_load: float, num_out: int, num_in: int
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.25
        return now

    engine = Engine(num_blocks=7, enable_prefix_caching=False, clock=clock, max_awaiting_fraction=1.0)
    swap = PricedSwap(engine.core, 100 * engine.core.block_bytes)
    engine.core.use_swap(swap)
    swap.seconds = at_save
    preempted(engine)
    assert engine.core.stats().prefill_tokens_per_s > 0
    swap.seconds = at_load
    engine.run()
    stats = engine.core.stats()
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (num_out, num_in)
    check(engine)


def loading() -> tuple[Engine, SlowSwap, str]:
    """An engine with a sequence whose blocks are being loaded."""
    engine = Engine(num_blocks=7, enable_prefix_caching=False, poisons=True, max_awaiting_fraction=1.0)
    swap = SlowSwap(engine.core, 100 * engine.core.block_bytes)
    engine.core.use_swap(swap)
    preempted(engine)
    while not swap.fetches:
        engine.step()
    return engine, swap, swap.fetches[0][0]


def test_a_load_that_ends_later_lets_the_sequence_go_on() -> None:
    engine, swap, _ = loading()
    for _ in range(3):
        engine.step()
    assert engine.core.stats().num_awaiting == 1
    swap.end_fetch(0)
    engine.run()
    check(engine)


def test_one_that_is_aborted_while_it_is_loaded_is_answered_and_keeps_its_blocks_until_the_load_has_ended() -> None:
    engine, swap, name = loading()
    output = engine.core.abort(name)
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    engine.record(output)
    engine.core.check_integrity()
    with pytest.raises(InvalidRequest, match="is in use"):
        engine.core.add(ask(name, prompt(4)))
    assert name in engine.core
    while engine.core.has_work:
        engine.step()
    assert engine.core.stats().num_free_blocks < engine.config.num_blocks
    swap.end_fetch(0)
    engine.core.check_integrity()
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks
    assert name in engine.runner.forgotten
    assert name not in engine.core


def test_the_deadline_of_one_that_is_loaded_is_watched_when_nothing_else_is_there() -> None:
    now = 0.0
    engine = Engine(num_blocks=7, enable_prefix_caching=False, clock=lambda: now)
    engine.core.use_swap(SlowSwap(engine.core, 100 * engine.core.block_bytes))
    preempted(engine, deadline=5.0)
    for _ in range(100):
        engine.step()
    assert list(engine.last) == ["a"]
    assert (engine.core.has_work, engine.core.is_stalled) == (True, True)
    now = 6.0
    engine.step()
    assert isinstance(engine.last["b"].error, DeadlineExceeded)
    assert not engine.core.has_work


def test_one_that_is_larger_than_the_cap_on_transfers_is_loaded_when_nothing_else_awaits_kv() -> None:
    for is_alone in (True, False):
        engine = Engine(num_blocks=8, enable_prefix_caching=False, poisons=True, max_awaiting_fraction=0.15)
        engine.core.use_swap(ArenaSwap(engine.core, 100 * engine.core.block_bytes))
        engine.core.reserve(ask("transfer", prompt(10)))
        preempted(engine)
        if is_alone:
            engine.core.release("transfer")
        engine.run()
        engine.core.release("transfer")
        check(engine)
        stats = engine.core.stats()
        assert stats.num_swapped_out_blocks >= 3
        assert stats.num_swapped_in_blocks == is_alone * stats.num_swapped_out_blocks


def test_an_arena_keeps_the_least_recently_used_out_and_the_start_of_a_chain_longest() -> None:
    engine = Engine(num_blocks=8)
    with pytest.raises(ConfigError, match="at least one block of 64 bytes, got 63"):
        ArenaSwap(engine.core, 63)
    arena = ArenaSwap(engine.core, 3 * 64)
    chain: Sequence[BlockHash] = [bytes([i]) * 16 for i in range(4)]
    assert arena.save("r", chain, (0, 1, 2, 3)) == 3
    assert (list(arena._kept), arena.num_bytes) == ([chain[2], chain[1], chain[0]], 192)
    assert arena.save("s", [bytes(15) + b"x"], (4,)) == 1
    assert list(arena._kept) == [chain[1], chain[0], bytes(15) + b"x"]
