"""One grammar over one vocabulary, from which every output that follows it starts. Torch-free.

    NEW ──probed──▶ USABLE ──a state exhausts the shared lexer──▶ SPOILT ──next start──▶ USABLE, with another lexer
"""

from __future__ import annotations

import threading
import time

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.errors import InvalidRequest
from common.grammar import Grammar
from engine.grammar.grammar_source import source_of
from engine.grammar.llguidance_state import LlguidanceState, reason_of, refusal

PROBE_STEPS = 8
PROBE_TIME_S = 0.25  # of `PROBE_STEPS` masks and tokens; a step of the whole batch waits for a mask

# A lexer's states take 1 to 2 kB each. A step's fuel is some 15 ms, its items 3 ms.
_LIMITS = LLParserLimits(max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False)


class CompiledGrammar:
    """Any thread may call it."""

    def __init__(self, tokenizer: LLTokenizer, grammar: Grammar, end_token_ids: frozenset[int]) -> None:
        """Raises `InvalidRequest` with the reason; takes seconds at worst."""
        self._tokenizer = tokenizer
        self._source = source_of(grammar)
        self._end_token_ids = end_token_ids
        self._lock = threading.Lock()
        self._is_spoilt = False
        self._first = self._new_matcher()
        if self._first.is_error():
            raise refusal(f"{grammar.kind}: {reason_of(self._first.get_error())}")
        try:
            self._probe()
        except InvalidRequest as exc:
            raise refusal(f"{grammar.kind} cannot be followed: {exc.message.removeprefix('grammar: ')}") from exc

    @property
    def is_ready(self) -> bool:
        """Whether `start` is a matter of microseconds; after a state reached a limit, the next one compiles again."""
        return not self._is_spoilt

    def start(self) -> LlguidanceState:
        """The state at the start of an output; shares its lexer with the others."""
        with self._lock:
            if self._is_spoilt:
                self._first, self._is_spoilt = self._new_matcher(), False
            return LlguidanceState(self._first.deep_copy(), self._renewed, self._end_token_ids)

    def _renewed(self) -> LLMatcher:
        with self._lock:
            self._is_spoilt = True
        return self._new_matcher()

    def _new_matcher(self) -> LLMatcher:
        return LLMatcher(self._tokenizer, self._source, log_level=0, limits=_LIMITS)

    def _probe(self) -> None:
        """Make some steps: a grammar without any output, or one that explodes, is refused before it runs."""
        state = LlguidanceState(self._new_matcher(), None, self._end_token_ids)
        words = np.empty(-(-self._tokenizer.vocab_size // 32), np.uint32)
        began = time.monotonic()
        for _ in range(PROBE_STEPS):
            if state.is_finished:
                return
            state.fill(words)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
            state.accept(state.forced() or [int(allowed[-1])])
            if time.monotonic() - began > PROBE_TIME_S:
                raise refusal(f"too complex: {PROBE_STEPS} tokens take more than {PROBE_TIME_S} s")
