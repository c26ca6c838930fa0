"""A small sample of the engine's equalities with the real model and its tokenizer; the whole is `test_engine_equality`.

The reference is each request alone; all logits are compared with those of transformers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.grammar import Grammar, GrammarKind
from common.sampling_params import SamplingParams
from engine.request import EngineRequest
from tests.engine_runs import AloneAnswers, EngineRun, LoadedModel, assert_same

NUM_TOKENS = 7
NUM_DRAWN = (1, 5, 3)  # of each request, before the restart
TEXTS = {
    "greedy": "The capital of France is", "seeded": "Once upon a time 🌊 there was a",
    "schema": "A city, as JSON:\n"}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({
    "type": "object", "properties": {"city_name": {"enum": ["Paris", "Pisa"]}}, "required": ["city_name"],
    "additionalProperties": False}))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.1, "logprobs": 2},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 7, "n": 2, "logprobs": 2},
    "schema": {"temperature": 0.0, "grammar": SCHEMA, "max_tokens": 16}}


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> AloneAnswers:
    return AloneAnswers(LoadedModel(smollm2, AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), 128))


@pytest.fixture(scope="module")
def requests(smollm2: Path) -> list[EngineRequest]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return [EngineRequest(name, tokenizer(TEXTS[name])["input_ids"], SamplingParams(
        **{"max_tokens": NUM_TOKENS, "ignore_eos": True} | kind)) for name, kind in KINDS.items()]


def test_greedy_tokens_are_those_of_transformers_alone(
    expected: AloneAnswers, requests: list[EngineRequest]
) -> None:
    asked = dataclasses.replace(requests[0], request_id="plain", params=SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    drawn = expected.answer(asked).token_ids
    logits = expected.model.reference_logits([*asked.prompt_token_ids, *drawn])
    assert drawn == logits.argmax(-1)[len(asked.prompt_token_ids) - 1 : -1].tolist()


def test_batched_chunked_swapped_and_in_several_choices(
    expected: AloneAnswers, requests: list[EngineRequest]
) -> None:
    swapped, forked = (EngineRun(
        expected.model, num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=4, swap_blocks=40,
        max_awaiting_fraction=1.0) for num_blocks, budget in ((9, 10), (11, 8)))
    for run in (swapped, forked):
        expected.check(run, run.run(*requests))
        assert run.stats.num_preemptions > 0
        assert run.runner.num_unknown > 0
        assert max(run.runner.chunk_sizes) < len(requests[1].prompt_token_ids)
    assert swapped.stats.num_swapped_in_blocks > 0
    assert forked.runner.num_copies > 0


def test_cached_and_resumed_after_a_restart(expected: AloneAnswers, requests: list[EngineRequest]) -> None:
    run = EngineRun(expected.model, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8)
    run.run(dataclasses.replace(requests[1], request_id="stranger", params=SamplingParams(max_tokens=1)))
    choices = {"greedy": 0, "seeded": 1, "schema": 0}
    for asked, num_drawn in zip(requests, NUM_DRAWN, strict=True):
        choice = choices[asked.request_id]
        run.add(dataclasses.replace(
            asked, choice=choice, output_token_ids=expected.answer(asked, choice).token_ids[:num_drawn],
            params=dataclasses.replace(asked.params, n=1)))
    run.run()
    for asked, num_drawn in zip(requests, NUM_DRAWN, strict=True):
        key = asked.request_id, choices[asked.request_id]
        assert_same(run.answers[key], expected.answer(asked, key[1]).after(num_drawn), key)
    run.assert_logits_of_transformers()
    assert run.answers["seeded", 1].num_cached_tokens > 0
