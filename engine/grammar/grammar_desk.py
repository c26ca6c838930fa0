"""Compiles grammars beside the engine's thread.

A grammar here: asked → being compiled, in order of asking → done or refused. `MAX_WAITING` of them at once, one more
is refused. How long a compilation may take, the compiler bounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from common.errors import InvalidRequest, Overloaded
from common.grammar import Grammar
from engine.grammar.state import GrammarState

MAX_WAITING = 256

CompileGrammar = Callable[[Grammar], GrammarState]  # blocking; raises `InvalidRequest`; safe from any thread


class GrammarDesk:
    """`compile_grammar` None: this engine has no grammars, and says so."""

    def __init__(self, compile_grammar: CompileGrammar | None, num_threads: int = 1) -> None:
        self._compile = compile_grammar
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._num_waiting = 0
        self._lock = threading.Lock()

    def begin(self, grammar: Grammar) -> Future[GrammarState]:
        """Raises `InvalidRequest` or `Overloaded` at once; the future fails with what the compiler raises."""
        if self._compile is None:
            raise InvalidRequest("grammar: this engine has no tokenizer, so it cannot constrain text", param="grammar")
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise Overloaded(f"{self._num_waiting} grammars wait for their compilation, the limit is "
                                 f"{MAX_WAITING}", retry_after_s=1.0)
            self._num_waiting += 1
        future = self._threads.submit(self._compile, grammar)
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """Do not wait for a compilation in hand."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, _future: Future[GrammarState]) -> None:
        with self._lock:
            self._num_waiting -= 1
