import pytest

from common.sampling_params import SamplingParams
from engine.mock_runner import MockMode, MockRunner, hashed_token
from engine.step import PlannedRow, StepPlan
from tests.factories import computed
from tests.unit.engine.builders import EOS, VOCAB_SIZE

PARAMS = SamplingParams(max_tokens=8)


def runner(mode: MockMode) -> MockRunner:
    return MockRunner(mode, num_blocks=8, block_size=4, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


def row(tokens: list[int], start: int = 0, blocks: tuple[int, ...] = (5, 1), output: int | None = 0) -> PlannedRow:
    return PlannedRow("r", tokens, start, blocks, output is not None, output or 0, PARAMS)


def test_echo_answers_with_the_prompt_and_then_ends() -> None:
    echo = runner(MockMode.ECHO)
    assert computed(echo, StepPlan(1, [row([7, 8])])).token_ids == [7]
    assert computed(echo, StepPlan(2, [row([7], start=2, output=1)])).token_ids == [8]
    assert computed(echo, StepPlan(3, [row([8], start=3, output=2)])).token_ids == [2]


def test_echo_reads_a_cached_prompt_back_through_the_block_table() -> None:
    echo = runner(MockMode.ECHO)
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


def test_a_wrong_block_changes_the_hash() -> None:
    wrong = runner(MockMode.HASH)
    computed(wrong, StepPlan(1, [row([7, 8, 9, 10], output=None), row([7, 8, 9, 11], blocks=(6,), output=None)]))
    one, two = (computed(wrong, StepPlan(2, [row([12], start=4, blocks=(b, 1))])).token_ids for b in (5, 6))
    assert one != two


def test_faults_of_the_plan_are_errors() -> None:
    faulty = runner(MockMode.HASH)
    with pytest.raises(RuntimeError, match="never written"):
        computed(faulty, StepPlan(1, [row([7], start=4)]))
    with pytest.raises(RuntimeError, match="no block for position 8"):
        computed(faulty, StepPlan(1, [row([7], start=8)]))
    with pytest.raises(RuntimeError, match="written twice"):
        computed(faulty, StepPlan(1, [row([7]), row([8])]))
    with pytest.raises(ValueError, match="eos_token_ids"):
        MockRunner(MockMode.ECHO, num_blocks=1, block_size=1, vocab_size=2, eos_token_ids=frozenset({0, 1}))


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
