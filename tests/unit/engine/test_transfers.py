"""Requests whose KV comes from or goes to elsewhere, seen through a whole engine with a mock runner."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from common.kv_event import BlockStored
from engine.outputs import FinishReason
from engine.request import EngineRequest
from tests.unit.engine.builders import Engine, ask, hashes, oracle, prompt
from tests.unit.engine.fake_grammar import FakeGrammar


def land(engine: Engine, asked: EngineRequest, num_tokens: int) -> None:
    """Write the KV of the first tokens of a reserved request, and say so."""
    tokens = [*asked.prompt_token_ids, *asked.output_token_ids][:num_tokens]
    engine.write(engine.core.block_ids(asked.request_id), tokens)
    engine.core.land(asked.request_id, num_tokens)


def rows(engine: Engine) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each row of the last step."""
    return [(row.request_id, row.start, len(row.token_ids)) for row in engine.runner.plans[-1].rows]


def test_a_reserved_request_is_not_scheduled_until_started_and_then_computes_only_its_last_token() -> None:
    engine = Engine()
    asked = ask("r", prompt(50))
    reservation = engine.core.reserve(asked)
    assert (reservation.request_id, reservation.num_cached_tokens, len(reservation.block_ids)) == ("r", 0, 4)
    assert not engine.core.has_work
    land(engine, asked, 49)
    engine.core.start("r")
    engine.run()
    assert engine.runner.plans[0].rows[0].start == 49
    assert engine.tokens["r"] == oracle(prompt(50), 8)
    assert engine.last["r"].num_cached_tokens == 0


@pytest.mark.parametrize("num_landed", [0, 5, 16, 33, 49])
def test_what_did_not_land_is_computed_here(num_landed: int) -> None:
    engine = Engine()
    asked = ask("r", prompt(50))
    engine.core.reserve(asked)
    land(engine, asked, num_landed)
    engine.core.start("r")
    engine.run()
    assert engine.runner.plans[0].rows[0].start == num_landed
    assert engine.tokens["r"] == oracle(prompt(50), 8)


def test_a_reservation_shares_the_cached_prefix() -> None:
    engine = Engine()
    engine.run(ask("a", prompt(50)))
    reservation = engine.core.reserve(ask("b", prompt(50)))
    assert reservation.num_cached_tokens == 48
    assert engine.core.stats().num_awaiting_blocks == 4
    engine.core.start("b")
    assert engine.run()["b"].num_cached_tokens == 48
    assert engine.tokens["b"] == engine.tokens["a"]


def test_who_starts_a_request_may_say_how_much_of_its_prompt_nobody_computed() -> None:
    engine = Engine()
    asked = ask("r", prompt(50), 8, output_token_ids=oracle(prompt(50), 3))
    engine.core.reserve(asked)
    engine.expect(asked)
    land(engine, asked, 52)
    engine.core.start("r", num_cached_tokens=52)
    assert engine.run()["r"].num_cached_tokens == 49  # of the prompt, but its last token
    assert (engine.core.stats().prefix_queries, engine.core.stats().prefix_hits) == (50, 49)


def test_landed_blocks_are_public_at_once_and_hit_by_others() -> None:
    engine = Engine(max_kv_events=9)
    asked = ask("r", prompt(50))
    engine.core.reserve(asked)
    land(engine, asked, 40)
    chain = hashes(prompt(50))
    assert engine.core.take_kv_events() == [BlockStored(tuple(chain[:2]), engine.core._roster.find("r").root)]
    assert engine.run(ask("other", prompt(50)))["other"].num_cached_tokens == 32
    assert engine.tokens["other"] == oracle(prompt(50), 8)


def test_progress_never_goes_back_and_never_reaches_the_last_token() -> None:
    engine = Engine()
    asked = ask("r", prompt(50))
    engine.core.reserve(asked)
    land(engine, asked, 40)
    engine.core.land("r", 20)
    with pytest.raises(InvalidRequest, match="at most 49 tokens may land, got 50"):
        engine.core.land("r", 50)
    engine.core.start("r")
    engine.run()
    assert engine.runner.plans[0].rows[0].start == 40


def test_land_and_start_are_for_requests_that_await_kv() -> None:
    engine = Engine()
    engine.add(ask("plain", prompt(4)))
    for request_id in ("plain", "never heard of"):
        with pytest.raises(InvalidRequest, match="is not AWAITING_KV"):
            engine.core.land(request_id, 1)
        with pytest.raises(InvalidRequest, match="is not AWAITING_KV"):
            engine.core.start(request_id)
    with pytest.raises(InvalidRequest, match="'plain' is in use"):
        engine.core.reserve(ask("plain", prompt(4)))


def test_reservations_stay_within_their_part_of_the_pool_and_a_refusal_changes_nothing() -> None:
    engine = Engine(num_blocks=20, max_awaiting_fraction=0.4)
    engine.core.reserve(ask("a", prompt(80)))
    with pytest.raises(Overloaded, match="4 blocks asked for, 5 of at most 8 await KV") as caught:
        engine.core.reserve(ask("b", prompt(64, first=4)))
    assert caught.value.retry_after_s
    engine.core.check_integrity()
    stats = engine.core.stats()
    assert (stats.num_awaiting, stats.num_awaiting_blocks, stats.num_free_blocks) == (1, 5, 15)
    engine.core.reserve(ask("b", prompt(48, first=4)))
    engine.core.start("a")  # what runs is not awaited any more
    engine.core.reserve(ask("c", prompt(80, first=5)))


def test_blocks_shared_by_reservations_count_once_and_until_the_last_has_ended() -> None:
    engine = Engine(num_blocks=20, max_awaiting_fraction=0.4)
    engine.run(ask("first", prompt(96), max_tokens=1))
    for name in ("a", "b", "c"):
        engine.core.reserve(ask(name, prompt(96)))  # 5 shared blocks, 1 of its own
    assert engine.core.stats().num_awaiting_blocks == 8
    engine.core.release("a")
    assert engine.core.stats().num_awaiting_blocks == 7
    engine.core.release("b")
    engine.core.release("c")
    assert engine.core.stats().num_awaiting_blocks == 0
    engine.core.check_integrity()


def test_a_reservation_is_refused_when_the_pool_has_no_room() -> None:
    engine = Engine(num_blocks=10, max_awaiting_fraction=1.0)
    engine.add(ask("runs", prompt(100), max_tokens=5))
    engine.step()
    with pytest.raises(Overloaded, match="4 blocks asked for, the pool has fewer"):
        engine.core.reserve(ask("r", prompt(50, first=4)))
    engine.core.check_integrity()
    engine.run()
    engine.core.reserve(ask("r", prompt(50, first=4)))


def test_no_reservation_overtakes_a_request_that_waits_for_blocks() -> None:
    engine = Engine(num_blocks=10, max_awaiting_fraction=1.0)
    engine.add(ask("runs", prompt(100), max_tokens=5))
    engine.step()
    engine.add(ask("waits", prompt(100, first=4)))
    engine.core.reserve(ask("before the queue is known to be stuck", prompt(4, first=5)))
    engine.step()
    with pytest.raises(Overloaded, match="1 requests wait for blocks"):
        engine.core.reserve(ask("r", prompt(4, first=6)))
    engine.core.release("before the queue is known to be stuck")
    engine.run()
    engine.core.reserve(ask("r", prompt(4, first=6)))


def test_reservations_beyond_the_queue_are_refused() -> None:
    engine = Engine(max_num_waiting=2)
    for name in ("a", "b"):
        engine.core.reserve(ask(name, prompt(4)))
    with pytest.raises(Overloaded, match="2 requests wait or await KV"):
        engine.core.reserve(ask("c", prompt(4)))
    engine.add(ask("plain", prompt(4)))


def test_a_started_request_runs_before_waiting_ones_and_within_max_num_seqs() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(ask("runs", prompt(4), max_tokens=3))
    engine.step()
    engine.add(ask("waits", prompt(4, first=4), max_tokens=3))
    asked = ask("r", prompt(50, first=5), max_tokens=3)
    engine.core.reserve(asked)
    land(engine, asked, 49)
    engine.core.start("r")
    engine.step()
    assert engine.core.stats().num_waiting == 2
    assert rows(engine) == [("runs", 4, 1)]
    engine.run()
    assert list(engine.last) == ["runs", "r", "waits"]


def test_only_release_ends_a_request_that_awaits_kv() -> None:
    now = 0.0
    engine = Engine(clock=lambda: now)
    engine.core.reserve(ask("r", prompt(50), deadline=5.0))
    engine.add(ask("overdue", prompt(4), deadline=5.0))
    now = 6.0
    assert [output.request_id for output in engine.step()] == ["overdue"]
    assert engine.core.abort("r") is None
    assert "r" in engine.core
    for _ in range(2):
        engine.core.release("r")
    assert engine.step() == []
    assert "r" not in engine.core
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks
    assert engine.runner.forgotten == ["overdue", "r"]


def test_the_deadline_counts_again_from_the_start() -> None:
    now = 0.0
    engine = Engine(clock=lambda: now, max_num_seqs=1)
    engine.add(ask("runs", prompt(4), max_tokens=99))
    engine.step()
    engine.core.reserve(ask("r", prompt(50), deadline=5.0))
    engine.core.start("r")
    now = 5.0
    engine.step()
    assert isinstance(engine.last["r"].error, DeadlineExceeded)


@pytest.mark.parametrize("state", ["waiting", "running", "decoding", "ready"])
def test_release_ends_a_request_in_any_state_without_an_output(state: str) -> None:
    engine = Engine(max_num_seqs=1, max_num_batched_tokens=16)
    if state in ("waiting", "ready"):
        engine.add(ask("other", prompt(4), max_tokens=99))
        engine.step()
    if state == "ready":
        engine.core.reserve(ask("r", prompt(40)))
        engine.core.start("r")
    else:
        engine.add(ask("r", prompt(40)))
    for _ in range({"running": 1, "decoding": 4}.get(state, 0)):
        engine.step()
    engine.core.release("r")
    engine.core.release("other")
    assert engine.step() == []
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks


def test_a_lone_request_that_cannot_grow_beside_a_transfer_waits_and_goes_on_after_it() -> None:
    engine = Engine(num_blocks=8, max_awaiting_fraction=0.5)
    engine.core.reserve(ask("transfer", prompt(64, first=4)))
    engine.add(ask("runs", prompt(60), max_tokens=40))
    while not engine.core.stats().num_preemptions:
        engine.step()
    for _ in range(3):
        assert engine.step() == []
        assert engine.core.is_stalled
    engine.core.release("transfer")
    engine.run()
    assert engine.tokens["runs"] == oracle(prompt(60), 40)
    assert engine.last["runs"].finish_reason is FinishReason.LENGTH


def test_a_request_that_does_not_fit_beside_transfers_and_pins_waits_for_them() -> None:
    engine = Engine(num_blocks=4)
    engine.run(ask("cached", prompt(40), max_tokens=1))
    pinned = engine.core.pin(hashes(prompt(40)))
    engine.add(ask("big", prompt(60, first=4), max_tokens=2))
    assert engine.step() == []
    engine.core.unpin(pinned.values())
    engine.run()
    assert engine.tokens["big"] == oracle(prompt(60, first=4), 2)


def test_the_last_started_is_preempted_before_one_that_runs_and_both_get_their_tokens() -> None:
    engine = Engine(num_blocks=8, max_num_seqs=1, max_awaiting_fraction=1.0)
    engine.add(ask("runs", prompt(62), max_tokens=30))
    engine.step()
    asked = ask("ready", prompt(60, first=4), max_tokens=5)
    engine.core.reserve(asked)
    land(engine, asked, 59)
    engine.core.start("ready")
    engine.run()
    assert engine.runner.forgotten == ["ready", "runs", "ready"]
    assert engine.tokens["runs"] == oracle(prompt(62), 30)
    assert engine.tokens["ready"] == oracle(prompt(60, first=4), 5)


def test_close_answers_requests_in_every_state_and_frees_their_blocks() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(ask("held", prompt(20), prefill_only=True))
    engine.step()
    engine.add(ask("runs", prompt(20, first=4)))
    engine.step()
    engine.add(ask("waits", prompt(20, first=5)))
    for name in ("awaits", "ready"):
        engine.core.reserve(ask(name, prompt(20, first=6)))
    engine.core.start("ready")
    outputs = engine.core.close(Unavailable("gone"))
    assert {o.request_id for o in outputs} == {"held", "runs", "waits", "awaits", "ready"}
    assert all(o.finish_reason is FinishReason.ERROR for o in outputs)
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks
    with pytest.raises(Unavailable):
        engine.core.reserve(ask("later", prompt(4)))
    engine.core.release("held")


@pytest.mark.parametrize("state", ["awaits", "held"])
def test_nothing_but_a_transfer_in_the_engine_is_no_work(state: str) -> None:
    fields: dict[str, Any] = {"prefill_only": True} if state == "held" else {}
    engine = Engine()
    if fields:
        engine.run(ask("r", prompt(20), **fields))
    else:
        engine.core.reserve(ask("r", prompt(20)))
    assert not engine.core.has_work
    assert "r" in engine.core


def test_a_resumed_output_that_its_grammar_completes_ends_at_the_start_as_it_would_when_added() -> None:
    engine = Engine()
    grammar = FakeGrammar(4, length=9)
    drawn = oracle(prompt(20), 50, 0, grammar)
    asked = ask("r", prompt(20), 50, output_token_ids=drawn)
    engine.core.reserve(asked, grammar.fork())
    engine.expect(asked)
    engine.core.start("r")
    engine.run()
    assert (engine.tokens["r"], engine.last["r"].finish_reason) == (drawn, FinishReason.STOP)
    assert engine.runner.plans == []
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks
