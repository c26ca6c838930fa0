"""What a request finds on its arrival: the output of an earlier attempt, cached prefixes, pinned blocks."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from tests.unit.engine.builders import Engine, ask, hashes, oracle, prompt


@pytest.mark.parametrize("num_drawn", [1, 5, 14])
def test_a_resumed_request_goes_on_where_the_other_attempt_stopped(num_drawn: int) -> None:
    engine = Engine(max_num_batched_tokens=64)
    answer = oracle(prompt(50), 15)
    chain = hashes(prompt(50))
    last = engine.run(ask("r", prompt(50), 15, output_token_ids=answer[:num_drawn], block_hashes=chain))
    assert engine.tokens["r"] == answer
    assert (last["r"].num_prompt_tokens, last["r"].num_output_tokens) == (50, 15)
    positions = [row.output_position for plan in engine.runner.plans for row in plan.rows if row.samples]
    assert positions == list(range(num_drawn, 15))


def test_a_resumed_request_hits_the_blocks_of_its_output_and_reports_the_prompts() -> None:
    engine = Engine()
    engine.run(ask("first", prompt(20), max_tokens=40))
    again = ask("again", prompt(20), 60, output_token_ids=engine.tokens["first"])
    assert engine.run(again)["again"].num_cached_tokens == 19
    assert engine.runner.plans[-20].rows[0].start == 48
    assert engine.tokens["again"] == oracle(prompt(20), 60)


def test_a_resumed_request_with_nothing_left_to_draw_is_refused() -> None:
    engine = Engine()
    drawn: list[tuple[list[int], str, str]] = [
        ([5, 6, 7], "output_token_ids", "3 tokens are drawn already, but max_tokens is 3"),
        ([5, 99], "output_token_ids", "token id 99 is outside")]
    for token_ids, param, message in drawn:
        with pytest.raises(InvalidRequest, match=message) as caught:
            engine.core.add(ask("r", prompt(4), 3, output_token_ids=token_ids))
        assert caught.value.param == param


def test_peek_tells_the_hit_of_a_prompt_and_changes_nothing() -> None:
    engine = Engine()
    engine.run(ask("a", prompt(50), cache_salt="s"))
    for num_tokens, cached in ((1, 0), (16, 0), (17, 16), (48, 32), (49, 48), (50, 48)):
        assert engine.core.peek(prompt(50)[:num_tokens], "", "s") == cached
    assert engine.core.peek(prompt(50)) == 0
    without = Engine(enable_prefix_caching=False)
    without.run(ask("a", prompt(50)))
    assert without.core.peek(prompt(50)) == 0


def test_pinned_content_outlives_the_need_for_blocks_and_is_granted_after_the_unpin() -> None:
    engine = Engine(num_blocks=4)
    engine.run(ask("a", prompt(40), max_tokens=1))
    chain = hashes(prompt(40))
    pinned = engine.core.pin([*chain, bytes(16)])
    assert list(pinned) == chain
    assert (engine.core.stats().num_pinned_blocks, engine.core.stats().num_free_blocks) == (2, 2)
    engine.run(ask("b", prompt(20, first=4), max_tokens=1))
    engine.core.reset_prefix_cache()
    assert engine.read(list(pinned.values()), 32) == prompt(40)[:32]
    assert engine.core.peek(prompt(40)) == 32
    engine.core.unpin(pinned.values())
    engine.run(ask("c", prompt(62, first=5), max_tokens=1))
    assert engine.core.peek(prompt(40)) == 0


def test_waiting_tokens_are_those_that_stand_before_the_next_draws() -> None:
    engine = Engine(max_num_batched_tokens=64, enable_overlap=False)
    engine.add(ask("decodes", prompt(4), max_tokens=99))
    engine.step()
    assert engine.core.stats().num_waiting_tokens == 0
    engine.add(ask("long", prompt(100, first=4)))
    engine.add(ask("p", prompt(31, first=5), prefill_only=True))
    assert engine.core.stats().num_waiting_tokens == 130
    engine.step()
    assert engine.core.stats().num_waiting_tokens == 67
