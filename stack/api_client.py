"""A small client of the OpenAI API for the commands: JSON calls and server-sent events."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from common.config import ServiceConfig
from common.errors import ConfigError, NotFound, Unavailable
from stack.state_file import StackState, default_state_dir, find_stack

Json = dict[str, Any]

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 120.0


def running_stack(state_dir: Path | None) -> StackState | None:
    """The stack of this machine, or None."""
    try:
        return find_stack(state_dir or default_state_dir())
    except NotFound:
        return None


def gateway_url(url: str, state_dir: Path | None) -> str:
    """`url`, else that of the stack that runs here. Raises `NotFound` when there is none."""
    return url.rstrip("/").removesuffix("/v1") if url else find_stack(state_dir or default_state_dir()).url


class ApiClient:
    """`url` without `/v1`. Connection failures are `Unavailable`."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx2.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self._http = httpx2.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False,
                                  verify=tls_context(url) or True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Raises `Unavailable` when the gateway refuses, with its message."""
        status, answer = self.call("GET", "/v1/models")
        if status != 200:
            raise Unavailable(f"{self.url} answered {status}: {error_message(answer)}")
        return [model["id"] for model in answer["data"]]

    def call(self, method: str, path: str, body: Json | None = None) -> tuple[int, Json]:
        with self._reachable():
            answer = self._http.request(method, path, json=body)
            try:
                return answer.status_code, answer.json()
            except ValueError:
                return answer.status_code, {"text": answer.text}

    def stream(self, path: str, body: Json) -> Generator[Json | None, None, None]:
        """Each event's JSON, then None for `[DONE]`. Closing the iterator closes the connection, which cancels.

        Raises `Unavailable` for a refusal and for an error event; a stream that just ends is one too.
        """
        with self._reachable(), self._http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                raise Unavailable(f"{answer.status_code}: {error_message(_parsed(answer.read()))}")
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                text = line.removeprefix("data:").strip()
                if text == "[DONE]":
                    yield None
                    return
                event = json.loads(text)
                if "error" in event:
                    raise Unavailable(f"stream ended with an error: {error_message(event)}")
                yield event
        raise Unavailable("stream ended without [DONE]")

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except httpx2.HTTPError as error:
            raise Unavailable(f"{self.url}: {type(error).__name__} {error}".rstrip()) from None


def tls_context(url: str) -> ssl.SSLContext | None:
    """An https gateway is known by SHOAL_TLS_CA where that is set; None: by the usual CAs. Raises `ConfigError`."""
    ca = ServiceConfig.load([]).tls_ca if url.startswith("https:") else ""
    try:
        return ssl.create_default_context(cafile=ca) if ca else None
    except OSError as error:
        raise ConfigError(f"tls_ca={ca!r}: {error.strerror or error}", param="tls_ca") from None


def error_message(answer: Json) -> str:
    error = answer.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(answer)[:200]


def _parsed(body: bytes) -> Json:
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"text": body.decode("utf-8", "replace")}
