"""Where one output stands in its grammar.

    OPEN ──accept──▶ OPEN ──accept of the last token or of an end token──▶ FINISHED
      └──a limit of the grammar is hit──▶ FAILED: every later `accept` and `fill` raises

A rejected token changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class GrammarState(Protocol):
    """One choice's position in its grammar. Used by one thread at a time.

    The end: once `is_finished` the output is complete and nothing may follow, so the request ends there with reason
    `stop` and without a further token, whatever min_tokens and ignore_eos say. Where the text may end but also go on,
    the mask allows the model's end tokens beside the others.

    Forced places: where the grammar allows only one run of bytes, the mask allows only the first token of the run's
    canonical tokenization. So drawing token by token and taking `forced()` at once give the same tokens.
    """

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens of the output: drawn, forced, or replayed. An end token finishes.

        Raises `InvalidRequest` when one is not allowed (the state stays where it was before the call) or a limit of
        the grammar is hit: the request has to end with that error. A failed `fill` shows here too, at the latest.
        """

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow here, canonically tokenized; not yet accepted. Empty where there is a choice."""

    @property
    def is_finished(self) -> bool:
        """Nothing may follow but an end token."""

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Set `words` [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is set where token i is allowed.

        End tokens are allowed where the text may end. Raises `InvalidRequest` when a limit of the grammar is hit.
        """

    def fork(self) -> GrammarState:
        """A state at the same place that goes on by itself: for another choice."""
