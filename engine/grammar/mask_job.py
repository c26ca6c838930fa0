"""Fills the token masks of a step in threads, while the step's forward pass runs.

A job: NEW ──provide──▶ FILLING ──all rows filled──▶ READY; `wait` blocks until READY.

The plan of a step is made with a new job in it, before the tokens of the step before are known. When they are, the
states accept them and go to `provide`. The states are the job's until `wait` has returned. Torch-free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all

import numpy as np
from numpy.typing import NDArray

from common.errors import InternalError, ShoalError
from engine.grammar.state import GrammarState

log = logging.getLogger(__name__)

Words = NDArray[np.uint32]
ALL = np.uint32(0xFFFFFFFF)
WAIT_S = 30.0  # far beyond what the limits of grammars let one fill take


class MaskJob:
    """The masks of one step: an `engine.step.TokenMasks`. Made by `MaskJobs.new`."""

    def __init__(self, num_words: int, pool: ThreadPoolExecutor, num_threads: int, wait_s: float) -> None:
        self._num_words = num_words
        self._pool = pool
        self._num_threads = num_threads
        self._wait_s = wait_s
        self._is_provided = threading.Event()
        self._masks: dict[int, Words] = {}
        self._parts: list[Future[None]] = []

    def provide(self, states: Mapping[int, GrammarState]) -> None:
        """Begin to fill: row of the plan -> its state. Once; an empty mapping when no row is constrained after all.

        A state whose limit is hit gets an all-allowed mask; its next `accept` raises, which ends that request alone.
        """
        if self._is_provided.is_set():
            raise InternalError("the states of a mask job were provided twice")
        words = np.empty((len(states), self._num_words), dtype=np.uint32)
        filled = list(zip(states.values(), words, strict=True))
        self._masks = dict(zip(states, words, strict=True))
        self._parts = [
            self._pool.submit(_fill, filled[first :: self._num_threads])
            for first in range(min(self._num_threads, len(filled)))]
        self._is_provided.set()

    def wait(self) -> Mapping[int, Words]:
        """As `TokenMasks.wait`. Raises what a fill raised, and `InternalError` when the masks do not come in time."""
        deadline = time.monotonic() + self._wait_s
        if not self._is_provided.wait(self._wait_s):
            raise InternalError(f"the states of a step's token masks were not provided within {self._wait_s} s")
        _, open_parts = wait_all(self._parts, max(0.0, deadline - time.monotonic()))
        if open_parts:
            raise InternalError(f"the token masks of a step were not filled within {self._wait_s} s")
        for part in self._parts:
            part.result()
        return self._masks


class MaskJobs:
    """Makes the jobs of one engine; they share `num_threads` threads."""

    def __init__(self, vocab_size: int, num_threads: int, wait_s: float = WAIT_S) -> None:
        self._num_words = -(-vocab_size // 32)
        self._num_threads = num_threads
        self._wait_s = wait_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar-mask")

    def new(self) -> MaskJob:
        return MaskJob(self._num_words, self._pool, self._num_threads, self._wait_s)

    def close(self) -> None:
        """Drop what has not begun. A job that waits for it fails."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _fill(filled: Sequence[tuple[GrammarState, Words]]) -> None:
    for state, words in filled:
        try:
            state.fill(words)
        except ShoalError as error:
            log.warning("a grammar's token mask could not be made: %s", error)
            words.fill(ALL)
