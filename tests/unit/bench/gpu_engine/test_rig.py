"""Requests that are driven through an engine, here one whose model costs nothing."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from bench.engine_area.engines import IdleRunner, idle_core
from bench.gpu_engine.measure import measure
from bench.gpu_engine.rig import Rig
from bench.gpu_engine.shapes import shape
from bench.serve.workloads import BenchRequest, random
from common.errors import ConfigError
from engine.config import EngineConfig
from engine.gpu.loading import num_parameters


def rig(**sizes: Any) -> Rig:
    made = Rig.__new__(Rig)  # without a GPU
    made.core = idle_core(IdleRunner(), EngineConfig(**{"num_blocks": 64, "max_num_waiting": 64, **sizes}))
    made.num_served, made._numbers = 0, count()
    return made


def test_every_request_gets_exactly_its_tokens_and_their_times() -> None:
    made = rig()
    seconds, served = made.run(random(9, 20, 5))
    assert [len(s.token_at) for s in served] == [5] * 9
    assert made.num_served == 9
    assert all(0 < s.ttft_s <= seconds and len(s.gaps_s) == 4 and s.tpot_s >= 0 for s in served)


def test_a_request_is_added_when_it_is_due() -> None:
    seconds, served = rig().run([BenchRequest([300] * 4, 2, 0.0), BenchRequest([400] * 4, 2, 0.2)])
    assert seconds >= 0.2
    assert served[1].token_at[0] - served[0].due_at >= 0.2


def test_an_answer_that_is_cut_short_fails_the_run() -> None:
    with pytest.raises(RuntimeError, match="ended by length after 6 of 50 tokens"):
        rig(max_model_len=16).run([BenchRequest([300] * 10, 50)])


@pytest.mark.parametrize(("name", "billions"), [("qwen3-8b", 8.19), ("qwen3-0.6b", 0.596)])
def test_a_shape_has_the_parameters_of_its_model(name: str, billions: float) -> None:
    assert num_parameters(shape(name).decoder) / 1e9 == pytest.approx(billions, rel=0.01)


def test_unknown_shapes_and_workloads_are_refused_by_name() -> None:
    for arguments, param in ((("qwen4", ["decode"]), "shape"), (("qwen3-8b", ["sing"]), "workload")):
        with pytest.raises(ConfigError) as refusal:
            measure(*arguments, "cuda", print)
        assert refusal.value.param == param
