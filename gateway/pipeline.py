"""One request's life, top to bottom.

wait for a worker of the model → tokenize and hash → check the context → pick a worker → generate → detokenize → finish

The gateway is the authority on the finish: a stop string found in the text ends its choice here, usage counts up to
the token that completed it, and closing the worker's stream tells the worker to stop. A worker that cannot take the
request or is lost is replaced by another one, without gap or repeat (gateway/attempts.py). Whoever runs `run` bounds it
in time and may cancel it anywhere: leaving the generator releases all it holds.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from common import trace
from common.cancellation import cut_short, is_cancelled
from common.errors import InvalidRequest, ModelNotFound, Unavailable
from common.generation import DecodePort, Generation, ModelFacts
from common.placement import RouterPort
from common.service_record import Fingerprint
from common.tokenized import HashSpec, TokenizerPort
from gateway.attempts import AttemptLimits, Attempts
from gateway.choice_streams import events_of
from gateway.choice_text import ChoiceText, OrderFacts
from gateway.order import Ending, Order, Piece, Usage
from gateway.outcome import OutcomeClock
from gateway.output_parsers import reads_special_tokens
from gateway.preparation import Preparation


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
        self._preparation = Preparation(tokenizer, limits.default_max_tokens)

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

    async def run(
        self, order: Order, deadline: float, on_placed: Callable[[Usage], None] | None = None
    ) -> AsyncGenerator[Piece | Ending, None]:
        """Pieces of text and one `Ending` for each choice, interleaved. `deadline` is in the loop's time.

        `on_placed` is told the prompt's tokens once, when the first worker is about to be given them.
        Raises any `ShoalError`; before the first `Piece` the client has been told nothing yet.
        """
        clock = OutcomeClock(order.request_id, order.model.name, order.n)
        fingerprint = await self._fingerprint(order.model.name)
        with trace.span("tokenize", trace.CLIENT) as span:
            made = await self._preparation.prepare(order, HashSpec(
                model=fingerprint.model, revision=fingerprint.revision, dtype=fingerprint.dtype,
                block_size=fingerprint.block_size, cache_salt=order.cache_salt))
            prompt = made.prompt
            span.put({"gen_ai.usage.input_tokens": len(prompt.token_ids)})
        attempts = Attempts(self._decode, self._router, self._limits.attempts, Generation(
            request_id=order.request_id, model=order.model.name, prompt_token_ids=prompt.token_ids,
            block_hashes=prompt.block_hashes, params=made.params, cache_salt=order.cache_salt, priority=order.priority,
        ), deadline, affinity_key=order.affinity_key, on_placed=functools.partial(
            on_placed, Usage(len(prompt.token_ids), 0, 0)) if on_placed else None)
        facts = OrderFacts(order, clock, prompt.token_ids, system_fingerprint(fingerprint), made.echoed,
                           made.params.prompt_logprobs is not None)
        texts = [self._tokenizer.open_text(
            order.model.name, stop=order.stop, include_stop=order.include_stop, turn=prompt.turn,
            skip_special_tokens=order.skip_special_tokens and not reads_special_tokens(order)) for _ in range(order.n)]
        choices = [ChoiceText(facts, text, choice) for choice, text in enumerate(texts)]
        try:
            async with aclosing(events_of(choices, facts, attempts)) as events:
                async for event in events:
                    yield event
        except asyncio.CancelledError as error:
            if is_cancelled():
                clock.failed(error)
                raise
            cut = cut_short(error)
            clock.failed(cut)
            raise cut from error
        except BaseException as error:
            clock.failed(error)
            if isinstance(error, InvalidRequest):
                raise order.as_sent(error) from None
            raise
        finally:
            for text in texts:
                text.close()
            await clock.tell(self._router, attempts)

    async def _fingerprint(self, model: str) -> Fingerprint:
        wait_s = self._limits.attempts.worker_wait_s
        workers = self._decode.workers(model)
        if not workers:
            with trace.span("wait_for_worker"):
                workers = await self._decode.wait_for_workers(model, wait_s)
        if not workers:
            raise Unavailable(f"no worker of this model within {wait_s:g} s", retry_after_s=2.0)
        return workers[0].fingerprint  # all workers of one model agree: the registry sees to it


@functools.lru_cache(maxsize=256)
def system_fingerprint(fingerprint: Fingerprint) -> str:
    """Equal for workers whose tokens are the same for the same seed."""
    return "shoal-" + hashlib.blake2b(repr(fingerprint).encode(), digest_size=6).hexdigest()
