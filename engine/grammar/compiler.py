"""Grammars to states, over the model's vocabulary. Torch-free.

A compiled grammar: asked for ──a thread is free──▶ compiling ──▶ cached (or its refusal is) ──least used──▶ dropped
                        └──no thread──▶ gone                └──a fault of ours──▶ gone: the next who asks tries again

A compilation cannot be interrupted. It runs in a thread of its own, beside few others; whoever asked waits no longer
than the time limit, and the limits on size hold what goes on afterwards to seconds. The same grammar is compiled once.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from llguidance import LLTokenizer

from common.errors import InternalError, InvalidRequest, Overloaded, ShoalError, UnsupportedValue
from common.grammar import Grammar
from engine.grammar.compiled_grammar import CompiledGrammar
from engine.grammar.llguidance_state import reason_of, refusal
from engine.grammar.state import GrammarState

COMPILE_TIME_S = 5.0
MAX_CACHED_BYTES = 16 << 20  # of grammars' texts
STACK_BYTES = 256 << 20  # address space: the compiler recurses once for each level that the limits allow
BUSY_RETRY_AFTER_S = 2.0


class GrammarCompiler:
    """Any thread may call it. The tokenizer is read at the first use and kept; `max_cached` grammars are kept."""

    def __init__(
        self, model_dir: Path, vocab_size: int, end_token_ids: frozenset[int], *, num_threads: int = 2,
        max_cached: int = 256, time_limit_s: float = COMPILE_TIME_S,
    ) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._max_cached = max_cached
        self._time_limit_s = time_limit_s
        self._free_threads = threading.BoundedSemaphore(num_threads)
        self._lock = threading.Lock()  # guards the cache
        self._cache: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> GrammarState:
        """The state at the start of an output. Blocks up to the time limit; not for an event loop's thread.

        Raises `InvalidRequest` with the reason, `UnsupportedValue` for a schema's keyword and for a model without a
        usable tokenizer, and `Overloaded` while other compilations take all threads.
        """
        tokenizer = self._load_tokenizer()
        deadline = time.monotonic() + self._time_limit_s
        with self._lock:
            compiled = self._cache.get(grammar)
            is_new = compiled is None
            if compiled is None:
                compiled = self._cache[grammar] = Future()
            self._cache.move_to_end(grammar)
            self._evict()
        if is_new:
            self._start(tokenizer, grammar, compiled)
        try:
            ready = compiled.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise refusal(f"did not compile within {self._time_limit_s:g} s") from None
        return ready.start()

    def ready(self, grammar: Grammar) -> GrammarState | None:
        """As `compile`, at once: None for a grammar that would have to be compiled. For any thread."""
        with self._lock:
            compiled = self._cache.get(grammar)
            if compiled is None or not compiled.done():
                return None
            self._cache.move_to_end(grammar)
        found = compiled.result()
        return found.start() if found.is_ready else None

    def _evict(self) -> None:
        size = sum(len(grammar.text) for grammar in self._cache)
        while len(self._cache) > self._max_cached or (size > MAX_CACHED_BYTES and len(self._cache) > 1):
            dropped, _ = self._cache.popitem(last=False)
            size -= len(dropped.text)

    def _start(self, tokenizer: LLTokenizer, grammar: Grammar, compiled: Future[CompiledGrammar]) -> None:
        if not self._free_threads.acquire(timeout=self._time_limit_s):
            self._give_up(grammar, compiled, Overloaded(
                "all threads that compile grammars are busy", retry_after_s=BUSY_RETRY_AFTER_S))
            return

        def run() -> None:
            try:
                compiled.set_result(CompiledGrammar(tokenizer, grammar, self._end_token_ids))
            except InvalidRequest as exc:
                compiled.set_exception(exc)
            except BaseException as exc:  # a panic in Rust is no Exception
                self._give_up(grammar, compiled, InternalError(f"the grammar compiler failed: {exc!r}"))
            finally:
                self._free_threads.release()

        try:
            _start_thread(run)
        except RuntimeError as exc:
            self._free_threads.release()
            self._give_up(grammar, compiled, Overloaded(
                f"no thread to compile a grammar in: {exc}", retry_after_s=BUSY_RETRY_AFTER_S))

    def _give_up(self, grammar: Grammar, compiled: Future[CompiledGrammar], error: ShoalError) -> None:
        """Tell those who wait, and nobody else: only what a grammar itself is at fault for is remembered."""
        with self._lock:
            if self._cache.get(grammar) is compiled:
                del self._cache[grammar]
        compiled.set_exception(error)

    def _load_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = _read_tokenizer(self._model_dir, self._vocab_size, self._end_token_ids)
            return self._tokenizer


_stack_lock = threading.Lock()


def _start_thread(run: Callable[[], None]) -> None:
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar-compile", daemon=True).start()
        finally:
            threading.stack_size(before)


def _read_tokenizer(model_dir: Path, vocab_size: int, end_token_ids: frozenset[int]) -> LLTokenizer:
    path = model_dir / "tokenizer.json"
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        described["padding"] = described["truncation"] = None
        return LLTokenizer(json.dumps(described), n_vocab=vocab_size, eos_token=sorted(end_token_ids) or None)
    except FileNotFoundError:
        raise UnsupportedValue(
            "grammar: this model has no tokenizer.json, so its output cannot be constrained", param="grammar") from None
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as exc:
        raise UnsupportedValue(
            f"grammar: this model's tokenizer cannot be used to constrain output: {reason_of(str(exc))}",
            param="grammar") from exc
