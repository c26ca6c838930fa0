"""Requests that make KV for another engine: nothing is drawn, and their blocks are held until released."""

from __future__ import annotations

import pytest

from engine.request import EngineRequest
from tests.unit.engine.builders import Engine, ask, oracle, prompt


def land(engine: Engine, asked: EngineRequest, num_tokens: int) -> None:
    """Write the KV of the first tokens of a reserved request, and say so."""
    tokens = [*asked.prompt_token_ids, *asked.output_token_ids][:num_tokens]
    engine.write(engine.core.block_ids(asked.request_id), tokens)
    engine.core.land(asked.request_id, num_tokens)


def test_prefill_only_makes_the_kv_of_all_but_the_last_token_tells_its_progress_and_is_held() -> None:
    engine = Engine(max_num_batched_tokens=64)
    engine.add(ask("p", prompt(150), max_tokens=1, prefill_only=True))
    progress = []
    while engine.core.has_work:
        progress += [(o.num_computed_tokens, o.new_token_ids, o.finish_reason) for o in engine.step()]
    assert progress == [(64, (), None), (128, (), None), (149, (), None)]
    assert not any(row.samples for plan in engine.runner.plans for row in plan.rows)
    assert engine.read(engine.core.block_ids("p"), 149) == prompt(150)[:149]
    assert engine.core.stats().num_held == 1
    engine.core.release("p")
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks
    assert engine.run(ask("next", prompt(150)))["next"].num_cached_tokens == 144


@pytest.mark.parametrize(("num_tokens", "cached"), [(1, 0), (49, 48)])
def test_prefill_only_with_nothing_to_compute_is_held_at_once(num_tokens: int, cached: int) -> None:
    engine = Engine(max_num_seqs=1)
    engine.run(ask("before", prompt(50), max_tokens=1))
    engine.add(ask("runs", prompt(4), max_tokens=99))
    engine.core.release("runs")
    engine.add(ask("p", prompt(num_tokens), prefill_only=True))
    outputs = engine.step()
    assert [(o.request_id, o.num_computed_tokens, o.finish_reason) for o in outputs] == [("p", cached, None)]
    assert (engine.core.has_work, engine.core.stats().num_held) == (False, 1)
    assert len(engine.core.block_ids("p")) == cached // 16
    engine.core.check_integrity()
    assert engine.core.abort("p") is not None
    assert "p" not in engine.core


def test_a_reserved_prefill_only_request_may_get_a_part_from_elsewhere_and_compute_the_rest() -> None:
    engine = Engine(enable_overlap=False)
    asked = ask("p", prompt(50), prefill_only=True)
    assert len(engine.core.reserve(ask("one", [7], prefill_only=True)).block_ids) == 0
    assert len(engine.core.reserve(ask("full", prompt(49), prefill_only=True)).block_ids) == 3
    engine.core.reserve(asked)
    land(engine, asked, 20)
    engine.core.start("p")
    assert [o.num_computed_tokens for o in engine.step()] == [49]
    assert engine.read(engine.core.block_ids("p"), 49) == prompt(50)[:49]


def test_a_transfer_that_brought_everything_is_held_at_the_start_and_says_so_unless_released_first() -> None:
    engine = Engine()
    for name in ("a", "b"):
        asked = ask(name, prompt(50, first=ord(name)), prefill_only=True)
        engine.core.reserve(asked)
        land(engine, asked, 49)
        engine.core.start(name)
    engine.core.release("b")
    assert [(o.request_id, o.num_computed_tokens) for o in engine.step()] == [("a", 49)]


def test_nothing_is_put_out_after_an_abort() -> None:
    engine = Engine()
    asked = ask("p", prompt(50), prefill_only=True)
    engine.core.reserve(asked)
    land(engine, asked, 49)
    engine.core.start("p")
    assert engine.core.abort("p") is not None
    assert engine.step() == []


def test_prefill_only_is_never_preempted() -> None:
    engine = Engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=3)
    engine.add(ask("runs", prompt(34), max_tokens=60))
    engine.add(ask("p", prompt(70, first=4), prefill_only=True))
    while "p" not in engine.progress:
        engine.step()
    before = engine.core.block_ids("p")
    while not engine.core.stats().num_preemptions:
        engine.step()
    assert engine.progress["p"] < 69
    assert engine.core.block_ids("p") == before
    assert engine.runner.forgotten == ["runs"]
    engine.core.release("p")
    engine.run()
    assert engine.tokens["runs"] == oracle(prompt(34), 60)


def test_the_clock_takes_no_block_of_a_prefill_only_request_but_ends_one_that_waits() -> None:
    now = 0.0
    engine = Engine(clock=lambda: now, max_num_seqs=1, max_num_batched_tokens=16)
    for name in ("sends", "waits"):
        engine.add(ask(name, prompt(60, first=ord(name[0])), prefill_only=True, deadline=5.0))
    engine.step()
    now = 6.0
    engine.run()
    assert list(engine.last) == ["waits"]
    assert engine.progress["sends"] == 59
    engine.step()
    assert "sends" in engine.core
