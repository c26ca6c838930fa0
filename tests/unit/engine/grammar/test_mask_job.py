from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import InternalError, InvalidRequest
from engine.grammar.mask_job import MaskJobs
from engine.step import TokenMasks


class FakeState:
    is_finished = False

    def __init__(self, fill: Callable[[NDArray[np.uint32]], None]) -> None:
        self._fill = fill

    def accept(self, token_ids: Sequence[int]) -> None: ...

    def forced(self) -> tuple[int, ...]:
        return ()

    def fork(self) -> FakeState:
        return self

    def fill(self, words: NDArray[np.uint32]) -> None:
        self._fill(words)


def _constant(word: int) -> FakeState:
    return FakeState(lambda words: words.fill(word))


def test_each_row_gets_its_state_s_mask_whatever_the_number_of_threads() -> None:
    for num_threads in (1, 2, 5):
        jobs = MaskJobs(vocab_size=70, num_threads=num_threads)
        job = jobs.new()
        as_masks: TokenMasks = job
        job.provide({row: _constant(row) for row in (9, 0, 4, 7)})
        masks = as_masks.wait()
        assert {row: mask.tolist() for row, mask in masks.items()} == {row: [row] * 3 for row in (9, 0, 4, 7)}
        jobs.close()


def test_a_wait_that_comes_first_gets_the_masks_when_they_are_there() -> None:
    job = MaskJobs(32, 1).new()
    got: list[list[int]] = []
    waiting = threading.Thread(target=lambda: got.append(job.wait()[3].tolist()))
    waiting.start()
    job.provide({3: _constant(5)})
    waiting.join(10)
    assert got == [[5]]


def test_no_constrained_row_after_all_is_no_mask() -> None:
    job = MaskJobs(32, 1).new()
    job.provide({})
    assert job.wait() == {}


def test_a_state_that_has_failed_leaves_its_row_free_and_the_others_as_they_are() -> None:
    def refuse(words: NDArray[np.uint32]) -> None:
        raise InvalidRequest("grammar: too complex", param="grammar")

    job = MaskJobs(32, 1).new()
    job.provide({0: _constant(1), 1: FakeState(refuse), 2: _constant(2)})
    assert {row: mask.tolist() for row, mask in job.wait().items()} == {0: [1], 1: [0xFFFFFFFF], 2: [2]}


def test_any_other_error_is_raised_where_the_masks_are_waited_for() -> None:
    def break_down(words: NDArray[np.uint32]) -> None:
        raise ZeroDivisionError

    job = MaskJobs(32, 1).new()
    job.provide({0: FakeState(break_down)})
    with pytest.raises(ZeroDivisionError):
        job.wait()


def test_states_that_never_come_and_fills_that_never_end_are_errors_in_time() -> None:
    jobs = MaskJobs(32, 1, wait_s=0.1)
    with pytest.raises(InternalError, match="not provided"):
        jobs.new().wait()
    release = threading.Event()
    job = jobs.new()
    job.provide({0: FakeState(lambda words: release.wait(20) and None)})
    with pytest.raises(InternalError, match="not filled"):
        job.wait()
    release.set()


def test_states_are_provided_once() -> None:
    job = MaskJobs(32, 1).new()
    job.provide({})
    with pytest.raises(InternalError, match="twice"):
        job.provide({})
