from __future__ import annotations

import numpy as np
import pytest

from common.sampling_params import SamplingParams
from engine.sampling.truncation import kept


def _kept(logits: list[float], **params: float) -> list[int]:
    row = np.array(logits, np.float32)
    return sorted(kept(row, float(row.max()), SamplingParams(max_tokens=1, **params))[0].tolist())  # type: ignore[arg-type]


@pytest.mark.parametrize("far", [1.0, 9.0, 30.0])
def test_of_equal_tokens_at_the_cut_the_lower_ids_stay(far: float) -> None:
    assert _kept([0.0, far, 0.0, 0.0, far, 0.0], top_k=4) == [0, 1, 2, 4]
    assert _kept([0.0, far, far, 0.0, far], top_k=2) == [1, 2]
    assert _kept([1.0] * 10, top_p=0.45) == [0, 1, 2, 3, 4]


def test_min_p_comes_first_then_top_k_then_top_p_over_what_is_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.06, 0.04]).tolist()
    assert _kept(logits, min_p=0.4) == [0, 1, 2]
    assert _kept(logits, min_p=0.4, top_p=0.8) == [0, 1, 2]  # of 0.9: the first two have 0.78 of it
    assert _kept(logits, top_p=0.69) == [0, 1]
    assert _kept(logits, top_k=2, top_p=0.6) == [0, 1]  # of 0.7: the first has 0.57 of it
    assert _kept(logits, top_k=2, top_p=0.5) == [0]


def test_one_token_always_stays() -> None:
    assert _kept([3.0, 2.9, 1.0], top_p=1e-9) == [0]
    assert _kept([3.0, 2.9, 1.0], min_p=1.0) == [0]
