"""CPU work off the event loop, in threads: the `tokenizers` library lets them run side by side.

A call's life: refused (`Overloaded`, the queue is full), or queued → running → answered. A caller that goes away, or
whose time limit passes, is answered at once; its place in the queue is free again when the thread has ended. Long texts
have threads of their own, so that short ones never wait for them. Prompts that come with a hash spec, which names the
tenant's salt, go through the model's segment cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from common.block_hash import HashScheme
from common.errors import DeadlineExceeded, InvalidRequest, Overloaded
from common.metrics import counter, gauge, histogram, preset
from common.text.model_tokenizer import num_utf8_bytes
from common.tokenized import ChatPrompt, HashSpec, Tokenized, TokenText
from tokenizer_svc.segment_cache import EncodedText
from tokenizer_svc.served_models import ServedModel

Result = TypeVar("Result")

CALL_TIMEOUT_S: Final = 30.0
LONG_TEXT_CHARS: Final = 1 << 16
LONG_TEXT_TOKENS: Final = 1 << 14

ENCODED = counter("shoal_tokenizer_encoded_tokens_total", "tokens made from text", ["model"])
DECODED = counter("shoal_tokenizer_decoded_tokens_total", "tokens turned into text", ["model"])
QUEUED = gauge("shoal_tokenizer_queued", "calls that wait for or run in the pool")
REFUSED = preset(counter(
    "shoal_tokenizer_refused_total", "calls refused because a bound was reached", ["bound"]), ("queue", "streams"))
LATENCY = histogram(
    "shoal_tokenizer_call_seconds", "time of a call, queue included",
    (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10), ["call"])


class Encoder:
    """Encodes, renders, decodes and hashes. `key` is the deployment's hash key.

    Every call raises `Overloaded` when the queue is full and `DeadlineExceeded` after `call_timeout_s`.
    """

    def __init__(
        self, key: bytes, *, threads: int, max_queued: int, max_text_bytes: int, render_timeout_s: float,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._key, self._max_queued = key, max_queued
        self._max_text_bytes, self._render_timeout_s = max_text_bytes, render_timeout_s
        self._call_timeout_s = call_timeout_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._long_pool = ThreadPoolExecutor(max(1, threads // 2), thread_name_prefix="encode-long")
        self._num_queued = 0

    @property
    def num_queued(self) -> int:
        """Calls that wait or run."""
        return self._num_queued

    async def encode_text(
        self, model: ServedModel, text: str, *, add_special_tokens: bool, hash_spec: HashSpec | None = None,
        token_strings: bool = False,
    ) -> Tokenized:
        def work() -> Tokenized:
            return self._encode(model, text, add_special_tokens, hash_spec, token_strings)

        return await self._call("text", work, is_long=len(text) > LONG_TEXT_CHARS)

    async def encode_chat(
        self, model: ServedModel, prompt: ChatPrompt, *, hash_spec: HashSpec | None = None, token_strings: bool = False
    ) -> Tokenized:
        """The template writes the special tokens itself. A render beyond its time limit is an `InvalidRequest`."""
        text = await self._call("render", lambda: model.template.render(prompt), timeout_s=self._render_timeout_s)
        return await self.encode_text(
            model, text, add_special_tokens=False, hash_spec=hash_spec, token_strings=token_strings)

    async def check_tokens(
        self, model: ServedModel, token_ids: Sequence[int], *, hash_spec: HashSpec | None = None,
        token_strings: bool = False,
    ) -> Tokenized:
        def work() -> Tokenized:
            model.tokenizer.check(token_ids)
            return self._finish(model, token_ids, hash_spec, token_strings)

        return await self._call("tokens", work, is_long=len(token_ids) > LONG_TEXT_TOKENS)

    async def decode(self, model: ServedModel, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        def work() -> str:
            model.tokenizer.check(token_ids)
            DECODED.labels(model.name).inc(len(token_ids))
            return model.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return await self._call("decode", work, is_long=len(token_ids) > LONG_TEXT_TOKENS)

    async def token_texts(self, model: ServedModel, token_ids: Sequence[int]) -> list[TokenText]:
        def work() -> list[TokenText]:
            tokenizer = model.tokenizer
            tokenizer.check(token_ids)
            return [TokenText(tokenizer.bytes_of(i), i in tokenizer.special_ids) for i in token_ids]

        return await self._call("token_texts", work)

    async def drain(self) -> None:
        while self._num_queued:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _encode(
        self, model: ServedModel, text: str, add_special_tokens: bool, hash_spec: HashSpec | None, token_strings: bool
    ) -> Tokenized:
        if len(text) > self._max_text_bytes or num_utf8_bytes(text) > self._max_text_bytes:
            raise InvalidRequest(f"prompt: text is longer than {self._max_text_bytes} bytes", param="prompt")
        if hash_spec is None or (add_special_tokens and model.tokenizer.adds_special_tokens):
            encoded = EncodedText(tuple(model.tokenizer.encode(text, add_special_tokens=add_special_tokens)))
        else:
            encoded = model.segments.encode(text, hash_spec.cache_salt)
        ENCODED.labels(model.name).inc(len(encoded.token_ids))
        return self._finish(model, encoded.token_ids, hash_spec, token_strings, encoded.turn)

    def _finish(
        self, model: ServedModel, token_ids: Sequence[int], hash_spec: HashSpec | None, token_strings: bool,
        turn: bytes = b"",
    ) -> Tokenized:
        hashes = block_hashes(self._key, hash_spec, token_ids) if hash_spec is not None else ()
        strings = tuple(model.tokenizer.token_string(i) for i in token_ids) if token_strings else ()
        return Tokenized(tuple(token_ids), hashes, strings, turn)

    async def _call(
        self, call: str, work: Callable[[], Result], *, timeout_s: float | None = None, is_long: bool = False
    ) -> Result:
        """`timeout_s` begins when a thread takes the call up."""
        if self._num_queued >= self._max_queued:
            REFUSED.labels("queue").inc()
            raise Overloaded(f"tokenizer: {self._max_queued} calls are queued already", retry_after_s=1.0)
        queued_at = time.monotonic()
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def begin_work() -> Result:
            _tell(loop, begun.set)
            return work()

        self._count(1)
        running = (self._long_pool if is_long else self._pool).submit(begin_work)
        running.add_done_callback(lambda _: _tell(loop, self._count, -1))
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await _answer(running, begun, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"tokenizer: the call did not end within {self._call_timeout_s:g} s") from None
        finally:
            LATENCY.labels(call).observe(time.monotonic() - queued_at)

    def _count(self, change: int) -> None:
        self._num_queued += change
        QUEUED.set(self._num_queued)


def block_hashes(key: bytes, spec: HashSpec, token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """One hash per full block. Raises `InvalidRequest` for a block size below 1."""
    if spec.block_size < 1:
        raise InvalidRequest(f"hash_spec.block_size: must be at least 1, got {spec.block_size}", param="hash_spec")
    scheme = HashScheme(key, spec.model, spec.revision, spec.dtype, spec.block_size)
    return tuple(scheme.chain(scheme.root(spec.adapter, spec.cache_salt), token_ids))


async def _answer(running: Future[Result], begun: asyncio.Event, timeout_s: float | None) -> Result:
    answer = asyncio.wrap_future(running)
    answer.add_done_callback(lambda _: begun.set())
    try:
        await begun.wait()
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise InvalidRequest(
            f"messages: rendering the chat template did not end within {timeout_s:g} s", param="messages") from None
    finally:
        answer.cancel()  # a call that is still queued leaves the queue with its caller


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *args: int) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody counts any more
        loop.call_soon_threadsafe(what, *args)

