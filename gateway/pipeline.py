"""One request's life, top to bottom.

wait for a worker of the model → tokenize and hash → check the context → pick a worker → generate → detokenize → finish

The gateway is the authority on the finish: a stop string found in the text ends the request here, usage counts up to
the token that completed it, and closing the worker's stream tells the worker to stop. A worker that cannot take the
request or is lost is replaced by another one, without gap or repeat (gateway/attempts.py). Whoever runs `run` bounds it
in time and may cancel it anywhere: leaving the generator releases all it holds.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

from common import trace
from common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unavailable
from common.generation import DecodePort, FinishReason, Generation, ModelFacts, TokenDelta
from common.placement import RouterPort
from common.sampling_params import SamplingParams
from common.service_record import Fingerprint
from common.span import Span
from common.tokenized import ChatPrompt, HashSpec, TextDelta, TextStream, Tokenized, TokenizerPort
from gateway.attempts import AttemptLimits, Attempts
from gateway.order import Ending, Order, Piece, Usage
from gateway.outcome import OutcomeClock


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """How often and how long a worker is looked for, and the output of a request that names no limit."""

    attempts: AttemptLimits
    default_max_tokens: int


class Pipeline:
    """Holds no state of its own; any number of requests run at once."""

    def __init__(
        self, tokenizer: TokenizerPort, decode: DecodePort, router: RouterPort | None, limits: PipelineLimits
    ) -> None:
        self._tokenizer, self._decode, self._router, self._limits = tokenizer, decode, router, limits

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
        clock = OutcomeClock(order.request_id, order.model.name)
        fingerprint = await self._fingerprint(order.model.name)
        with trace.span("tokenize", trace.CLIENT) as span:
            prompt = await self._tokenize(order, fingerprint)
            params = await self._params(order, len(prompt.token_ids))
            span.put({"gen_ai.usage.input_tokens": len(prompt.token_ids)})
        generation = Generation(
            request_id=order.request_id, model=order.model.name, prompt_token_ids=prompt.token_ids,
            block_hashes=prompt.block_hashes, params=params, cache_salt=order.cache_salt)
        attempts = Attempts(self._decode, self._router, self._limits.attempts, generation, deadline)
        text = self._tokenizer.open_text(
            order.model.name, stop=order.stop, include_stop=order.include_stop,
            skip_special_tokens=order.skip_special_tokens)
        try:
            async with aclosing(self._pieces(order, generation, attempts, text, clock)) as pieces:
                async for piece in pieces:
                    yield replace(piece, fingerprint=system_fingerprint(fingerprint))
        except BaseException as error:
            clock.failed(error)
            raise
        finally:
            text.close()
            await clock.tell(self._router, attempts)

    async def _pieces(
        self, order: Order, generation: Generation, attempts: Attempts, text: TextStream, clock: OutcomeClock
    ) -> AsyncGenerator[Piece | Ending, None]:
        begun, num_tokens, unsent = False, 0, list[int]()
        detokenizing: Span | None = None  # the first tokens until the first text
        async with AsyncExitStack() as ends:
            async for delta in await ends.enter_async_context(aclosing(attempts.deltas())):
                if detokenizing is None:
                    detokenizing = trace.span("detokenize", trace.CLIENT)
                    ends.push(detokenizing)  # it ends here at the latest, failed by what is raised
                num_before, num_tokens = num_tokens, num_tokens + len(delta.token_ids)
                ids = _shown(delta, order)
                shown = await text.push(ids) if ids else TextDelta("", 0)
                last = delta.finish_reason is not None and shown.matched_stop is None
                tail = (await text.finish()) if last else TextDelta("", shown.num_tokens)
                if shown.text or last:
                    detokenizing.finish()
                stop = shown.matched_stop or tail.matched_stop
                counted = (tail if tail.matched_stop else shown).num_tokens if stop is not None else num_tokens
                usage = Usage(len(generation.prompt_token_ids), delta.num_cached_tokens, counted)
                clock.tokens(usage, delta.queue_s)
                unsent += delta.token_ids[: max(0, counted - num_before)]
                if shown.text or tail.text or not begun or (order.return_token_ids and unsent):
                    first_ids = () if begun else generation.prompt_token_ids
                    yield Piece(shown.text + tail.text, usage, tuple(unsent), first_ids)
                    begun, unsent = True, []
                if stop is not None or last:
                    ending = _ending(delta, order, stop, usage)
                    clock.finished(ending.finish_reason)
                    yield ending
                    return

    async def _fingerprint(self, model: str) -> Fingerprint:
        wait_s = self._limits.attempts.worker_wait_s
        workers = self._decode.workers(model)
        if not workers:
            with trace.span("wait_for_worker"):
                workers = await self._decode.wait_for_workers(model, wait_s)
        if not workers:
            raise Unavailable(f"no worker of this model within {wait_s:g} s", retry_after_s=2.0)
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


@functools.lru_cache(maxsize=256)
def system_fingerprint(fingerprint: Fingerprint) -> str:
    """Equal for workers whose tokens are the same for the same seed."""
    return "shoal-" + hashlib.blake2b(repr(fingerprint).encode(), digest_size=6).hexdigest()


def _shown(delta: TokenDelta, order: Order) -> tuple[int, ...]:
    """The tokens whose text the client sees: all but the one that stopped the request."""
    hidden = delta.stop_token_id is not None and not order.include_stop
    return delta.token_ids[:-1] if hidden else delta.token_ids


def _ending(delta: TokenDelta, order: Order, stop: str | None, usage: Usage) -> Ending:
    if stop is not None:
        return Ending(FinishReason.STOP, stop, usage)
    assert delta.finish_reason is not None
    stop_id = delta.stop_token_id if delta.stop_token_id in order.stop_token_ids else None
    return Ending(delta.finish_reason, stop_id, usage)
