from __future__ import annotations

import asyncio

import pytest

from common.errors import ConfigError, Unavailable
from common.tokenized import ModelText
from gateway.model_formats import LOOK_AGAIN_S, ModelFormats
from gateway.output_parsers import Formats
from tests.fakes import FakeTokenizer

HERMES = "<tool_call>{}</tool_call>"


class Describing(FakeTokenizer):
    """Tells of each model the template that it has here, or fails."""

    def __init__(self, **templates: str) -> None:
        super().__init__()
        self.templates = templates
        self.asked: list[str] = []
        self.tool_template = ""

    async def describe(self, model: str) -> ModelText:
        self.asked.append(model)
        if self.templates.get(model) == "hangs":
            await asyncio.Event().wait()
        if model not in self.templates:
            raise Unavailable("no replica")
        return ModelText(model, 10, (), None, self.templates[model], self.tool_template)


async def test_each_model_is_described_once() -> None:
    tokenizer = Describing(a=HERMES, b="[THINK]")
    formats = ModelFormats(tokenizer)
    assert [await formats.of(name) for name in "abab"] == [
        Formats("hermes"), Formats(reasoning_parser="mistral")] * 2
    assert tokenizer.asked == ["a", "b"]


async def test_the_template_for_chats_with_tools_counts() -> None:
    tokenizer = Describing(a="plain")
    tokenizer.tool_template = HERMES
    assert await ModelFormats(tokenizer).of("a") == Formats("hermes")


async def test_a_model_that_cannot_be_described_is_refused_and_asked_for_again() -> None:
    tokenizer = Describing()
    formats = ModelFormats(tokenizer)
    with pytest.raises(Unavailable, match="chat template"):
        await formats.of("a")
    tokenizer.templates["a"] = HERMES
    assert await formats.of("a") == Formats("hermes")


async def test_a_description_that_does_not_come_is_not_waited_for_beyond_the_limit() -> None:
    with pytest.raises(Unavailable, match="chat template"):
        await ModelFormats(Describing(a="hangs"), "hermes", timeout_s=0.01).of("a")


async def test_requests_for_one_model_share_one_question_and_one_that_leaves_does_not_end_it() -> None:
    tokenizer = Describing(a=HERMES)
    formats = ModelFormats(tokenizer)
    first, *others = [asyncio.create_task(formats.of("a")) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    assert await asyncio.gather(*others) == [Formats("hermes")] * 2
    assert tokenizer.asked == ["a"]


async def test_what_is_known_is_looked_at_again_and_stands_meanwhile() -> None:
    tokenizer, now = Describing(a=HERMES), [0.0]
    formats = ModelFormats(tokenizer, now=lambda: now[0])
    assert await formats.of("a") == Formats("hermes")
    del tokenizer.templates["a"]
    now[0] += LOOK_AGAIN_S
    for _ in range(3):
        assert await formats.of("a") == Formats("hermes")
        await asyncio.sleep(0.01)
    assert tokenizer.asked == ["a", "a"], "a look that failed is not repeated at once"
    tokenizer.templates["a"] = "[THINK]"
    now[0] += LOOK_AGAIN_S
    assert await formats.of("a") == Formats("hermes")
    await asyncio.sleep(0.01)
    assert await formats.of("a") == Formats(reasoning_parser="mistral")


async def test_with_both_names_given_nothing_is_asked() -> None:
    tokenizer = Describing(a=HERMES)
    assert await ModelFormats(tokenizer, "pythonic", "none").of("a") == Formats("pythonic")
    assert tokenizer.asked == []


def test_an_unknown_name_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser"):
        ModelFormats(FakeTokenizer(), "x")
