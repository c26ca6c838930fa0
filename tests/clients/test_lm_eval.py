"""lm-eval over HTTP gets the scores that it gets with transformers in its own process: float32, greedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.scripts import HERE, client_python, run_script
from tests.stack import RunningStack

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

LOGPROB_ERROR = 4e-4  # 1e-4 a token, of at most four
PACKAGES = ("lm-eval[api,hf]==0.4.13", "torch==2.13.0")


@pytest.fixture(scope="module")
def found(stack: RunningStack, smollm2: Path) -> dict[str, Any]:
    printed = run_script(
        stack, client_python("lm_eval_client", PACKAGES), HERE / "lm_eval_client.py", arguments=(str(smollm2),))
    scores: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return scores


@pytest.mark.parametrize("way", ["completions", "remote tokenizer"])
def test_likelihoods_of_continuations_are_those_of_transformers(found: dict[str, Any], way: str) -> None:
    own, ours = found["choice"]["transformers"], found["choice"][way]
    assert ours["metrics"] == own["metrics"]
    assert 0 < own["metrics"]["acc,none"] < 1
    for expected, got in zip(own["answers"], ours["answers"], strict=True):
        for (logprob, is_greedy), (our_logprob, ours_is_greedy) in zip(expected, got, strict=True):
            assert our_logprob == pytest.approx(logprob, abs=LOGPROB_ERROR)
            assert ours_is_greedy == is_greedy


def test_generated_answers_are_those_of_transformers(found: dict[str, Any]) -> None:
    own, ours = found["text"]["transformers"], found["text"]["chat"]
    assert ours == own
    assert 0 < own["metrics"]["exact_match,none"] < 1
