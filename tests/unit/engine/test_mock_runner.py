from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from common.sampling_params import SamplingParams
from engine.mock_runner import MockMode, MockRunner, allowed_ids, hashed_token, mock_logprobs
from engine.step import UNKNOWN_TOKEN, BlockCopy, DecodeRows, Join, PlannedRow, StepPlan, StepResult
from tests.factories import computed
from tests.unit.engine.builders import EOS, VOCAB_SIZE

PARAMS = SamplingParams(max_tokens=8)


def runner(mode: MockMode, *joined: str, num_prompt_tokens: int = 2, choice: int = 0) -> MockRunner:
    """With sequences that it knows."""
    made = MockRunner(
        mode, num_blocks=8, block_size=4, vocab_size=VOCAB_SIZE, eos_token_ids=EOS, checks_launches=True)
    joins = [Join(name, [7, 8], num_prompt_tokens, PARAMS, choice) for name in joined or ("r",)]
    assert computed(made, StepPlan(0, [], joins=joins)).token_ids == []
    return made


def row(
    tokens: list[int], start: int = 0, blocks: tuple[int, ...] = (5, 1), output: int | None = 0, name: str = "r",
) -> PlannedRow:
    return PlannedRow(name, tokens, start, blocks, output is not None, output or 0, PARAMS)


def decode(start: int, blocks: tuple[int, ...] = (5, 1), name: str = "r") -> DecodeRows:
    return DecodeRows([name], [UNKNOWN_TOKEN], [start], [blocks], [0], [PARAMS])


def test_echo_answers_with_the_prompt_and_then_ends() -> None:
    echo = runner(MockMode.ECHO)
    assert computed(echo, StepPlan(1, [row([7, 8])])).token_ids == [7]
    assert computed(echo, StepPlan(2, [row([7], start=2, output=1)])).token_ids == [8]
    assert computed(echo, StepPlan(3, [row([8], start=3, output=2)])).token_ids == [2]


def test_echo_reads_a_cached_prompt_back_through_the_block_table() -> None:
    echo = runner(MockMode.ECHO, num_prompt_tokens=5)
    computed(echo, StepPlan(1, [row([7, 8, 9, 10], output=None)]))
    assert computed(echo, StepPlan(2, [row([11], start=4, blocks=(5, 3))])).token_ids == [7]


def test_hash_draws_from_all_tokens_however_they_were_chunked() -> None:
    chunked = runner(MockMode.HASH)
    assert computed(chunked, StepPlan(1, [row([7, 8, 9], output=None)])).token_ids == [None]
    drawn = computed(chunked, StepPlan(2, [row([10, 11], start=3)])).token_ids
    assert drawn == [hashed_token([7, 8, 9, 10, 11], VOCAB_SIZE, EOS)]
    assert drawn == computed(runner(MockMode.HASH), StepPlan(1, [row([7, 8, 9, 10, 11], blocks=(0, 2))])).token_ids


def test_hash_never_ends_a_sequence() -> None:
    assert {hashed_token([i], 3, frozenset({1})) for i in range(200)} == {0, 2}


def test_choices_and_grammars_change_the_draw() -> None:
    tokens = list(range(3, 20))
    assert len({hashed_token(tokens, 10**6, EOS, choice) for choice in range(8)}) == 8
    assert hashed_token(tokens, VOCAB_SIZE, EOS, allowed=[2]) == 2
    assert {hashed_token([i], VOCAB_SIZE, EOS, allowed=[4, 9]) for i in range(50)} == {4, 9}
    other = computed(runner(MockMode.HASH, choice=3), StepPlan(1, [row([7, 8])])).token_ids
    assert other == [hashed_token([7, 8], VOCAB_SIZE, EOS, 3)]


def test_a_wrong_block_changes_the_hash() -> None:
    wrong = runner(MockMode.HASH, "r", "s")
    computed(wrong, StepPlan(1, [
        row([7, 8, 9, 10], output=None), row([7, 8, 9, 11], blocks=(6,), output=None, name="s")]))
    one, two = (computed(wrong, StepPlan(2, [row([12], start=4, blocks=(b, 1))])).token_ids for b in (5, 6))
    assert one != two


def test_an_unknown_token_is_the_one_drawn_before() -> None:
    mock = runner(MockMode.HASH)
    mock.launch(StepPlan(1, [row([7, 8])]))
    mock.launch(StepPlan(2, [], decode(2)))
    (first,) = mock.collect().token_ids
    assert mock.collect().token_ids == [hashed_token([7, 8, first or 0], VOCAB_SIZE, EOS)]
    with pytest.raises(RuntimeError, match="position 5 is unknown here too"):
        computed(mock, StepPlan(3, [], decode(5)))


def test_blocks_are_copied_before_anything_is_written() -> None:
    mock = runner(MockMode.HASH, "r", "s")
    computed(mock, StepPlan(1, [row([7, 8], output=None)]))
    plan = StepPlan(2, [row([9], 2), row([10], 2, (6,), name="s")], copies=[BlockCopy(5, 6)])
    assert computed(mock, plan).token_ids == [
        hashed_token([7, 8, 9], VOCAB_SIZE, EOS), hashed_token([7, 8, 10], VOCAB_SIZE, EOS)]


class Masks:
    def wait(self) -> Mapping[int, NDArray[np.uint32]]:
        return {1: np.array([1 << 9, 1 << 8], np.uint32)}


def test_a_masked_row_draws_an_allowed_token() -> None:
    assert allowed_ids(Masks().wait()[1]) == [9, 40]
    mock = runner(MockMode.HASH, "r", "s")
    plan = StepPlan(1, [row([7, 8]), row([7, 8], blocks=(6,), name="s")], masks=Masks())
    free, masked = computed(mock, plan).token_ids
    assert free == hashed_token([7, 8], VOCAB_SIZE, EOS)
    assert masked == hashed_token([7, 8], VOCAB_SIZE, EOS, allowed=[9, 40])


def test_logprobs_are_those_of_the_drawn_and_of_the_prompts_tokens() -> None:
    params = SamplingParams(max_tokens=8, logprobs=0, prompt_logprobs=0)
    mock = MockRunner(MockMode.HASH, num_blocks=8, block_size=4, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    joins = [Join("r", [7, 8, 9, 10], 4, params, 0)]
    first = computed(mock, StepPlan(1, [PlannedRow("r", [7, 8], 0, (5,), False, 0, params, True)], joins=joins))
    assert first.prompt_logprobs == {0: [mock_logprobs(8), mock_logprobs(9)]}
    last = computed(mock, StepPlan(2, [PlannedRow("r", [9, 10], 2, (5,), True, 0, params, True)]))
    assert last.prompt_logprobs == {0: [mock_logprobs(10)]}
    assert last.logprobs == {0: mock_logprobs(last.token_ids[0] or 0)}


def test_faults_of_the_plan_are_errors() -> None:
    faulty = runner(MockMode.HASH)
    with pytest.raises(RuntimeError, match="never written"):
        computed(faulty, StepPlan(1, [row([7], start=4)]))
    with pytest.raises(RuntimeError, match="no block for position 8"):
        computed(faulty, StepPlan(1, [row([7], start=8)]))
    with pytest.raises(RuntimeError, match="written twice"):
        computed(faulty, StepPlan(1, [row([7]), row([8])]))
    with pytest.raises(RuntimeError, match="has not joined"):
        computed(faulty, StepPlan(1, [row([7], name="s")]))
    with pytest.raises(RuntimeError, match="joins in step 1, but is known"):
        computed(faulty, StepPlan(1, [], joins=[Join("r", [7], 1, PARAMS, 0)]))
    with pytest.raises(ValueError, match="eos_token_ids"):
        MockRunner(MockMode.ECHO, num_blocks=1, block_size=1, vocab_size=2, eos_token_ids=frozenset({0, 1}))


def test_what_is_in_flight_is_not_written_for_another_nor_forgotten() -> None:
    def one_in_flight() -> MockRunner:
        mock = runner(MockMode.HASH, "r", "s")
        mock.launch(StepPlan(1, [row([7, 8])], copies=[BlockCopy(2, 3)]))
        return mock

    with pytest.raises(RuntimeError, match=r"writes block 5 for s while it is in flight for \['r'\]"):
        one_in_flight().launch(StepPlan(2, [row([7], name="s")]))
    with pytest.raises(RuntimeError, match="writes block 5 for a copy"):
        one_in_flight().launch(StepPlan(2, [row([7], name="s", blocks=(6,))], copies=[BlockCopy(1, 5)]))
    with pytest.raises(RuntimeError, match="writes block 2 for s while it is copied from"):
        one_in_flight().launch(StepPlan(2, [row([7], name="s", blocks=(2,))]))
    with pytest.raises(RuntimeError, match="forgotten while it is in flight"):
        one_in_flight().forget("r")
    mock = one_in_flight()
    mock.launch(StepPlan(2, [row([8], 2)]))
    with pytest.raises(RuntimeError, match="while two others are in flight"):
        mock.launch(StepPlan(3, [row([8], 3)]))
    assert isinstance(mock.collect(), StepResult)


def test_a_block_view_is_the_slots_themselves() -> None:
    mock = runner(MockMode.HASH)
    computed(mock, StepPlan(1, [row([7, 8, 9, 10, 11], output=None)]))
    assert mock.block_bytes == len(mock.block_view(5)) == 16
    assert mock.block_view(5).cast("i").tolist() == [7, 8, 9, 10]
    assert mock.block_view(1).cast("i").tolist() == [11, -1, -1, -1]
    mock.block_view(2)[:] = mock.block_view(5)
    mock.block_view(3)[:] = mock.block_view(1)
    drawn = computed(mock, StepPlan(2, [row([12], start=5, blocks=(2, 3))])).token_ids
    assert drawn == [hashed_token([7, 8, 9, 10, 11, 12], VOCAB_SIZE, EOS)]
    for outside in (-1, 8):
        with pytest.raises(IndexError, match="outside the pool of 8"):
            mock.block_view(outside)
