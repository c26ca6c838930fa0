import pytest

from engine.step_meter import StepMeter
from tests.unit.engine.builders import Engine, ask, prompt


def test_nothing_is_known_before_the_first_step_and_only_fair_prefills_count() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.25
        return now

    engine = Engine(max_num_batched_tokens=64, clock=clock, enable_overlap=False)
    assert (engine.core.stats().step_s, engine.core.stats().prefill_tokens_per_s) == (0.0, 0.0)
    engine.run(ask("short", prompt(31), max_tokens=3))
    assert engine.core.stats().step_s == 0.25
    assert engine.core.stats().prefill_tokens_per_s == 0.0
    engine.run(ask("long", prompt(150, first=4), max_tokens=2))
    stats = engine.core.stats()
    assert stats.step_s == 0.25
    assert stats.prefill_tokens_per_s == pytest.approx(256.0)  # twice 64 tokens in 0.25 s; 22 tokens do not count


def test_a_new_figure_moves_the_mean_by_a_tenth_of_the_difference() -> None:
    engine = Engine()
    engine.run(ask("r", prompt(40), max_tokens=2))
    prefill, decode = engine.runner.plans
    meter = StepMeter()
    meter.add(1.0, prefill)
    meter.add(2.0, prefill)
    assert meter.step_s == pytest.approx(1.1)
    assert meter.prefill_tokens_per_s == pytest.approx(38.0)
    meter.add(1.1, decode)
    assert meter.prefill_tokens_per_s == pytest.approx(38.0)
