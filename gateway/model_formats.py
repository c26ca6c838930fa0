"""How each model writes its output, learned from its chat template.

A model: unknown ──described by the tokenizer service──▶ known ──older than `LOOK_AGAIN_S`──▶ described again
            ╰──no answer in time──▶ unknown: the request is refused, and the next one asks again

What is known stands while it is looked at again, and if that fails. Requests for one model share one question.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from common import logs
from common.errors import ShoalError, Unavailable
from common.tokenized import TokenizerPort
from gateway.output_parsers import AUTO, Formats, formats_of

log = logs.get(__name__)

DESCRIBE_TIMEOUT_S: Final = 15.0
LOOK_AGAIN_S: Final = 60.0
MAX_MODELS: Final = 1024


@dataclass(slots=True)
class _Known:
    formats: Formats
    looked_at_s: float


class ModelFormats:
    """Names given in configuration hold for all models. Raises `ConfigError` for one that there is not."""

    def __init__(
        self, tokenizer: TokenizerPort, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO, *,
        timeout_s: float = DESCRIBE_TIMEOUT_S, now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer, self._timeout_s, self._now = tokenizer, timeout_s, now
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        given = formats_of("", tool_call_parser, reasoning_parser)
        self._given = None if AUTO in (tool_call_parser, reasoning_parser) else given
        self._known: dict[str, _Known] = {}
        self._learning: dict[str, asyncio.Task[Formats]] = {}

    def known(self, model: str) -> Formats | None:
        """Without waiting; None: `of` must be asked."""
        if self._given is not None:
            return self._given
        known = self._known.get(model)
        if known is None:
            return None
        if self._now() - known.looked_at_s >= LOOK_AGAIN_S:
            known.looked_at_s = self._now()
            self._learn(model)
        return known.formats

    async def of(self, model: str) -> Formats:
        """Waits for the tokenizer service if the model is not known yet. Raises `Unavailable` beyond the time limit.

        A guess would answer with calls and reasoning as content.
        """
        known = self.known(model)
        return known if known is not None else await asyncio.shield(self._learn(model))

    def _learn(self, model: str) -> asyncio.Task[Formats]:
        task = self._learning.get(model)
        if task is None:
            task = self._learning[model] = asyncio.create_task(self._described(model))
            task.add_done_callback(lambda done: self._learned(model, done))
        return task

    def _learned(self, model: str, done: asyncio.Task[Formats]) -> None:
        del self._learning[model]
        if not done.cancelled():
            done.exception()  # seen, even if all that waited have left

    async def _described(self, model: str) -> Formats:
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await self._tokenizer.describe(model)
        except (ShoalError, TimeoutError) as error:
            log.warning("model_not_described", model=model, error=str(error) or type(error).__name__)
            raise Unavailable(
                "the tokenizer service cannot tell the chat template of this model now", retry_after_s=1.0) from error
        formats = formats_of(
            text.chat_template + text.tool_chat_template, self._tool_call_parser, self._reasoning_parser)
        before = self._known.get(model)
        if before is None and len(self._known) >= MAX_MODELS:
            del self._known[next(iter(self._known))]
        self._known[model] = _Known(formats, self._now())
        if before is None or before.formats != formats:
            log.info("model_formats", model=model, tools=formats.tool_parser, reasoning=formats.reasoning_parser)
        return formats
