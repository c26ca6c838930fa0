from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common.generation import TokenLogprobs
from common.tokenized import TokenText
from gateway.order import Piece, Usage
from gateway.token_texts import TokenTexts
from tests.fakes import FakeTokenizer, fake_logprobs

USAGE = Usage(1, 0, 1)


def piece(*ids: int, num_top: int = 0) -> Piece:
    return Piece("", USAGE, ids, logprobs=tuple(fake_logprobs(i, num_top) for i in ids))


async def test_all_tokens_that_a_piece_names_are_known_and_asked_for_once() -> None:
    tokenizer = FakeTokenizer()
    texts = TokenTexts(tokenizer)
    found = await texts.of("m", piece(70, 80, num_top=2))
    assert {i: found[i].raw for i in (69, 70, 79, 80)} == {69: b"E", 70: b"F", 79: b"O", 80: b"P"}
    await texts.of("m", piece(80, 70, 79))
    assert tokenizer.num_texts_asked == 4
    prompt = Piece("", USAGE, prompt_token_ids=(1, 2), prompt_logprobs=(None, TokenLogprobs(-1.0, (3,), (-0.5,))))
    assert set(await texts.of("other", prompt)) == {1, 2, 3}, "models have tables of their own"


async def test_the_table_is_bounded_and_a_piece_has_its_texts_all_the_same() -> None:
    texts = TokenTexts(FakeTokenizer(), max_known=10)
    for first in range(0, 200, 7):
        found = await texts.of("m", piece(*range(first, first + 8)))
        assert set(range(first, first + 8)) <= set(found)
        assert len(texts._tables["m"]) <= 10


async def test_calls_at_once_do_not_take_texts_from_each_other() -> None:
    class Slow(FakeTokenizer):
        async def token_texts(self, model: str, token_ids: Sequence[int]) -> list[TokenText]:
            await asyncio.sleep(0)
            return await super().token_texts(model, token_ids)

    texts = TokenTexts(Slow(), max_known=6)
    pieces = [piece(*range(first, first + 5)) for first in range(0, 100, 3)]
    for wanted, found in zip(pieces, await asyncio.gather(*(texts.of("m", p) for p in pieces)), strict=True):
        assert set(wanted.token_ids) <= set(found)
