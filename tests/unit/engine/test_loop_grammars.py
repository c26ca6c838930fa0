"""Requests that wait for their grammar, in the engine's loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from common.errors import Cancelled, DeadlineExceeded, InvalidRequest
from common.grammar import Grammar, GrammarKind
from common.sampling_params import SamplingParams
from engine.grammar.state import GrammarState
from engine.loop import EngineLoop
from engine.outputs import FinishReason
from engine.request import EngineRequest
from tests.unit.engine.builders import Engine, oracle, prompt
from tests.unit.engine.fake_grammar import FakeGrammar
from tests.unit.engine.test_loop import WAIT_S, Listener


class SlowCompiler:
    """Grammars are ready or not by their text; `go_on` lets the slow ones end."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def compile(self, grammar: Grammar) -> GrammarState:
        assert grammar.text == "quick" or self.go_on.wait(WAIT_S)
        return FakeGrammar(1, 3)

    def ready(self, grammar: Grammar) -> GrammarState | None:
        if grammar.text == "wrong":
            raise InvalidRequest("grammar: wrong", param="grammar")
        return FakeGrammar(1, 3) if grammar.text == "ready" else None


class Compiling:
    def __init__(self) -> None:
        self.compiler, self.heard = SlowCompiler(), Listener()
        self.core = Engine(clock=time.monotonic).core
        self.loop = EngineLoop(
            self.core, self.heard.on_step, self.heard.on_fatal, max_commands=64, grammar_compiler=self.compiler)


@pytest.fixture
def running() -> Iterator[Compiling]:
    made = Compiling()
    made.loop.start()
    yield made
    made.compiler.go_on.set()
    made.loop.stop(WAIT_S)


def constrained(request_id: str, text: str, deadline: float | None = None) -> EngineRequest:
    params = SamplingParams(max_tokens=8, grammar=Grammar(GrammarKind.REGEX, text))
    return EngineRequest(request_id, prompt(20), params, deadline=deadline)


@pytest.mark.parametrize("text", ["ready", "quick"])
def test_slow_grammars_keep_no_other_waiting(running: Compiling, text: str) -> None:
    for index in range(20):
        running.loop.submit(constrained(f"slow {index}", f"slow {index}"))
    running.loop.submit(constrained("r", text))
    running.heard.wait(lambda: "r" in running.heard.last)
    assert running.heard.tokens["r"] == oracle(prompt(20), 8, grammar=FakeGrammar(1, 3))
    assert set(running.heard.last) == {"r"}
    running.loop.reserve(constrained("s", text)).result(WAIT_S)


def test_a_grammar_that_is_known_to_be_wrong_is_refused_at_once(running: Compiling) -> None:
    with pytest.raises(InvalidRequest, match="wrong"):
        running.loop.submit(constrained("r", "wrong"))
    with pytest.raises(InvalidRequest, match="wrong"):
        running.loop.reserve(constrained("r", "wrong")).result(0)
    running.loop.submit(constrained("r", "ready"))  # the id is free
    running.heard.wait(lambda: "r" in running.heard.last)


def test_a_deadline_passes_while_the_grammar_is_compiled(running: Compiling) -> None:
    running.loop.submit(constrained("submitted", "slow", deadline=time.monotonic() + 0.05))
    reserved = running.loop.reserve(constrained("reserved", "slow", deadline=time.monotonic() + 0.05))
    with pytest.raises(DeadlineExceeded, match="while the grammar was compiled"):
        reserved.result(WAIT_S)
    running.heard.wait(lambda: "submitted" in running.heard.last)
    assert running.heard.last["submitted"].finish_reason is FinishReason.ERROR
    assert isinstance(running.heard.last["submitted"].error, DeadlineExceeded)
    assert not running.compiler.go_on.is_set()
    running.compiler.go_on.set()  # the listener refuses a second end
    running.loop.submit(constrained("next", "quick"))
    running.heard.wait(lambda: "next" in running.heard.last)


def test_a_release_ends_what_waits_for_a_grammar_without_an_output(running: Compiling) -> None:
    running.loop.submit(constrained("submitted", "slow"))
    reserved = running.loop.reserve(constrained("reserved", "slow"))
    for name in ("submitted", "reserved"):
        running.loop.release(name).result(WAIT_S)
    with pytest.raises(Cancelled):
        reserved.result(0)
    running.compiler.go_on.set()
    running.loop.submit(constrained("submitted", "ready"))  # the id is free
    running.heard.wait(lambda: "submitted" in running.heard.last)
    assert running.heard.tokens == {"submitted": oracle(prompt(20), 8, grammar=FakeGrammar(1, 3))}
    assert running.loop.call(lambda core: "reserved" in core).result(WAIT_S) is False
