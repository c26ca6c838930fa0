from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.errors import ContextLengthExceeded, InternalError, InvalidRequest, Overloaded, Unavailable
from engine.core import EngineCore
from engine.loop import EngineLoop
from engine.outputs import FinishReason, RequestOutput
from tests.unit.engine.builders import Engine, ask, oracle, prompt

WAIT_S = 20.0


class Listener:
    """Collects outputs from the loop's thread; `wait` blocks until a condition on them holds."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.fatal: list[Exception] = []
        self._changed = threading.Condition()

    def on_step(self, outputs: list[RequestOutput]) -> None:
        with self._changed:
            for output in outputs:
                assert output.request_id not in self.last
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.last[output.request_id] = output
            self._changed.notify_all()

    def on_fatal(self, exc: Exception) -> None:
        with self._changed:
            self.fatal.append(exc)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S)


class Running:
    def __init__(self, max_commands: int = 1024, **config: Any) -> None:
        self.engine = Engine(**config)
        self.heard = Listener()
        self.loop = EngineLoop(
            self.engine.core, self.heard.on_step, self.heard.on_fatal, max_commands=max_commands)

    def hold(self) -> threading.Event:
        """Stop the loop's thread between two steps until the returned event is set."""
        reached, release = threading.Event(), threading.Event()

        def block(_: EngineCore) -> None:
            reached.set()
            assert release.wait(WAIT_S)

        self.loop.call(block)
        assert reached.wait(WAIT_S)
        return release


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    made.loop.start()
    yield made
    made.loop.stop(WAIT_S)


def test_requests_from_many_threads_all_get_their_own_tokens(running: Running) -> None:
    def submit(worker: int) -> None:
        for index in range(8):
            running.loop.submit(ask(f"{worker}.{index}", prompt(10 + index, first=worker), max_tokens=6))

    threads = [threading.Thread(target=submit, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    running.heard.wait(lambda: len(running.heard.last) == 32)
    for worker in range(4):
        for index in range(8):
            assert running.heard.tokens[f"{worker}.{index}"] == oracle(prompt(10 + index, first=worker), 6)


def test_an_abort_ends_a_request_once_and_frees_its_blocks(running: Running) -> None:
    running.loop.submit(ask("r", prompt(20), max_tokens=5000))
    running.heard.wait(lambda: running.heard.tokens.get("r"))
    running.loop.abort("r")
    running.loop.abort("r")
    running.loop.abort("never heard of")
    running.heard.wait(lambda: "r" in running.heard.last)
    assert running.heard.last["r"].finish_reason is FinishReason.ABORT
    stats = running.loop.call(lambda core: core.stats()).result(WAIT_S)
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)


def test_an_abort_overtakes_nothing_and_reaches_a_request_still_in_the_queue(running: Running) -> None:
    release = running.hold()
    running.loop.submit(ask("r", prompt(20), max_tokens=5000))
    running.loop.abort("r")
    release.set()
    running.heard.wait(lambda: "r" in running.heard.last)
    assert running.heard.last["r"].finish_reason is FinishReason.ABORT


def test_a_refused_request_becomes_its_only_output(running: Running) -> None:
    running.loop.submit(ask("long", prompt(9000)))
    running.heard.wait(lambda: "long" in running.heard.last)
    output = running.heard.last["long"]
    assert output.finish_reason is FinishReason.ERROR
    assert isinstance(output.error, ContextLengthExceeded)
    assert output.num_prompt_tokens == 9000


def test_a_live_id_is_refused_at_once_without_disturbing_the_first(running: Running) -> None:
    release = running.hold()
    running.loop.submit(ask("r", prompt(20), max_tokens=3))
    with pytest.raises(InvalidRequest, match="in use"):
        running.loop.submit(ask("r", prompt(5)))
    release.set()
    running.heard.wait(lambda: "r" in running.heard.last)
    assert running.heard.tokens["r"] == oracle(prompt(20), 3)


def test_an_id_may_be_used_again_after_its_last_output(running: Running) -> None:
    for first in (3, 4):
        running.loop.submit(ask("r", prompt(20, first=first), max_tokens=3))
        running.heard.wait(lambda: "r" in running.heard.last)
        assert running.heard.tokens.pop("r") == oracle(prompt(20, first=first), 3)
        running.loop.call(lambda core: running.heard.last.clear()).result(WAIT_S)


def test_call_runs_between_steps_and_hands_back_value_or_exception(running: Running) -> None:
    assert running.loop.call(lambda core: core.config.num_blocks).result(WAIT_S) == 1024
    with pytest.raises(ZeroDivisionError):
        running.loop.call(lambda core: 1 // 0).result(WAIT_S)
    running.loop.submit(ask("r", prompt(4)))
    running.heard.wait(lambda: "r" in running.heard.last)


def test_a_full_command_queue_refuses_but_still_takes_aborts() -> None:
    running = Running(max_commands=1)
    running.loop.start()
    release = running.hold()
    running.loop.submit(ask("a", prompt(20), max_tokens=5000))
    with pytest.raises(Overloaded) as caught:
        running.loop.submit(ask("b", prompt(20)))
    assert caught.value.retry_after_s
    with pytest.raises(Overloaded):
        running.loop.call(lambda core: core.stats()).result(WAIT_S)
    for _ in range(50):
        running.loop.abort("a")
    assert len(running.loop._commands) == 2
    release.set()
    running.heard.wait(lambda: "a" in running.heard.last)
    running.loop.submit(ask("b", prompt(20)))
    running.heard.wait(lambda: "b" in running.heard.last)
    running.loop.stop(WAIT_S)


def test_stop_answers_live_and_queued_requests_and_refuses_later_ones() -> None:
    running = Running(max_num_seqs=1)
    running.loop.start()
    running.loop.submit(ask("runs", prompt(20), max_tokens=5000))
    running.heard.wait(lambda: running.heard.tokens.get("runs"))
    release = running.hold()
    running.loop.submit(ask("queued", prompt(20)))
    stopper = threading.Thread(target=running.loop.stop, args=(WAIT_S,))
    stopper.start()
    release.set()
    stopper.join(WAIT_S)
    assert isinstance(running.heard.last["runs"].error, Unavailable)
    assert "queued" in running.heard.last
    with pytest.raises(Unavailable):
        running.loop.submit(ask("later", prompt(4)))
    with pytest.raises(Unavailable):
        running.loop.call(lambda core: core.stats()).result(WAIT_S)
    assert running.heard.fatal == []
    running.loop.stop(WAIT_S)


def test_stop_before_start_answers_what_was_queued() -> None:
    running = Running()
    running.loop.submit(ask("r", prompt(4)))
    waiting = running.loop.call(lambda core: core.stats())
    running.loop.stop(WAIT_S)
    assert isinstance(running.heard.last["r"].error, Unavailable)
    with pytest.raises(Unavailable):
        waiting.result(WAIT_S)
    running.loop.stop(WAIT_S)


def test_stop_has_a_deadline() -> None:
    running = Running()
    running.loop.start()
    release = running.hold()
    with pytest.raises(TimeoutError):
        running.loop.stop(0.01)
    release.set()
    running.loop.stop(WAIT_S)


def test_a_failing_runner_answers_everyone_then_tells_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    boom = OSError("device lost")

    def collect() -> None:
        raise boom

    running.loop.submit(ask("a", prompt(4)))
    running.loop.submit(ask("b", prompt(4)))
    monkeypatch.setattr(running.engine.runner, "collect", collect)
    running.loop.start()
    running.heard.wait(lambda: running.heard.fatal)
    assert running.heard.fatal == [boom]
    assert set(running.heard.last) == {"a", "b"}
    for output in running.heard.last.values():
        assert isinstance(output.error, InternalError)
    with pytest.raises(Unavailable, match="device lost"):
        running.loop.submit(ask("c", prompt(4)))
    running.loop.stop(WAIT_S)


def test_a_failing_listener_is_fatal_and_frees_the_engine() -> None:
    running = Running()
    failures: list[Exception] = []
    done = threading.Event()

    def on_step(outputs: list[RequestOutput]) -> None:
        raise KeyError("gone")

    def on_fatal(exc: Exception) -> None:
        failures.append(exc)
        done.set()

    loop = EngineLoop(running.engine.core, on_step, on_fatal)
    loop.start()
    loop.submit(ask("a", prompt(4)))
    assert done.wait(WAIT_S)
    assert isinstance(failures[0], KeyError)
    assert not running.engine.core.has_work
    with pytest.raises(Unavailable):
        loop.submit(ask("b", prompt(4)))
    loop.stop(WAIT_S)


def test_a_leak_is_found_when_the_engine_goes_idle(running: Running) -> None:
    running.loop.call(lambda core: core._pool.take(3)).result(WAIT_S)
    running.loop.submit(ask("r", prompt(4)))
    running.heard.wait(lambda: "r" in running.heard.last)
    seen = threading.Event()
    for _ in range(200):
        if running.loop.stats.num_leaked_blocks == 3:
            break
        seen.wait(0.1)
    assert running.loop.stats.num_leaked_blocks == 3


def test_an_abort_reaches_a_request_that_was_reserved_but_only_once_it_is_started(running: Running) -> None:
    running.loop.call(lambda core: core.reserve(ask("r", prompt(20), max_tokens=5000))).result(WAIT_S)
    running.loop.abort("r")
    assert running.loop.call(lambda core: "r" in core).result(WAIT_S)
    with pytest.raises(InvalidRequest, match="in use"):
        running.loop.submit(ask("r", prompt(4)))
    running.loop.call(lambda core: core.start("r")).result(WAIT_S)
    running.heard.wait(lambda: running.heard.tokens.get("r"))
    running.loop.abort("r")
    running.heard.wait(lambda: "r" in running.heard.last)
    assert running.heard.last["r"].finish_reason is FinishReason.ABORT


def test_a_released_id_may_be_used_again(running: Running) -> None:
    running.loop.submit(ask("r", prompt(20), prefill_only=True))
    running.heard.wait(lambda: "r" in running.heard.tokens)
    running.loop.call(lambda core: core.release("r")).result(WAIT_S)
    running.loop.submit(ask("r", prompt(20), max_tokens=3))
    running.heard.wait(lambda: "r" in running.heard.last)
    assert running.heard.tokens["r"] == oracle(prompt(20), 3)


def test_a_request_that_waits_for_a_transfer_does_not_keep_the_loop_busy_and_goes_on_after_it() -> None:
    running = Running(num_blocks=8)
    num_steps = 0
    step = running.engine.core.step

    def counted() -> list[RequestOutput]:
        nonlocal num_steps
        num_steps += 1
        return step()

    running.engine.core.step = counted  # type: ignore[method-assign]
    running.engine.core.reserve(ask("transfer", prompt(40, first=4)))
    running.loop.start()
    running.loop.submit(ask("waits", prompt(100), max_tokens=3))
    running.loop.call(lambda core: None).result(WAIT_S)
    threading.Event().wait(0.3)
    assert num_steps < 50
    running.loop.call(lambda core: core.release("transfer")).result(WAIT_S)
    running.heard.wait(lambda: "waits" in running.heard.last)
    assert running.heard.tokens["waits"] == oracle(prompt(100), 3)
    running.loop.stop(WAIT_S)


def test_after_each_turn_the_core_is_shown_in_the_loops_thread() -> None:
    running = Running(max_kv_events=9)
    seen: list[object] = []
    done = threading.Event()

    def after_turn(core: EngineCore) -> None:
        assert threading.current_thread().name == "engine-loop"
        seen.extend(core.take_kv_events())
        if seen:
            done.set()

    loop = EngineLoop(running.engine.core, running.heard.on_step, running.heard.on_fatal, after_turn=after_turn)
    loop.start()
    loop.submit(ask("r", prompt(20), max_tokens=1))
    assert done.wait(WAIT_S)
    loop.stop(WAIT_S)


def test_stats_are_at_hand_with_the_last_output(running: Running) -> None:
    running.loop.submit(ask("r", prompt(4), max_tokens=3))
    running.heard.wait(lambda: "r" in running.heard.last)
    stats = running.loop.stats
    assert (stats.num_generated_tokens, stats.num_running) == (3, 0)
