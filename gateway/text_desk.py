"""`/tokenize` and `/detokenize`: text and token ids of a model, without generating."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from common.tokenized import ChatPrompt, TokenizerPort
from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.generation_answer import read_timeout_s
from gateway.interruption import deadline, interrupted_on_disconnect
from gateway.observation import observation
from gateway.pipeline import Pipeline
from gateway.request_body import BodyReader, parse
from gateway.tenants.tenant import caller_of
from gateway.text_requests import DetokenizeRequest, TokenizeRequest


@dataclass(frozen=True, slots=True)
class TextDesk:
    """What both endpoints share. The answers have vLLM's fields, and SGLang's `text` beside `prompt`."""

    tokenizer: TokenizerPort
    pipeline: Pipeline
    admission: Admission
    bodies: BodyReader
    config: GatewayConfig

    async def tokenize(self, request: Request) -> dict[str, Any]:
        async with self._call(request) as raw:
            body = parse(TokenizeRequest, raw)
            source = body.source()
            model = self.pipeline.find_model(body.model)
            caller_of(request.scope).check_model(model.name)
            observation(request.scope).model = model.name
            strings = bool(body.return_token_strs)
            if isinstance(source, ChatPrompt):
                tokenized = await self.tokenizer.tokenize_chat(model.name, source, token_strings=strings)
            else:
                tokenized = await self.tokenizer.tokenize_text(
                    model.name, source, add_special_tokens=body.add_special_tokens is not False,
                    token_strings=strings)
            return {"count": len(tokenized.token_ids), "max_model_len": model.max_model_len,
                    "tokens": tokenized.token_ids, "token_strs": tokenized.token_strings if strings else None}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        async with self._call(request) as raw:
            body = parse(DetokenizeRequest, raw)
            model = self.pipeline.find_model(body.model)
            caller_of(request.scope).check_model(model.name)
            observation(request.scope).model = model.name
            text = await self.tokenizer.decode(model.name, body.tokens)
            return {"prompt": text, "text": text}

    @asynccontextmanager
    async def _call(self, request: Request) -> AsyncIterator[bytes]:
        """The body, a slot, and an end in time."""
        raw = await self.bodies.read(request)
        with self.admission.slot() as work:
            allowed_s = min(self.config.request_timeout_s, read_timeout_s(request))
            at = asyncio.get_running_loop().time() + allowed_s
            async with work, interrupted_on_disconnect(work, request.receive), deadline(at, allowed_s):
                yield raw
