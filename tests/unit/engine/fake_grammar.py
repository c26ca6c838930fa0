"""A grammar whose every step follows from a number, so that outputs under it have an exact oracle."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest

_FIRST_ID, _NUM_IDS = 3, 47


class FakeGrammar:
    """A `GrammarState`: outputs of `length` tokens; about half the places allow one token, the others four.

    It fails when it has to accept more than `max_accepted`.
    """

    def __init__(self, seed: int, length: int, accepted: Sequence[int] = (), max_accepted: int = 10**6) -> None:
        self.seed = seed
        self.length = length
        self.max_accepted = max_accepted
        self.accepted = list(accepted)

    @property
    def is_finished(self) -> bool:
        return len(self.accepted) >= self.length

    def allowed(self) -> list[int]:
        return self._allowed(self.accepted)

    def accept(self, token_ids: Sequence[int]) -> None:
        accepted = self.accepted.copy()
        for token_id in token_ids:
            if len(accepted) >= self.length or token_id not in self._allowed(accepted):
                raise InvalidRequest(f"grammar: token {token_id} is not allowed", param="grammar")
            accepted.append(token_id)
        if len(accepted) > self.max_accepted:
            raise InvalidRequest(f"grammar: more than {self.max_accepted} tokens", param="grammar")
        self.accepted = accepted

    def forced(self) -> tuple[int, ...]:
        ahead = self.accepted.copy()
        while len(ahead) < self.length and len(self._allowed(ahead)) == 1:
            ahead += self._allowed(ahead)
        return tuple(ahead[len(self.accepted) :])

    def fill(self, words: NDArray[np.uint32]) -> None:
        words.fill(0)
        for token_id in self.allowed():
            words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def fork(self) -> FakeGrammar:
        return FakeGrammar(self.seed, self.length, self.accepted, self.max_accepted)

    def _allowed(self, accepted: Sequence[int]) -> list[int]:
        digest = hashlib.blake2b(array("I", [self.seed, *accepted]).tobytes(), digest_size=8).digest()
        num = 1 if digest[0] % 2 else 4
        return sorted({_FIRST_ID + (digest[1] + i * 11) % _NUM_IDS for i in range(num)})
