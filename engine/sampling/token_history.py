"""The tokens of one sequence, as far as penalties and bad words need them.

Life cycle: made when the sequence joins, from all its known tokens → grows with its rows and draws → dropped with it.
Position p's token is learnt once, whoever brings it first: a row of the plan (a chunk, a forced run) or the own draw.
A row that brings another token for a known output position takes back all outputs from there on. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import InternalError


class TokenHistory:
    """Distinct ids in the order of their first appearance, each with its number among the outputs."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._outputs: list[int] = []
        self._place: dict[int, int] = {}  # id -> place in the arrays
        prompt = list(dict.fromkeys(token_ids[:num_prompt_tokens]))
        self._num_prompt_ids = len(prompt)
        self._place.update(zip(prompt, range(len(prompt)), strict=True))
        self._ids = np.array(prompt + [0] * 64, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self.learn(num_prompt_tokens, token_ids[num_prompt_tokens:])

    @property
    def output_ids(self) -> Sequence[int]:
        return self._outputs

    @property
    def ids(self) -> NDArray[np.int64]:
        """[num_distinct] of prompt and outputs. A view."""
        return self._ids[: len(self._place)]

    @property
    def is_seen(self) -> NDArray[np.bool_]:
        """[num_distinct] whether each of `ids` is in the prompt or among the outputs now."""
        is_seen = self.counts > 0
        is_seen[: self._num_prompt_ids] = True
        return is_seen

    @property
    def counts(self) -> NDArray[np.float32]:
        """[num_distinct] how often each of `ids` is among the outputs. A view."""
        return self._counts[: len(self._place)]

    def learn(self, start: int, token_ids: Sequence[int]) -> None:
        """Tokens at positions `start`, `start + 1`, …; those of the prompt, and those that are known, are skipped."""
        first = start - self._num_prompt_tokens  # among the outputs
        for index, token_id in enumerate(token_ids[max(0, -first) :], max(0, first)):
            if index < len(self._outputs):
                if self._outputs[index] == token_id:
                    continue
                self._take_back(index)
            if index > len(self._outputs):
                raise InternalError(f"output {len(self._outputs)} of a sequence was skipped: {index} came first")
            self._append(token_id)

    def _append(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1
        self._outputs.append(token_id)

    def _take_back(self, num_kept: int) -> None:
        for token_id in self._outputs[num_kept:]:
            self._counts[self._place[token_id]] -= 1
        del self._outputs[num_kept:]
