"""Compiles grammars beside the engine's thread.

A grammar here: ready at once, or asked → being compiled → done or refused. `MAX_WAITING` of them at once, one more is
refused. How long a compilation may take, the compiler bounds. The threads here only wait for it, one for each grammar,
so that nobody waits behind another's.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from common.errors import InvalidRequest, Overloaded
from common.grammar import Grammar
from engine.grammar.state import GrammarState

MAX_WAITING = 256
BUSY_RETRY_AFTER_S = 1.0


class CompilesGrammars(Protocol):
    """Safe from any thread; both raise `InvalidRequest` for a grammar that is refused."""

    def compile(self, grammar: Grammar) -> GrammarState:
        """Blocks."""

    def ready(self, grammar: Grammar) -> GrammarState | None:
        """Does not block: None for a grammar that is not compiled yet."""


class GrammarDesk:
    """`compiler` None: this engine has no grammars, and says so."""

    def __init__(self, compiler: CompilesGrammars | None) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="grammar")
        self._num_waiting = 0
        self._lock = threading.Lock()

    def ready(self, grammar: Grammar) -> GrammarState | None:
        """The state of a grammar that is compiled already. Raises `InvalidRequest` for one that is refused."""
        return self._known().ready(grammar)

    def begin(self, grammar: Grammar) -> Future[GrammarState]:
        """Raises `InvalidRequest` or `Overloaded` at once; the future fails with what the compiler raises."""
        compiler = self._known()
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise Overloaded(f"{self._num_waiting} grammars wait for their compilation, the limit is "
                                 f"{MAX_WAITING}", retry_after_s=BUSY_RETRY_AFTER_S)
            self._num_waiting += 1
        try:
            future = self._threads.submit(compiler.compile, grammar)
        except RuntimeError as error:
            self._leave()
            raise Overloaded(f"no thread to compile a grammar in: {error}",
                             retry_after_s=BUSY_RETRY_AFTER_S) from error
        future.add_done_callback(lambda _: self._leave())
        return future

    def close(self) -> None:
        """Do not wait for a compilation in hand."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _known(self) -> CompilesGrammars:
        if self._compiler is None:
            raise InvalidRequest("grammar: this engine has no tokenizer, so it cannot constrain text", param="grammar")
        return self._compiler

    def _leave(self) -> None:
        with self._lock:
            self._num_waiting -= 1
