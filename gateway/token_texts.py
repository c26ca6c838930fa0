"""Texts of single token ids, for logprobs: asked of the tokenizer once, then known here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final

from common.generation import TokenLogprobs
from common.tokenized import TokenizerPort, TokenText
from gateway.json_lists import SLICE
from gateway.order import Piece

MAX_KNOWN: Final = 1 << 17  # of one model; some 20 MB
NO_TEXTS: Final[Mapping[int, TokenText]] = MappingProxyType({})


class TokenTexts:
    """One table a model, emptied when it is full. Models are those that workers have served."""

    def __init__(self, tokenizer: TokenizerPort, max_known: int = MAX_KNOWN) -> None:
        self._tokenizer, self._max_known = tokenizer, max_known
        self._tables: dict[str, dict[int, TokenText]] = {}

    async def of(self, model: str, piece: Piece) -> Mapping[int, TokenText]:
        """At least those of all tokens that the piece's logprobs name."""
        wanted = await asyncio.to_thread(_wanted, piece) if is_long(piece) else _wanted(piece)
        known = self._tables.setdefault(model, {})
        missing = sorted(token_id for token_id in wanted if token_id not in known)
        if not missing:
            return known
        found = dict(zip(missing, await self._tokenizer.token_texts(model, missing), strict=True))
        table = self._tables[model]  # `known`, or its successor; nothing is ever taken out of one
        if len(table) + len(found) > self._max_known:
            table = self._tables[model] = {}
        table.update(found)
        return found | {token_id: known[token_id] for token_id in wanted if token_id not in found}


def is_long(piece: Piece) -> bool:
    """Its logprobs are too many for the event loop: what is done with them belongs in a thread."""
    return len(piece.logprobs) + len(piece.prompt_logprobs) > SLICE


def _wanted(piece: Piece) -> set[int]:
    wanted = {*piece.token_ids, *_named(piece.logprobs)} if piece.logprobs else set[int]()
    if piece.prompt_logprobs:
        wanted.update(piece.prompt_token_ids, _named(piece.prompt_logprobs))
    return wanted


def _named(scores: Iterable[TokenLogprobs | None]) -> Iterable[int]:
    return chain.from_iterable(score.top_token_ids for score in scores if score is not None)
