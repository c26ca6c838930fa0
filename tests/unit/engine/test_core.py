from typing import Any

import pytest

from common.errors import (
    ConfigError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from engine.core import EngineCore, EngineFailed
from engine.outputs import FinishReason, RequestOutput
from engine.request import Request
from tests.unit.engine.builders import VOCAB_SIZE, Engine, ask, oracle, prompt, scheme


def test_a_prompt_that_can_never_fit_the_pool_is_refused_and_holds_up_nobody() -> None:
    engine = Engine(num_blocks=8)
    with pytest.raises(ContextLengthExceeded, match=r"200 tokens .* 128 tokens"):
        engine.core.add(ask("big", prompt(200)))
    engine.run(ask("small", prompt(4), max_tokens=4))
    assert engine.tokens["small"] == oracle(prompt(4), 4)


def test_the_longest_prompt_leaves_one_token_of_context_and_of_pool() -> None:
    limits: list[dict[str, Any]] = [{"num_blocks": 2}, {"max_model_len": 32}]
    for sizes in limits:
        engine = Engine(**sizes)
        engine.run(ask("fits", prompt(31)))
        assert engine.last["fits"].num_output_tokens == 1
        with pytest.raises(ContextLengthExceeded, match=r"32 tokens .* 32 tokens") as caught:
            engine.core.add(ask("over", prompt(32)))
        assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("tokens", "fields", "param"), [
        ([], {}, "prompt"),
        ([5, -1], {}, "prompt"),
        ([5, VOCAB_SIZE], {}, "prompt"),
        ([5], {"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
        ([5], {"logit_bias": {-1: 5.0}}, "logit_bias"),
    ])
def test_bad_input_is_refused_by_name(tokens: list[int], fields: dict[str, Any], param: str) -> None:
    engine = Engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.core.add(ask("r", tokens, **fields))
    assert caught.value.param == param
    assert not engine.core.has_work


def test_a_live_id_is_refused_and_free_again_after_its_end() -> None:
    engine = Engine()
    engine.core.add(ask("r", prompt(4)))
    with pytest.raises(InvalidRequest, match="'r' is in use") as caught:
        engine.core.add(ask("r", prompt(5)))
    assert caught.value.param == "request_id"
    assert engine.core.abort("r") is not None
    engine.run(ask("r", prompt(5), max_tokens=3))
    assert engine.tokens["r"] == oracle(prompt(5), 3)


def test_one_more_than_may_wait_is_refused_with_a_retry_time() -> None:
    now = 100.0
    engine = Engine(max_num_waiting=2, max_num_seqs=1, clock=lambda: now)
    engine.core.add(ask("runs", prompt(4), max_tokens=99))
    engine.step()
    for name in ("w1", "w2"):
        engine.core.add(ask(name, prompt(4)))
    for waited, retry_after_s in ((0.0, 1.0), (7.0, 7.0), (500.0, 30.0)):
        now = 100.0 + waited
        with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2") as caught:
            engine.core.add(ask("w3", prompt(4)))
        assert caught.value.retry_after_s == retry_after_s
    engine.core.abort("w1")
    engine.core.add(ask("w3", prompt(4)))


def test_abort_frees_blocks_while_waiting_in_chunked_prefill_and_in_decode() -> None:
    engine = Engine(num_blocks=16, max_num_batched_tokens=64, max_num_seqs=2, enable_overlap=False)
    engine.core.add(ask("decodes", prompt(10), max_tokens=50))
    engine.step()
    engine.core.add(ask("prefills", prompt(150, first=4)))
    engine.core.add(ask("waits", prompt(10, first=5)))
    engine.step()
    assert engine.core.stats().num_free_blocks < 16
    for name in ("waits", "prefills", "decodes"):
        output = engine.core.abort(name)
        assert output is not None
        assert output.finish_reason is FinishReason.ABORT
        engine.core.check_integrity()
        assert engine.core.abort(name) is None
    stats = engine.core.stats()
    assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (16, 0, 0)
    assert stats.num_finished[FinishReason.ABORT] == 3
    assert engine.runner.forgotten == ["waits", "prefills", "decodes"]


def test_a_failing_runner_answers_everyone_and_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(max_num_seqs=1)
    engine.core.add(ask("runs", prompt(20)))
    engine.core.add(ask("waits", prompt(20, first=4)))
    engine.step()
    boom = OSError("device lost")

    def collect() -> None:
        raise boom

    monkeypatch.setattr(engine.runner, "collect", collect)
    with pytest.raises(EngineFailed) as caught:
        engine.core.step()
    assert caught.value.cause is boom
    assert {output.request_id for output in caught.value.outputs} == {"runs", "waits"}
    for output in caught.value.outputs:
        assert output.finish_reason is FinishReason.ERROR
        assert isinstance(output.error, InternalError)
        assert "device lost" in output.error.message
    assert not engine.core.has_work
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks
    engine.core.check_integrity()
    with pytest.raises(Unavailable, match="device lost"):
        engine.core.add(ask("later", prompt(4)))


@pytest.mark.parametrize("enable_overlap", [True, False])
def test_what_a_step_put_out_before_it_failed_is_put_out(enable_overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(enable_overlap=enable_overlap)
    engine.add(ask("ends", prompt(20), max_tokens=1))
    engine.add(ask("later", prompt(20, first=4), max_tokens=9))
    take_row = engine.core._intake._take_row

    def failing(request: Request, *facts: Any, **more: Any) -> RequestOutput | None:
        if request.request_id == "later":
            raise OSError("a later row")
        return take_row(request, *facts, **more)

    monkeypatch.setattr(engine.core._intake, "_take_row", failing)
    with pytest.raises(EngineFailed) as caught:
        engine.run()
    assert [(output.request_id, output.finish_reason, output.new_token_ids) for output in caught.value.outputs] == [
        ("ends", FinishReason.LENGTH, tuple(oracle(prompt(20), 1))), ("later", FinishReason.ERROR, ())]


def test_no_time_is_negative_for_one_that_comes_after_an_idle_time() -> None:
    now = 100.0
    engine = Engine(clock=lambda: now)
    engine.run(ask("a", prompt(20)))
    now = 500.0
    engine.core.add(ask("b", prompt(20)))
    output = engine.core.abort("b")
    assert output is not None
    assert output.timing is not None
    assert output.timing.queue_s == 0.0
    engine.core.add(ask("c", prompt(20)))
    now = 502.0
    output = engine.core.abort("c")
    assert output is not None
    assert output.timing is not None
    assert output.timing.queue_s == 2.0


def test_a_leak_is_counted_and_never_waited_on() -> None:
    engine = Engine(num_blocks=4)
    engine.core._pool.take(2)
    with pytest.raises(RuntimeError, match="has 1 references, 0 block tables and pins hold it"):
        engine.core.check_integrity()
    assert engine.core.stats().num_leaked_blocks == 2
    engine.core.add(ask("r", prompt(40)))
    with pytest.raises(EngineFailed, match="blocks have leaked"):
        engine.core.step()


def test_reset_prefix_cache_forgets_what_no_live_request_uses() -> None:
    engine = Engine()
    engine.run(ask("a", prompt(64)))
    engine.core.reset_prefix_cache()
    assert engine.run(ask("b", prompt(64)))["b"].num_cached_tokens == 0


def test_a_hash_scheme_of_another_block_size_stops_the_start() -> None:
    engine = Engine()
    with pytest.raises(ConfigError, match="block_size is 16, but the hash scheme's is 8"):
        EngineCore(engine.config, engine.runner, scheme(8))


def test_counters_add_up() -> None:
    engine = Engine()
    engine.run(*(ask(f"r{i}", prompt(10 + i, first=i), max_tokens=4) for i in range(3)))
    stats = engine.core.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_steps) == (33, 12, 4)
    assert stats.num_finished == dict.fromkeys(FinishReason, 0) | {FinishReason.LENGTH: 3}
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_leaked_blocks) == (1024, 1024, 0)
    assert engine.core.step() == []
