"""One request's life, top to bottom.

wait for a worker of the model → tokenize and hash → check the context → pick a worker → generate → detokenize → finish

The gateway is the authority on the finish: a stop string found in the text ends the request here, usage counts up to
the token that completed it, and closing the worker's stream tells the worker to stop. A worker that cannot take the
request, or is lost before its first token, is replaced by another one; after the first token its loss is the caller's
error. Whoever runs `run` bounds it in time and may cancel it anywhere: leaving the generator releases all it holds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import cast

from common import logs, trace
from common.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ShoalError,
    Unavailable,
    WorkerLost,
)
from common.generation import DecodePort, FinishReason, Generation, ModelFacts, TokenDelta
from common.sampling_params import SamplingParams
from common.service_record import Fingerprint
from common.tokenized import ChatPrompt, HashSpec, TextDelta, Tokenized, TokenizerPort
from gateway import metrics, placement
from gateway.order import Ending, Order, Piece, Usage

log = logs.get(__name__)
_REPLACEABLE = (Unavailable, Overloaded, WorkerLost)


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Times in seconds. `max_placements` counts all workers that one request may be sent to."""

    worker_wait_s: float
    max_placements: int
    default_max_tokens: int


class Pipeline:
    """Holds no state of its own; any number of requests run at once."""

    def __init__(self, tokenizer: TokenizerPort, decode: DecodePort, limits: PipelineLimits) -> None:
        self._tokenizer, self._decode, self._limits = tokenizer, decode, limits

    def find_model(self, name: str | None) -> ModelFacts:
        """The model of that name; of None, the only one known. Raises `ModelNotFound` or `InvalidRequest`."""
        known = self._decode.models()
        if name is None:
            if len(known) != 1:
                raise InvalidRequest("model: name one of /v1/models", param="model")
            return known[0]
        for facts in known:
            if facts.name == name:
                return facts
        raise ModelNotFound("the model does not exist; /v1/models lists those that do", param="model")

    async def run(self, order: Order, deadline: float) -> AsyncGenerator[Piece | Ending, None]:
        """Pieces of text, then one `Ending`. `deadline` is in the loop's time.

        Raises any `ShoalError`; before the first `Piece` the client has been told nothing yet.
        """
        fingerprint = await self._fingerprint(order.model.name)
        prompt = await self._tokenize(order, fingerprint)
        generation = Generation(
            request_id=order.request_id, model=order.model.name, prompt_token_ids=prompt.token_ids,
            block_hashes=prompt.block_hashes, params=await self._params(order, len(prompt.token_ids)),
            cache_salt=order.cache_salt, trace_context=trace.carrier())
        text = self._tokenizer.open_text(
            order.model.name, stop=order.stop, include_stop=order.include_stop,
            skip_special_tokens=order.skip_special_tokens)
        system = system_fingerprint(fingerprint)
        begun = False
        num_tokens = 0
        try:
            async with _closing(self._tokens(generation, deadline)) as deltas:
                async for delta in deltas:
                    num_tokens += len(delta.token_ids)
                    ids = _shown(delta, order)
                    shown = await text.push(ids) if ids else TextDelta("", 0)
                    last = delta.finish_reason is not None and shown.matched_stop is None
                    tail = (await text.finish()) if last else TextDelta("", shown.num_tokens)
                    stop = shown.matched_stop or tail.matched_stop
                    counted = (tail if tail.matched_stop else shown).num_tokens if stop is not None else num_tokens
                    usage = Usage(len(prompt.token_ids), delta.num_cached_tokens, counted)
                    if shown.text or tail.text or not begun:
                        begun = True
                        yield Piece(shown.text + tail.text, usage, system)
                    if stop is not None or last:
                        yield _ending(delta, order, stop, usage, system)
                        return
        finally:
            text.close()

    async def _fingerprint(self, model: str) -> Fingerprint:
        workers = await self._decode.wait_for_workers(model, self._limits.worker_wait_s)
        if not workers:
            raise Unavailable(f"no worker of this model within {self._limits.worker_wait_s:g} s", retry_after_s=2.0)
        return workers[0].fingerprint  # all workers of one model agree: the registry sees to it

    async def _tokenize(self, order: Order, fingerprint: Fingerprint) -> Tokenized:
        spec = HashSpec(
            model=fingerprint.model, revision=fingerprint.revision, dtype=fingerprint.dtype,
            block_size=fingerprint.block_size, cache_salt=order.cache_salt)
        model, prompt = order.model.name, order.prompt
        if isinstance(prompt, ChatPrompt):
            tokenized = await self._tokenizer.tokenize_chat(model, prompt, hash_spec=spec)
        elif isinstance(prompt, str):
            tokenized = await self._tokenizer.tokenize_text(
                model, prompt, add_special_tokens=order.add_special_tokens, hash_spec=spec)
        else:
            tokenized = await self._tokenizer.check_tokens(model, prompt, hash_spec=spec)
        if not tokenized.token_ids:
            raise InvalidRequest("prompt: has no tokens", param="prompt")
        return tokenized

    async def _params(self, order: Order, num_prompt_tokens: int) -> SamplingParams:
        """Sampling parameters within the context and the vocabulary."""
        room = order.model.max_model_len - num_prompt_tokens
        asked = order.max_tokens
        params = order.sampling_params(max(1, min(room, self._limits.default_max_tokens)) if asked is None else asked)
        if room < 1 or (asked is not None and asked > room):
            output = f" and {asked} were asked as output ({order.max_tokens_param})" if asked is not None else ""
            raise ContextLengthExceeded(
                f"the context of this model is {order.model.max_model_len} tokens; the prompt has "
                f"{num_prompt_tokens}{output}", param="messages" if isinstance(order.prompt, ChatPrompt) else "prompt")
        if order.logit_bias or order.stop_token_ids:
            params.check_vocabulary((await self._tokenizer.describe(order.model.name)).vocab_size)
        return params

    async def _tokens(self, generation: Generation, deadline: float) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of the first worker that gets to a token, up to and with the one that has a finish reason."""
        tried: dict[str, ShoalError] = {}
        while True:
            worker = placement.pick(self._decode.workers(generation.model), exclude=tried)
            if worker is None or len(tried) >= self._limits.max_placements:
                raise _last(tried)
            begun = False
            timeout_s = max(0.001, deadline - asyncio.get_running_loop().time())
            sent = dataclasses.replace(generation, timeout_s=timeout_s)
            try:
                async with _closing(self._decode.generate(worker.worker_id, sent)) as deltas:
                    async for delta in deltas:
                        _raise_failure(delta)
                        begun = True
                        yield delta
                        if delta.finish_reason is not None:
                            return
                raise WorkerLost(f"worker {worker.worker_id} ended the stream of tokens without a finish")
            except _REPLACEABLE as error:
                if begun:
                    raise
                tried[worker.worker_id] = error
                metrics.REPLACED.inc()
                log.warning("worker_refused", id=generation.request_id, worker_id=worker.worker_id, code=error.code)


@functools.lru_cache(maxsize=256)
def system_fingerprint(fingerprint: Fingerprint) -> str:
    """Equal for workers whose tokens are the same for the same seed."""
    return "shoal-" + hashlib.blake2b(repr(fingerprint).encode(), digest_size=6).hexdigest()


def _shown(delta: TokenDelta, order: Order) -> tuple[int, ...]:
    """The tokens whose text the client sees: all but the one that stopped the request."""
    hidden = delta.stop_token_id is not None and not order.include_stop
    return delta.token_ids[:-1] if hidden else delta.token_ids


def _ending(delta: TokenDelta, order: Order, stop: str | None, usage: Usage, system: str) -> Ending:
    if stop is not None:
        return Ending(FinishReason.STOP, stop, usage, system)
    assert delta.finish_reason is not None
    stop_id = delta.stop_token_id if delta.stop_token_id in order.stop_token_ids else None
    return Ending(delta.finish_reason, stop_id, usage, system)


def _raise_failure(delta: TokenDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise delta.error or InternalError("the worker failed without naming the error")
    if delta.finish_reason is FinishReason.ABORT:
        raise WorkerLost("the worker gave the request up")


def _last(tried: dict[str, ShoalError]) -> ShoalError:
    """The refusal to hand on: the last one, which knows best when to come back."""
    return list(tried.values())[-1] if tried else Unavailable("the last worker of this model has just gone")


def _closing(stream: AsyncIterator[TokenDelta]) -> AbstractAsyncContextManager[AsyncGenerator[TokenDelta, None]]:
    return aclosing(cast("AsyncGenerator[TokenDelta, None]", stream))
