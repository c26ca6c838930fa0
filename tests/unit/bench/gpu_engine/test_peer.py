"""Our figures beside vLLM's."""

from __future__ import annotations

import pytest

from bench.gpu_engine.peer import beside_peer


@pytest.mark.parametrize(("name", "unit", "good", "bad"), [
    ("decode step, B=1", "ms", 5.0, 5.01), ("mixed", "tokens/s", 11_500, 11_490),
    ("prefill 1 x 2048", "ms", 52.5, 52.6),
    ("prefill 8 x 8192", "tokens/s", 37_000, 36_990), ("shared prefix, cold", "s", 2.2, 2.21)])
def test_a_demanded_value_is_met_exactly_from_there_on(name: str, unit: str, good: float, bad: float) -> None:
    assert beside_peer("qwen3-8b", name, good * (1 - 1e-9 if unit != "tokens/s" else 1 + 1e-9), unit).ok is True
    assert beside_peer("qwen3-8b", name, bad, unit).ok is False


def test_a_ratio_above_one_is_better_than_the_peer_in_every_unit() -> None:
    assert beside_peer("qwen3-8b", "decode step, B=8", 5.0, "ms").ratio > 1  # type: ignore[operator]
    assert beside_peer("qwen3-8b", "poisson 32/s, good", 0.9, "of requests").ratio > 1  # type: ignore[operator]
    assert beside_peer("qwen3-8b", "decode step, B=8", 5.0, "ms").ok is None


def test_a_figure_that_the_peer_lacks_stands_alone() -> None:
    assert beside_peer("qwen3-0.6b", "something else", 1.0, "ms").peer_value is None
