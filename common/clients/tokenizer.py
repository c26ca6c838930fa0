"""The tokenizer service as its callers see it; `common.tokenized.TokenizerPort` over gRPC.

A unary call's life: pick a live replica of the model → call → answered; when the replica is unreachable or does not
answer in time, mark it and pick again, until the deadline (`Unavailable`). All calls are pure, so a repeat is safe.
Texts of running generations: common/clients/text_stream.py.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson

from common import rpc
from common.block_hash import HASH_BYTES
from common.cancellation import uncancelled
from common.clients.channels import ChannelPool
from common.clients.text_stream import ReplicaTextStream
from common.clients.tokenizer_replicas import Replica, TokenizerReplicas
from common.directory import Directory
from common.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from common.tokenized import ChatPrompt, HashSpec, ModelText, TextStream, Tokenized, TokenText
from proto import common_pb2, tokenizer_pb2

Answer = TypeVar("Answer")

CALL_TIMEOUT_S: Final = 15.0
ATTEMPT_TIMEOUT_S: Final = 5.0
TEXT_TIMEOUT_S: Final = 20.0


class TokenizerClient:
    """Ready when made; `stop` once. The directory must be started and stopped by its owner."""

    def __init__(
        self, directory: Directory, channels: ChannelPool | None = None, *, call_timeout_s: float = CALL_TIMEOUT_S,
        attempt_timeout_s: float = ATTEMPT_TIMEOUT_S, text_timeout_s: float = TEXT_TIMEOUT_S,
    ) -> None:
        self._replicas = TokenizerReplicas(directory, channels)
        self._call_timeout_s, self._attempt_timeout_s = call_timeout_s, attempt_timeout_s
        self._text_timeout_s = text_timeout_s

    async def stop(self) -> None:
        """Close all channels; calls and texts that still wait get `Unavailable`."""
        await self._replicas.stop()

    async def tokenize_text(
        self, model: str, text: str, *, add_special_tokens: bool = True, hash_spec: HashSpec | None = None,
        token_strings: bool = False,
    ) -> Tokenized:
        request = _request(model, hash_spec, token_strings)
        request.add_special_tokens = add_special_tokens
        try:
            request.text = text
        except ValueError:  # protobuf takes valid Unicode only
            raise InvalidRequest("prompt: text holds a lone surrogate, which is not valid Unicode",
                                 param="prompt") from None
        return await self._tokenize(request)

    async def tokenize_chat(
        self, model: str, prompt: ChatPrompt, *, hash_spec: HashSpec | None = None, token_strings: bool = False
    ) -> Tokenized:
        request = _request(model, hash_spec, token_strings)
        request.chat.CopyFrom(tokenizer_pb2.ChatInput(
            messages_json=_json("messages", list(prompt.messages)),
            tools_json=_json("tools", list(prompt.tools)) if prompt.tools else b"",
            add_generation_prompt=prompt.add_generation_prompt, continue_final_message=prompt.continue_final_message,
            template_kwargs_json=_json("chat_template_kwargs", prompt.template_kwargs)
            if prompt.template_kwargs else b""))
        return await self._tokenize(request)

    async def check_tokens(
        self, model: str, token_ids: Sequence[int], *, hash_spec: HashSpec | None = None, token_strings: bool = False
    ) -> Tokenized:
        request = _request(model, hash_spec, token_strings)
        request.tokens.ids.extend(_u32(token_ids))
        request.tokens.SetInParent()
        return await self._tokenize(request)

    async def decode(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        request = tokenizer_pb2.DecodeTextRequest(
            model=model, token_ids=_u32(token_ids), skip_special_tokens=skip_special_tokens)
        answer = await self._call(model, lambda replica, timeout: replica.stub.Decode(request, timeout=timeout))
        return str(answer.text)

    async def token_texts(self, model: str, token_ids: Sequence[int]) -> list[TokenText]:
        request = tokenizer_pb2.TokenTextsRequest(model=model, token_ids=_u32(token_ids))
        answer = await self._call(model, lambda replica, timeout: replica.stub.TokenTexts(request, timeout=timeout))
        return [TokenText(raw, special) for raw, special in zip(answer.texts, answer.is_special, strict=True)]

    async def describe(self, model: str) -> ModelText:
        request = tokenizer_pb2.DescribeModelRequest(model=model)
        answer = await self._call(model, lambda replica, timeout: replica.stub.DescribeModel(request, timeout=timeout))
        return ModelText(answer.model, answer.vocab_size, tuple(answer.eos_token_ids),
                         answer.bos_token_id if answer.HasField("bos_token_id") else None, answer.chat_template,
                         answer.tool_chat_template)

    def open_text(
        self, model: str, *, stop: Sequence[str] = (), include_stop: bool = False, skip_special_tokens: bool = True,
        turn: bytes = b"",
    ) -> TextStream:
        """Nothing is sent before the first push."""
        try:
            opening = tokenizer_pb2.DetokenizeOpen(
                model=model, stop=stop, include_stop_in_output=include_stop, skip_special_tokens=skip_special_tokens,
                turn=turn)
        except ValueError:
            raise InvalidRequest("stop: holds a lone surrogate, which is not valid Unicode", param="stop") from None
        return ReplicaTextStream(self._replicas, opening, self._text_timeout_s, self._attempt_timeout_s)

    async def _tokenize(self, request: tokenizer_pb2.TokenizeRequest) -> Tokenized:
        answer = await self._call(
            request.model, lambda replica, timeout: replica.stub.Tokenize(request, timeout=timeout))
        hashes = answer.block_hashes
        return Tokenized(
            tuple(answer.token_ids),
            tuple(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)), tuple(answer.token_strings),
            answer.turn)

    async def _call(self, model: str, call: Callable[[Replica, float], Awaitable[Any]]) -> Any:
        """One answer from some replica. Errors that a repeat cannot help are raised at once."""
        deadline = time.monotonic() + self._call_timeout_s
        full: set[str] = set()  # replicas that had no room
        while True:
            replica = await self._replicas.pick(model, deadline, full)
            timeout_s = min(self._attempt_timeout_s, max(deadline - time.monotonic(), 0.001))
            try:
                return await uncancelled(call(replica, timeout_s), "tokenizer")
            except Overloaded:
                full.add(replica.address)
                if not self._replicas.has_other(model, full):
                    raise
            except (Unavailable, DeadlineExceeded) as error:
                self._replicas.mark_failed(replica)
                if time.monotonic() >= deadline:
                    raise Unavailable(f"no tokenizer of model {model!r} answered within {self._call_timeout_s:g} s: "
                                      f"{error.message}", retry_after_s=1.0) from error


def _request(model: str, spec: HashSpec | None, token_strings: bool) -> tokenizer_pb2.TokenizeRequest:
    hash_spec = None if spec is None else common_pb2.HashSpec(
        model=spec.model, revision=spec.revision, dtype=spec.dtype, block_size=spec.block_size, adapter=spec.adapter,
        cache_salt=spec.cache_salt)
    return tokenizer_pb2.TokenizeRequest(model=model, hash_spec=hash_spec, return_token_strings=token_strings)


def _json(field: str, value: Sequence[Any] | Mapping[str, Any]) -> bytes:
    try:
        raw = orjson.dumps(value)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{field}: holds text that is not valid Unicode, or is nested too deep",
                             param=field) from None
    if len(raw) > rpc.MAX_MESSAGE_BYTES // 2:
        raise InvalidRequest(
            f"{field}: must be at most {rpc.MAX_MESSAGE_BYTES // 2} bytes, got {len(raw)}", param=field)
    return raw


def _u32(token_ids: Sequence[int]) -> Sequence[int]:
    for token_id in token_ids:
        if not 0 <= token_id < 2**32:
            raise InvalidRequest(f"tokens: token id {token_id} is outside the vocabulary", param="tokens")
    return token_ids
