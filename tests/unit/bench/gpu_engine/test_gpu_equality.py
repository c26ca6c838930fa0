"""How two runs of one model are compared."""

from __future__ import annotations

from bench.gpu_engine.gpu_equality import _agreement
from common.generation import TokenLogprobs


def scores(*rows: tuple[tuple[int, ...], tuple[float, ...]]) -> list[list[TokenLogprobs]]:
    return [[TokenLogprobs(-1.0, ids, logprobs) for ids, logprobs in rows]]


def test_positions_agree_by_their_likeliest_token_and_differ_by_float32s_margin() -> None:
    exact = scores(((5, 6), (-0.1, -0.3)), ((7, 8), (-0.5, -0.6)), ((1, 2), (-0.2, -3.0)), ((1, 2), (-0.2, -3.0)))
    rough = scores(((5, 6), (-0.1, -0.2)), ((8, 7), (-0.5, -0.5)), ((1, 2), (-0.2, -3.0)), ((1, 2), (-0.2, -3.0)))
    share, margin = _agreement(exact, rough)
    assert (share.value, share.ok) == (0.75, False)
    assert (round(margin.value, 6), margin.ok) == (0.1, True)


def test_a_token_beyond_float32s_alternatives_is_never_a_close_call() -> None:
    _, margin = _agreement(scores(((5, 6), (-0.1, -0.3))), scores(((9, 6), (-0.1, -0.3))))
    assert margin.ok is False
