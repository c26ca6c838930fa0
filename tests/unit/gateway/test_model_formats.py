from __future__ import annotations

import asyncio

import pytest

from common.errors import ConfigError, Unavailable
from common.tokenized import ModelText
from gateway.model_formats import ModelFormats
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


async def test_a_model_that_cannot_be_described_has_no_formats_and_is_asked_for_again() -> None:
    tokenizer = Describing()
    formats = ModelFormats(tokenizer)
    assert await formats.of("a") == Formats()
    tokenizer.templates["a"] = HERMES
    assert await formats.of("a") == Formats("hermes")


async def test_a_description_that_does_not_come_is_not_waited_for_beyond_the_limit() -> None:
    assert await ModelFormats(Describing(a="hangs"), "hermes", timeout_s=0.01).of("a") == Formats("hermes")


async def test_with_both_names_given_nothing_is_asked() -> None:
    tokenizer = Describing(a=HERMES)
    assert await ModelFormats(tokenizer, "pythonic", "none").of("a") == Formats("pythonic")
    assert tokenizer.asked == []


def test_an_unknown_name_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser"):
        ModelFormats(FakeTokenizer(), "x")
