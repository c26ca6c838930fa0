"""A `GrammarState` by llguidance (Earley parser over derivatives of regexes; Moskal et al., microsoft/llguidance).

    OPEN, lexer shared ──a limit is hit──▶ OPEN, lexer of its own ──a limit is hit──▶ FAILED

The states of one grammar share a lexer, whose tables only grow: what one of them worked out, the others need not. But
so a state that exhausts the lexer's limits breaks it for all. Each then starts again with a lexer of its own, by
replaying its tokens, and only the state that exhausts that too has failed. Otherwise as `GrammarState`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from common.errors import InvalidRequest

MAX_REASON_CHARS = 300


class LlguidanceState:
    """Owns `matcher`; `renew` makes a fresh one at the start, with a lexer of its own.

    What an end token means is decided here, so that it is the same in every state of the matcher.
    """

    def __init__(
        self, matcher: LLMatcher, renew: Callable[[], LLMatcher] | None, end_token_ids: frozenset[int],
        accepted: Sequence[int] = (),
    ) -> None:
        self._matcher = matcher
        self._renew = renew  # None: it was needed before
        self._end_token_ids = end_token_ids
        self._accepted = list(accepted)  # without an end token
        self._has_ended = False  # by an end token

    def accept(self, token_ids: Sequence[int]) -> None:
        num_text = next((i for i, token in enumerate(token_ids) if token in self._end_token_ids), len(token_ids))
        num_taken = 0
        if num_text:
            if self._has_ended:
                raise self._rejection(token_ids[0])
            num_taken = self._take(token_ids[:num_text])
        if num_taken < num_text:
            self._matcher.rollback(num_taken)
            raise self._rejection(token_ids[num_taken])
        if num_text < len(token_ids):
            may_end = self._has_ended or self._matcher.is_accepting()
            if not may_end or num_text + 1 < len(token_ids):
                self._matcher.rollback(num_taken)
                raise self._rejection(token_ids[num_text + may_end])
            self._has_ended = True
        self._accepted += token_ids[:num_text]

    def forced(self) -> tuple[int, ...]:
        return () if self.is_finished else tuple(self._matcher.compute_ff_tokens())

    @property
    def is_finished(self) -> bool:
        return self._has_ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fill(self, words: NDArray[np.uint32]) -> None:
        if not self.is_finished:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)  # lets go of the GIL
            if self._matcher.is_error():
                self._start_again()
                self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                self._raise_failure()
        if self.is_finished:
            words.fill(0)
            for token_id in self._end_token_ids:
                words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def fork(self) -> LlguidanceState:
        other = LlguidanceState(self._matcher.deep_copy(), self._renew, self._end_token_ids, self._accepted)
        other._has_ended = self._has_ended
        return other

    def _take(self, token_ids: Sequence[int]) -> int:
        """How many of them were consumed."""
        num_taken = self._matcher.try_consume_tokens(list(token_ids))
        if self._matcher.is_error():
            self._start_again()
            num_taken = self._matcher.try_consume_tokens(list(token_ids))
            self._raise_failure()
        return num_taken

    def _start_again(self) -> None:
        if self._renew is None:
            self._raise_failure()
            return
        self._matcher, self._renew = self._renew(), None
        self._matcher.try_consume_tokens(self._accepted)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._matcher.is_error():
            raise refusal(
                f"stopped after {len(self._accepted)} tokens of output: {reason_of(self._matcher.get_error())}")

    def _rejection(self, token_id: int) -> InvalidRequest:
        return refusal(f"token {token_id} is not allowed after {len(self._accepted)} tokens of output")


def refusal(reason: str) -> InvalidRequest:
    """The error of every grammar that does not work."""
    return InvalidRequest(f"grammar: {reason}", param="grammar")


def reason_of(message: str) -> str:
    """llguidance's error on one line, cut to `MAX_REASON_CHARS`."""
    line = " ".join(message.replace("<non-verbose/>", "").replace("NoExtensionBias", "no text can go on here").split())
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}…"
