"""Bad words of a call, in front of fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.generation import ModelFacts
from common.tokenized import Tokenized
from gateway.attempts import AttemptLimits
from gateway.batch import run_all
from gateway.completion_request import CompletionRequest
from gateway.order import Order
from gateway.pipeline import Pipeline, PipelineLimits
from tests.fakes import MODEL, FakeDecode, FakeTokenizer

FACTS = ModelFacts(MODEL, 512, 1)


def pipeline(decode: FakeDecode, tokenizer: FakeTokenizer) -> Pipeline:
    return Pipeline(tokenizer, decode, None, PipelineLimits(AttemptLimits(0.3, 3), 16))


class CountingTokenizer(FakeTokenizer):
    """Counts the calls for texts that begin with w; refuses one of them."""

    def __init__(self, refused: str = "") -> None:
        super().__init__()
        self.words: list[str] = []
        self.num_now = self.num_most = 0
        self._refused = refused

    async def tokenize_text(self, model: str, text: str, **options: Any) -> Tokenized:
        if text.lstrip(" ")[0] != "w":
            return await super().tokenize_text(model, text, **options)
        self.words.append(text)
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            await asyncio.sleep(0)
            if text == self._refused:
                raise InvalidRequest("prompt: refused", param="prompt")
            await asyncio.sleep(0.01 if self._refused else 0)
            return await super().tokenize_text(model, text, **options)
        finally:
            self.num_now -= 1


async def test_bad_words_are_tokenized_once_for_all_prompts_of_a_call_a_few_at_a_time() -> None:
    body = CompletionRequest.model_validate({
        "model": MODEL, "prompt": [f"p{i}" for i in range(8)], "bad_words": [f"w{i}" for i in range(60)]})
    orders = body.orders(FACTS)
    decode, tokenizer = FakeDecode(), CountingTokenizer()
    end = asyncio.get_running_loop().time() + 5
    async for _ in run_all(pipeline(decode, tokenizer), orders, end, 4):
        pass
    assert sorted(tokenizer.words) == sorted([*(f"w{i}" for i in range(60)), *(f" w{i}" for i in range(60))])
    assert 1 < tokenizer.num_most <= 16
    assert len({generation.params.bad_words for generation in decode.generations}) == 1
    assert len(decode.generations) == 8
    assert len(decode.generations[0].params.bad_words) == 120


async def test_a_bad_word_that_is_refused_leaves_no_call_for_another_running() -> None:
    tokenizer = CountingTokenizer(refused="w3")
    order = Order("r1", FACTS, "hi", 4, bad_words=tuple(f"w{i}" for i in range(20)))
    with pytest.raises(InvalidRequest, match="bad_words: refused") as caught:
        async for _ in pipeline(FakeDecode(), tokenizer).run(order, asyncio.get_running_loop().time() + 5):
            pass
    assert caught.value.param == "bad_words"
    assert tokenizer.num_now == 0
    assert len(tokenizer.words) <= 16
