"""A `GrammarState` by llguidance (Earley parser over derivatives of regexes; Moskal et al., microsoft/llguidance).

Life cycle: as `GrammarState`. FAILED is the matcher's own error state. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from common.errors import InvalidRequest

MAX_REASON_CHARS = 300


class LlguidanceState:
    """Owns its matcher. What an end token means is decided here, so that it is the same in every state."""

    def __init__(self, matcher: LLMatcher, end_token_ids: frozenset[int], num_accepted: int = 0) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._num_accepted = num_accepted
        self._has_ended = False  # by an end token

    def accept(self, token_ids: Sequence[int]) -> None:
        num_text = next((i for i, token in enumerate(token_ids) if token in self._end_token_ids), len(token_ids))
        num_taken = 0
        if num_text:
            if self._has_ended:
                raise self._rejection(token_ids[0])
            num_taken = self._matcher.try_consume_tokens(list(token_ids[:num_text]))
            self._raise_failure()
        if num_taken == num_text == len(token_ids):
            self._num_accepted += num_taken
            return
        may_end = num_taken == num_text and (self._has_ended or self._matcher.is_accepting())
        if not may_end or num_text + 1 != len(token_ids):
            self._matcher.rollback(num_taken)
            raise self._rejection(token_ids[num_taken + (1 if may_end else 0)])
        self._num_accepted += num_taken + 1
        self._has_ended = True

    def forced(self) -> tuple[int, ...]:
        return () if self.is_finished else tuple(self._matcher.compute_ff_tokens())

    @property
    def is_finished(self) -> bool:
        return self._has_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fill(self, words: NDArray[np.uint32]) -> None:
        self._raise_failure()
        if not self.is_finished:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)  # lets go of the GIL
            self._raise_failure()
            return
        words.fill(0)
        for token_id in self._end_token_ids:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def fork(self) -> LlguidanceState:
        other = LlguidanceState(self._matcher.deep_copy(), self._end_token_ids, self._num_accepted)
        other._has_ended = self._has_ended
        return other

    def _raise_failure(self) -> None:
        if self._matcher.is_error():
            raise refusal(
                f"stopped after {self._num_accepted} tokens of output: {reason_of(self._matcher.get_error())}")

    def _rejection(self, token_id: int) -> InvalidRequest:
        return refusal(f"token {token_id} is not allowed after {self._num_accepted} tokens of output")


def refusal(reason: str) -> InvalidRequest:
    """The error of every grammar that does not work."""
    return InvalidRequest(f"grammar: {reason}", param="grammar")


def reason_of(message: str) -> str:
    """llguidance's error on one line, cut to `MAX_REASON_CHARS`."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}…"
