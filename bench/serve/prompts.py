"""Turns a request, and the conversation before it, into the bytes of a call.

Completions take token ids as they are. Chat takes text: token ids become the text that the server itself makes of
them (`/detokenize`), once and before the run, so that the chat template and the tokenizer are part of what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.progress import track

from bench.serve.connection import Endpoint
from bench.serve.options import CHAT, PATHS, ServeOptions
from bench.serve.record import RequestRecord
from bench.serve.workloads import BenchRequest
from common.errors import ConfigError, Unavailable
from stack.api_client import ApiClient, error_message

Turn = tuple[BenchRequest, RequestRecord]


class Prompts:
    """`texts` are those of `requests`, by index; only chat has them."""

    def __init__(self, options: ServeOptions, endpoint: Endpoint, requests: Sequence[BenchRequest]) -> None:
        self._options, self._endpoint, self._requests = options, endpoint, requests
        self._is_chat = options.endpoint_type == CHAT
        self._texts = _texts(options, requests) if self._is_chat else []
        self._wants_ids = not self._is_chat and any(request.follows is not None for request in requests)
        self._fixed: dict[str, Any] = {
            "model": options.model, "stream": True, "stream_options": {"include_usage": True}, **options.extra_body}
        if options.temperature is not None:
            self._fixed.setdefault("temperature", options.temperature)
        if options.ignore_eos:
            self._fixed.setdefault("ignore_eos", True)
        if self._wants_ids:
            self._fixed["return_token_ids"] = True

    def encoded(self, index: int, before: Sequence[Turn], indices: Sequence[int]) -> bytes:
        """The call for request `index`; `before` are the turns that it follows, `indices` theirs.

        Raises `Unavailable` when the server did not say which tokens it had answered with.
        """
        request = self._requests[index]
        body = {**self._fixed, "max_tokens": request.output_len}
        if self._is_chat:
            body["messages"] = self._messages(index, before, indices)
        else:
            body["prompt"] = _joined(request.prompt, before) if before else request.prompt
        return self._endpoint.encoded(PATHS[self._options.endpoint_type], orjson.dumps(body))

    def _messages(self, index: int, before: Sequence[Turn], indices: Sequence[int]) -> list[dict[str, str]]:
        messages = []
        for earlier, (_, record) in zip(indices, before, strict=True):
            messages += [{"role": "user", "content": self._texts[earlier]},
                         {"role": "assistant", "content": record.text}]
        return [*messages, {"role": "user", "content": self._texts[index]}]


def _joined(prompt: Sequence[int] | str, before: Sequence[Turn]) -> list[int]:
    ids: list[int] = []
    for request, record in before:
        if not record.token_ids:
            raise Unavailable("the server sends no token ids of its answers (return_token_ids), which conversations "
                              "over /v1/completions need: use --endpoint-type openai-chat")
        ids += [*_ids(request.prompt), *record.token_ids]
    return ids + _ids(prompt)


def _ids(prompt: Sequence[int] | str) -> list[int]:
    assert not isinstance(prompt, str), "conversations are made of token ids"
    return list(prompt)


def _texts(options: ServeOptions, requests: Sequence[BenchRequest]) -> list[str]:
    texts = []
    with ApiClient(options.url, options.api_key) as api:
        bar = Console(stderr=True)
        for request in track(requests, "texts", console=bar, transient=True, disable=not bar.is_terminal):
            texts.append(request.prompt if isinstance(request.prompt, str) else _text(api, options.model, request))
    return texts


def _text(api: ApiClient, model: str, request: BenchRequest) -> str:
    status, answer = api.call("POST", "/detokenize", {"model": model, "tokens": list(request.prompt)})
    text = answer.get("prompt", answer.get("text"))
    if status != 200 or not isinstance(text, str):
        raise ConfigError(
            "--endpoint-type openai-chat: chat needs text, and the server's /detokenize does not make it of the "
            f"workload's token ids ({status}: {error_message(answer)}); take --dataset-name custom",
            param="endpoint_type")
    return text
