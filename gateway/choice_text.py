"""The text of one choice: its deltas in, pieces and one ending out.

States: quiet → begun (its first piece is out; it has the prompt's facts) → ended. Tokens whose text is held back wait
for the piece that shows it, with their logprobs. At a stop string the tokens behind the one that completed it are
dropped. So joined pieces are the same however an engine cuts its tokens into deltas.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

from common import trace
from common.generation import FinishReason, TokenDelta, TokenLogprobs
from common.span import Span
from common.tokenized import TextDelta, TextStream
from gateway.order import Ending, Order, Piece, Usage
from gateway.outcome import OutcomeClock

_NO_TEXT = TextDelta("", 0)


@dataclass(slots=True)
class OrderFacts:
    """What all choices of an order share."""

    order: Order
    clock: OutcomeClock
    prompt_token_ids: tuple[int, ...]
    fingerprint: str
    echoed: str = ""  # before each choice's own text
    wants_prompt_logprobs: bool = False
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    def see(self, delta: TokenDelta) -> None:
        """Take note of what comes once for all choices."""
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def are_complete(self) -> bool:
        return bool(self.prompt_logprobs) or not self.wants_prompt_logprobs


class ChoiceText:
    """One reader; `events` once. `text` is closed by its owner."""

    def __init__(self, facts: OrderFacts, text: TextStream, choice: int) -> None:
        self._facts, self._order, self._text, self._choice = facts, facts.order, text, choice
        self._num_tokens = 0  # drawn
        self._num_counted = 0  # of them, up to a stop string
        self._unsent_ids: list[int] = []
        self._unsent_logprobs: list[TokenLogprobs] = []
        self._begun = False

    async def events(self, deltas: AsyncGenerator[TokenDelta, None]) -> AsyncGenerator[Piece | Ending, None]:
        """`deltas` are those of this choice; what comes after the ending is not read. They are closed here."""
        detokenizing: Span | None = None  # the first tokens until the first text
        async with AsyncExitStack() as ends:
            async for delta in await ends.enter_async_context(aclosing(deltas)):
                self._facts.see(delta)
                if detokenizing is None:
                    detokenizing = trace.span("detokenize", trace.CLIENT)
                    ends.push(detokenizing)  # it ends here at the latest, failed by what is raised
                if self._order.max_tokens == 0:
                    delta = _without_output(delta)
                text, stop, is_last = await self._read(delta)
                if text or is_last:
                    detokenizing.finish()
                usage = self._count(delta, stop)
                if self._is_due(text, is_last):
                    yield self._piece(text, usage)
                if is_last:
                    yield self._ending(delta, stop, usage)
                    return

    async def _read(self, delta: TokenDelta) -> tuple[str, TextDelta | None, bool]:
        """The text that is certain now, where it met a stop string, and whether that was all."""
        ids = _shown(delta, self._order)
        if delta.finish_reason is not None:
            shown = await self._text.finish(ids)  # one way to the tokenizer and back, also for the last tokens
        else:
            shown = await self._text.push(ids) if ids else _NO_TEXT
        stop = shown if shown.matched_stop is not None else None
        return shown.text, stop, stop is not None or delta.finish_reason is not None

    def _count(self, delta: TokenDelta, stop: TextDelta | None) -> Usage:
        num_before, self._num_tokens = self._num_tokens, self._num_tokens + len(delta.token_ids)
        counted = self._num_tokens if stop is None else stop.num_tokens
        num_new = max(0, counted - num_before)
        self._unsent_ids += delta.token_ids[:num_new]
        self._unsent_logprobs += delta.logprobs[:num_new]
        usage = self._facts.clock.tokens(delta, len(self._facts.prompt_token_ids), counted - self._num_counted)
        self._num_counted = counted
        return usage

    def _is_due(self, text: str, is_last: bool) -> bool:
        if text or not self._begun:
            return True
        return bool(self._unsent_ids) and (self._order.return_token_ids or (is_last and bool(self._unsent_logprobs)))

    def _piece(self, text: str, usage: Usage) -> Piece:
        facts, ids, logprobs = self._facts, tuple(self._unsent_ids), tuple(self._unsent_logprobs)
        self._unsent_ids, self._unsent_logprobs = [], []
        if self._begun:
            return Piece(text, usage, ids, (), facts.fingerprint, self._choice, logprobs)
        self._begun = True
        return Piece(facts.echoed + text, usage, ids, facts.prompt_token_ids, facts.fingerprint, self._choice, logprobs,
                     facts.prompt_logprobs, len(facts.echoed))

    def _ending(self, delta: TokenDelta, stop: TextDelta | None, usage: Usage) -> Ending:
        facts, reason = self._facts, FinishReason.STOP
        stop_reason: str | int | None = None
        if stop is not None:
            stop_reason = stop.matched_stop
        else:
            assert delta.finish_reason is not None
            reason = delta.finish_reason
            if delta.stop_token_id in self._order.stop_token_ids:
                stop_reason = delta.stop_token_id
        facts.clock.finished(reason)
        return Ending(reason, stop_reason, usage, facts.fingerprint, self._choice, facts.clock.queue_s,
                      facts.clock.ttft_s)


def _shown(delta: TokenDelta, order: Order) -> tuple[int, ...]:
    """The tokens whose text the client sees: all but the one that stopped the request."""
    hidden = delta.stop_token_id is not None and not order.include_stop
    return delta.token_ids[:-1] if hidden else delta.token_ids


def _without_output(delta: TokenDelta) -> TokenDelta:
    """The answer to `max_tokens: 0`, for which the engine drew one token."""
    return replace(delta, token_ids=(), logprobs=(), finish_reason=FinishReason.LENGTH, stop_token_id=None)
