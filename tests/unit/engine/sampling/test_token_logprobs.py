from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.token_logprobs import token_logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 30.0])
def test_they_are_those_of_torch_and_ties_go_by_id(num_top: int, scale: float) -> None:
    row = np.round(np.random.default_rng(3).standard_normal(5000) * scale, 1).astype(np.float32)
    exact = torch.log_softmax(torch.from_numpy(row).double(), 0).numpy()
    scored = token_logprobs(row, 17, num_top)
    order = sorted(range(5000), key=lambda i: (-row[i], i))[:num_top]
    assert list(scored.top_token_ids) == order
    np.testing.assert_allclose(scored.top_logprobs, exact[order], atol=2e-6)
    assert scored.logprob == pytest.approx(exact[17], abs=2e-6)
    assert max(scored.logprob, *scored.top_logprobs, -1.0) <= 0.0


def test_there_are_as_many_as_asked_for_even_far_below_the_best() -> None:
    row = np.full(30, -500.0, np.float32)
    row[7] = 0.0
    scored = token_logprobs(row, 3, 20)
    assert scored.top_token_ids == (7, *(i for i in range(20) if i != 7))
    assert np.isfinite(scored.top_logprobs).all()
    assert scored.logprob == pytest.approx(-500.0)
    assert scored.top_logprobs[0] == 0.0
