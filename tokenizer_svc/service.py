"""The tokenizer service: proto ↔ dataclasses, and the one place where its parts are joined."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc.aio

from common import rpc
from common.errors import InvalidRequest, ShoalError
from common.service_host import Deps, ServiceHost
from common.tokenized import ChatPrompt, HashSpec, TextDelta, Tokenized
from proto import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.detokenizer import Answer, Detokenizer, Item, Opening
from tokenizer_svc.encoder import Encoder
from tokenizer_svc.served_models import ServedModels

MAX_STEP_TOKENS: Final = 2048  # between two turns of the event loop; more come when many streams open again

Context = grpc.aio.ServicerContext[Any, Any]


def build(config: TokenizerConfig, deps: Deps) -> TokenizerService:
    return TokenizerService(config, deps)


class TokenizerService:
    """One replica: the texts of all models in its configuration."""

    def __init__(self, config: TokenizerConfig, deps: Deps) -> None:
        self._config, self._deps = config, deps
        self._host = ServiceHost(config, deps.registry)
        self._encoder: Encoder | None = None
        self._detokenizer: Detokenizer | None = None

    async def start(self) -> None:
        config = self._config
        models = await asyncio.to_thread(
            ServedModels.load, config.models, max_text_bytes=config.max_text_bytes,
            render_timeout_s=config.render_timeout_s, segment_cache_bytes=config.segment_cache_bytes)
        self._encoder = Encoder(
            await self._deps.registry.deployment_key(), threads=config.encode_threads, max_queued=config.max_queued,
            max_text_bytes=config.max_text_bytes, render_timeout_s=config.render_timeout_s,
            call_timeout_s=config.call_timeout_s)
        self._detokenizer = Detokenizer(models, config.max_text_streams)
        servicer = TokenizerServicer(models, self._encoder, self._detokenizer)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(servicer, self._host.server)
        await self._host.listen()
        await self._host.register(models=models.names)

    async def drain(self) -> None:
        await self._host.begin_drain()
        if self._encoder is not None and self._detokenizer is not None:
            while self._detokenizer.num_streams:
                await asyncio.sleep(0.02)
            await self._encoder.drain()

    async def stop(self) -> None:
        await self._host.close()
        if self._encoder is not None:
            self._encoder.close()


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServicer):
    """Translation only; every `ShoalError` becomes a status in the server's interceptor."""

    def __init__(self, models: ServedModels, encoder: Encoder, detokenizer: Detokenizer) -> None:
        self._models, self._encoder, self._detokenizer = models, encoder, detokenizer

    async def Tokenize(  # noqa: N802
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        made = await self._tokenize(request)
        return tokenizer_pb2.TokenizeResponse(
            token_ids=made.token_ids, block_hashes=b"".join(made.block_hashes), token_strings=made.token_strings,
            turn=made.turn)

    async def Decode(  # noqa: N802
        self, request: tokenizer_pb2.DecodeTextRequest, context: Context
    ) -> tokenizer_pb2.DecodeTextResponse:
        text = await self._encoder.decode(
            self._models.get(request.model), request.token_ids, skip_special_tokens=request.skip_special_tokens)
        return tokenizer_pb2.DecodeTextResponse(text=text)

    async def TokenTexts(  # noqa: N802
        self, request: tokenizer_pb2.TokenTextsRequest, context: Context
    ) -> tokenizer_pb2.TokenTextsResponse:
        texts = await self._encoder.token_texts(self._models.get(request.model), request.token_ids)
        return tokenizer_pb2.TokenTextsResponse(
            texts=[text.raw for text in texts], is_special=[text.is_special for text in texts])

    async def Detokenize(  # noqa: N802
        self, request_iterator: AsyncIterator[tokenizer_pb2.DetokenizeBatch], context: Context
    ) -> AsyncIterator[tokenizer_pb2.TextBatch]:
        await context.send_initial_metadata(())  # tells the caller that the stream is up
        session = self._detokenizer.open_session()
        try:
            async for batch in request_iterator:
                for items in _steps([_item_from(item) for item in batch.items]):
                    answers = session.step(items)
                    if answers:
                        yield tokenizer_pb2.TextBatch(items=[_answer_to_proto(answer) for answer in answers])
                    await asyncio.sleep(0)
        finally:
            session.close()

    async def DescribeModel(  # noqa: N802
        self, request: tokenizer_pb2.DescribeModelRequest, context: Context
    ) -> tokenizer_pb2.DescribeModelResponse:
        model = self._models.get(request.model)
        return tokenizer_pb2.DescribeModelResponse(
            model=model.name, vocab_size=model.tokenizer.vocab_size, eos_token_ids=model.tokenizer.eos_token_ids,
            bos_token_id=model.tokenizer.bos_token_id, chat_template=model.template.source,
            tool_chat_template=model.template.tool_source)

    async def _tokenize(self, request: tokenizer_pb2.TokenizeRequest) -> Tokenized:
        model = self._models.get(request.model)
        spec = _hash_spec_from(request.hash_spec) if request.HasField("hash_spec") else None
        strings = request.return_token_strings
        match request.WhichOneof("input"):
            case "text":
                return await self._encoder.encode_text(
                    model, request.text, add_special_tokens=request.add_special_tokens, hash_spec=spec,
                    token_strings=strings)
            case "chat":
                return await self._encoder.encode_chat(
                    model, _prompt_from(request.chat), hash_spec=spec, token_strings=strings)
            case "tokens":
                return await self._encoder.check_tokens(
                    model, request.tokens.ids, hash_spec=spec, token_strings=strings)
        raise InvalidRequest("input: one of text, chat or tokens must be set", param="input")


def _hash_spec_from(spec: common_pb2.HashSpec) -> HashSpec:
    return HashSpec(spec.model, spec.revision, spec.dtype, spec.block_size, spec.adapter, spec.cache_salt)


def _prompt_from(chat: tokenizer_pb2.ChatInput) -> ChatPrompt:
    return ChatPrompt(
        messages=_parsed("messages", chat.messages_json, list), tools=_parsed("tools", chat.tools_json or b"[]", list),
        add_generation_prompt=chat.add_generation_prompt, continue_final_message=chat.continue_final_message,
        template_kwargs=_parsed("chat_template_kwargs", chat.template_kwargs_json or b"{}", dict))


def _parsed(field: str, raw: bytes, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field}: not valid JSON", param=field) from None
    if not isinstance(value, kind) or (isinstance(value, list) and not all(isinstance(e, dict) for e in value)):
        raise InvalidRequest(
            f"{field}: must be {'a JSON array of objects' if kind is list else 'a JSON object'}", param=field)
    return value


def _steps(items: list[Item]) -> Iterator[list[Item]]:
    """The items in order, in runs of at most `MAX_STEP_TOKENS` tokens; an item is never split."""
    step: list[Item] = []
    num_tokens = 0
    for item in items:
        if step and num_tokens + len(item.token_ids) > MAX_STEP_TOKENS:
            yield step
            step, num_tokens = [], 0
        step.append(item)
        num_tokens += len(item.token_ids)
    yield step


def _item_from(item: tokenizer_pb2.DetokenizeItem) -> Item:
    opening = None
    if item.HasField("open"):
        opening = Opening(item.open.model, tuple(item.open.stop), item.open.include_stop_in_output,
                          item.open.skip_special_tokens, item.open.turn)
    return Item(item.stream_id, item.token_ids, opening, item.flush, item.close)


def _answer_to_proto(answer: Answer) -> tokenizer_pb2.TextItem:
    stream_id, what = answer
    if isinstance(what, ShoalError):
        return tokenizer_pb2.TextItem(stream_id=stream_id, finished=True, error=rpc.error_to_proto(what))
    assert isinstance(what, TextDelta)
    return tokenizer_pb2.TextItem(
        stream_id=stream_id, text=what.text, num_tokens=what.num_tokens, matched_stop=what.matched_stop,
        finished=what.finished)
