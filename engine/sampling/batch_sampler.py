"""Draws a token for each row of a step that samples. See the package for the order of things. Torch-free.

Keeps of each sequence what its draws depend on (`SampledSequence`): from its join to `forget`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import InternalError
from common.generation import TokenLogprobs
from engine.sampling.gumbel_draw import draw_rows
from engine.sampling.sequence import SampledSequence
from engine.sampling.token_logprobs import token_logprobs
from engine.sampling.truncation import draw_truncated, is_truncated
from engine.step import Join, PlannedRow

Floats = NDArray[np.float32]
Masks = Mapping[int, NDArray[np.uint32]]

_SLICE_LOGITS = 1 << 17  # logits that are worked on together: half a megabyte, within a core's cache


class BatchSampler:
    """Used by one thread. A sequence that never joined may have parameters that need no history."""

    def __init__(self, end_token_ids: frozenset[int]) -> None:
        self._end_token_ids = end_token_ids
        self._sequences: dict[str, SampledSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def join(self, join: Join) -> None:
        """A sequence is new, or back with all its known tokens."""
        self._sequences[join.request_id] = SampledSequence(join.params, self._end_token_ids, join)

    def forget(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    def prompt_of(self, request_id: str) -> Sequence[int]:
        """The prompt of a sequence whose prompt is scored. Raises `InternalError` for any other."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.prompt:
            raise InternalError(f"the prompt of {request_id} is to be scored, but its sequence never joined")
        return sequence.prompt

    def learn(self, row: PlannedRow) -> None:
        """The tokens that a row brings, whether it samples or not."""
        if row.params.needs_history and (sequence := self._sequences.get(row.request_id)):
            sequence.learn(row.start, row.token_ids)

    def draw(
        self, rows: Sequence[PlannedRow], logits: Floats, masks: Sequence[NDArray[np.uint32] | None]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """`logits` [rows, vocab] float32, not changed; `masks` the grammar's bits of each row, None where it is free.

        Raises `InternalError` when the best logit of a row is not a finite number.
        """
        sequences = [self._sequence(row) for row in rows]
        tokens: list[int] = []
        step = max(1, _SLICE_LOGITS // max(1, logits.shape[1]))
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            tokens += self._draw_slice(rows[part], sequences[part], logits[part], masks[part])
        scores: list[TokenLogprobs | None] = [None] * len(rows)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if row.params.logprobs is not None:
                scores[i] = token_logprobs(logits[i], token, row.params.logprobs)
            sequences[i].learn(row.start + len(row.token_ids), (token,))
        return tokens, scores

    def _sequence(self, row: PlannedRow) -> SampledSequence:
        sequence = self._sequences.get(row.request_id)
        if sequence is None:
            if row.params.needs_history:
                raise InternalError(f"{row.request_id} samples by its history, but never joined")
            return SampledSequence(row.params, self._end_token_ids)
        return sequence

    def _draw_slice(
        self, rows: Sequence[PlannedRow], sequences: Sequence[SampledSequence], raw: Floats,
        masks: Sequence[NDArray[np.uint32] | None],
    ) -> list[int]:
        best = raw.argmax(axis=1)
        _check_finite(raw, best)
        changed = [i for i, (row, sequence, mask) in enumerate(zip(rows, sequences, masks, strict=True))
                   if mask is not None or sequence.changes_logits(row.output_position)]
        logits = raw.copy() if changed else raw
        for i in changed:
            sequences[i].change(logits[i], rows[i].output_position, masks[i])
            best[i] = logits[i].argmax()
        tokens: list[int] = best.tolist()
        whole: list[int] = []
        for i, row in enumerate(rows):
            params = row.params
            if params.is_greedy:
                continue
            if is_truncated(params):
                key = sequences[i].key(row.output_position)
                tokens[i] = draw_truncated(logits[i], float(logits[i, best[i]]), params, key)
            else:
                whole.append(i)
        if whole:
            drawn = _draw_whole(rows, sequences, logits, best, whole)
            for i, token in zip(whole, drawn.tolist(), strict=True):
                tokens[i] = token
        return tokens


def _draw_whole(
    rows: Sequence[PlannedRow], sequences: Sequence[SampledSequence], logits: Floats, best: NDArray[np.int64],
    whole: list[int],
) -> NDArray[np.int64]:
    temperatures = np.array([rows[i].params.temperature for i in whole])
    keys = np.array([sequences[i].key(rows[i].output_position) for i in whole], np.uint64)
    top = logits[whole, best[whole]]
    return draw_rows(logits if len(whole) == len(rows) else logits[whole], top, temperatures, keys)


def _check_finite(logits: Floats, best: NDArray[np.int64]) -> None:
    top = logits[np.arange(len(best)), best]
    if not np.isfinite(top).all():
        row = int(np.flatnonzero(~np.isfinite(top))[0])
        raise InternalError(f"the model's logits are not finite (best is {top[row]} at token {best[row]})")
