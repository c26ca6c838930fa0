"""What the sampler keeps of one sequence, and how that changes a row of logits. Torch-free.

Life cycle: made at the sequence's join → its history grows with each row and draw → dropped by `forget`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.sampling_params import SamplingParams
from engine.sampling.noise import row_key, seed_key
from engine.sampling.token_history import TokenHistory
from engine.step import Join

Floats = NDArray[np.float32]
MINUS_INFINITY = np.float32(-np.inf)


class SampledSequence:
    """`end_token_ids`: the model's. `join` None: a sequence whose draws depend on nothing but its parameters."""

    def __init__(self, params: SamplingParams, end_token_ids: frozenset[int], join: Join | None = None) -> None:
        self.params = params
        self.prompt: Sequence[int] = ()  # only where it is scored
        self._key = seed_key(params.seed, join.choice if join else 0)
        self._history: TokenHistory | None = None
        if join is not None and params.needs_history:
            self._history = TokenHistory(join.token_ids, join.num_prompt_tokens)
        if join is not None and params.prompt_logprobs is not None:
            self.prompt = join.token_ids[: join.num_prompt_tokens]
        self._bias_ids = np.fromiter(params.logit_bias, np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)
        self._end_ids = np.array(sorted(end_token_ids | set(params.stop_token_ids)), np.int64)
        self._allowed_ids: NDArray[np.int64] | None = None
        if params.allowed_token_ids is not None:
            self._allowed_ids = np.array(params.allowed_token_ids, np.int64)
        self._always_changes = self._history is not None or bool(params.logit_bias) or self._allowed_ids is not None

    def key(self, output_position: int) -> int:
        """Of the noise of the draw at `output_position`."""
        return row_key(self._key, output_position)

    def learn(self, start: int, token_ids: Sequence[int]) -> None:
        """The sequence's tokens at positions `start`, `start + 1`, …"""
        if self._history is not None:
            self._history.learn(start, token_ids)

    def changes_logits(self, output_position: int) -> bool:
        """Whether `change` does anything, a mask aside."""
        return self._always_changes or output_position < self.params.min_tokens

    def change(self, row: Floats, output_position: int, words: NDArray[np.uint32] | None) -> None:
        """Change `row` [vocab] in place; `words` are the grammar's bits. A token that is ruled out is -infinity."""
        raw = row.copy()
        self._rule_out(row, output_position, words)
        row[self._bias_ids] += self._bias
        self._penalize(row)
        if row.max() == MINUS_INFINITY:
            row[:] = raw
            if words is not None:
                _keep_allowed(row, words)
            elif self._allowed_ids is not None:
                _keep_only(row, self._allowed_ids)

    def _rule_out(self, row: Floats, output_position: int, words: NDArray[np.uint32] | None) -> None:
        if self._allowed_ids is not None:
            _keep_only(row, self._allowed_ids)
        if words is not None:
            _keep_allowed(row, words)
        if self._history is not None:
            row[_completing(self.params.bad_words, self._history.output_ids)] = MINUS_INFINITY
        if output_position < self.params.min_tokens:
            row[self._end_ids] = MINUS_INFINITY

    def _penalize(self, row: Floats) -> None:
        """Repetition as in CTRL (Keskar et al. 2019); frequency and presence as in the OpenAI API."""
        params, history = self.params, self._history
        if history is None:
            return
        logits = row[history.ids]
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            repeated = np.where(logits > 0, logits / penalty, logits * penalty)
            logits = np.where(history.is_seen, repeated, logits)
        logits -= np.float32(params.frequency_penalty) * history.counts
        logits -= np.float32(params.presence_penalty) * (history.counts > 0)
        row[history.ids] = logits


def _keep_only(row: Floats, ids: NDArray[np.int64]) -> None:
    kept = row[ids]
    row.fill(MINUS_INFINITY)
    row[ids] = kept


def _keep_allowed(row: Floats, words: NDArray[np.uint32]) -> None:
    bits = np.unpackbits(words.view(np.uint8), count=len(row), bitorder="little")
    np.copyto(row, MINUS_INFINITY, where=bits == 0)


def _completing(bad_words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the sequences at the end of the outputs."""
    return [word[-1] for word in bad_words
            if len(word) == 1 or list(word[:-1]) == output_ids[-len(word) + 1 :]]
