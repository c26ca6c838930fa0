"""How each model writes its output, learned from its chat template when it is first asked for, and kept.

A model: unknown ──described by the tokenizer service──▶ known
            ╰──no answer in time──▶ unknown: as if it had no template, and the next request asks again
"""

from __future__ import annotations

import asyncio
from typing import Final

from common import logs
from common.errors import ShoalError
from common.tokenized import TokenizerPort
from gateway.output_parsers import AUTO, Formats, formats_of

log = logs.get(__name__)

DESCRIBE_TIMEOUT_S: Final = 2.0
MAX_MODELS: Final = 1024


class ModelFormats:
    """Names given in configuration hold for all models. Raises `ConfigError` for one that there is not."""

    def __init__(
        self, tokenizer: TokenizerPort, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO, *,
        timeout_s: float = DESCRIBE_TIMEOUT_S,
    ) -> None:
        self._tokenizer, self._timeout_s = tokenizer, timeout_s
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        self._unknown = formats_of("", tool_call_parser, reasoning_parser)
        self._known: dict[str, Formats] = {}

    async def of(self, model: str) -> Formats:
        """Waits for the tokenizer service only if the model is not known yet, and not beyond the time limit."""
        if AUTO not in (self._tool_call_parser, self._reasoning_parser):
            return self._unknown
        known = self._known.get(model)
        if known is None:
            known = await self._learn(model)
        return known

    async def _learn(self, model: str) -> Formats:
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await self._tokenizer.describe(model)
        except (ShoalError, TimeoutError) as error:
            log.warning("model_not_described", model=model, error=str(error) or type(error).__name__)
            return self._unknown
        formats = formats_of(
            text.chat_template + text.tool_chat_template, self._tool_call_parser, self._reasoning_parser)
        if len(self._known) >= MAX_MODELS:
            del self._known[next(iter(self._known))]
        self._known[model] = formats
        log.info("model_formats", model=model, tools=formats.tool_parser, reasoning=formats.reasoning_parser)
        return formats
