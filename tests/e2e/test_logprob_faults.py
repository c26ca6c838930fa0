"""Faults of logprobs that other servers shipped, tried over HTTP on a computed model."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.api import Api, api_of, refusal
from tests.factories import tiny_llama
from tests.http_gateway import events
from tests.stack import RunningStack

NUM_TOKENS = 12
MOST = 20  # alternatives of one token
PROMPT = "The lantern by the river was green 🙂"


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    model = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", seed=3, tokenizer_from=smollm2)
    with RunningStack(tmp_path_factory.mktemp("stack"), model=model, runner="torch", kvstore=0, router=0,
                      kv_cache_bytes=32 << 20) as running:
        yield running


@pytest.fixture
async def api(stack: RunningStack) -> AsyncIterator[Api]:
    async with api_of(stack) as opened:
        yield opened
    for name in ("gateway-0", "tokenizer-0", "mixed-0"):
        assert "Traceback" not in stack.log(name)


def strict(answer: httpx2.Response) -> Any:
    """A body of JSON proper: no NaN and no Infinity."""
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=refuse)


def assert_scores(scores: list[float]) -> None:
    assert all(math.isfinite(score) and score <= 0 for score in scores), scores


def assert_entries(entries: list[dict[str, Any]], num_alternatives: int) -> None:
    """Of a chat: as many entries as tokens, each with as many alternatives as were asked for, likeliest first."""
    assert len(entries) == NUM_TOKENS
    for entry in entries:
        assert entry.keys() >= {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == num_alternatives
        scores = [top["logprob"] for top in entry["top_logprobs"]]
        assert scores == sorted(scores, reverse=True)
        assert_scores([entry["logprob"], *scores])
        assert bytes(entry["bytes"] or b"").decode("utf-8", "replace") == entry["token"] or entry["bytes"] is None
        if scores:  # greedy
            assert entry["logprob"] == pytest.approx(scores[0])


@pytest.mark.parametrize("sent", [{}, {"top_logprobs": None}, {"top_logprobs": 0}, {"top_logprobs": 5},
                                  {"top_logprobs": MOST}], ids=str)
async def test_logprobs_of_a_chat_have_as_many_alternatives_as_were_asked_for(api: Api, sent: dict[str, Any]) -> None:
    """B10"""
    asked = {"logprobs": True, "max_tokens": NUM_TOKENS, "ignore_eos": True, **sent}
    whole = strict(await api.chat(**asked))
    assert whole["usage"]["completion_tokens"] == NUM_TOKENS
    entries = whole["choices"][0]["logprobs"]["content"]
    assert_entries(entries, sent.get("top_logprobs") or 0)
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace")
    assert text == whole["choices"][0]["message"]["content"]
    *chunks, done = events((await api.chat(**asked, stream=True)).text)
    assert done == "[DONE]"
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0].get("logprobs") or {}).get("content", ())]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    assert_entries(streamed, sent.get("top_logprobs") or 0)


async def test_too_many_alternatives_or_some_without_logprobs_are_refused_with_the_limit(api: Api) -> None:
    """B10"""
    async with api.unharmed():
        for stream in (False, True):
            for wrong in (MOST + 1, -1, 1.5, True, "5"):
                message = refusal(await api.chat(logprobs=True, top_logprobs=wrong, stream=stream), [400],
                                  param="top_logprobs")
                assert wrong != MOST + 1 or str(MOST) in message
            for without in ({"logprobs": False}, {"logprobs": None}, {}):
                refusal(await api.chat(**without, top_logprobs=5, stream=stream), [400], param="top_logprobs")
            refusal(await api.chat(logprobs=5, stream=stream), [400], param="logprobs")
            for wrong in (MOST + 1, -1, 1.5, "5"):
                message = refusal(await api.complete("a", logprobs=wrong, stream=stream), [400], param="logprobs")
                assert wrong != MOST + 1 or str(MOST) in message


@pytest.mark.parametrize("num_alternatives", [0, 1, 5, MOST])
@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_logprobs_of_a_completion_have_at_most_one_alternative_more_than_asked(
    api: Api, num_alternatives: int, temperature: float
) -> None:
    """B10"""
    asked = {"logprobs": num_alternatives, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": temperature,
             "seed": 3, "return_tokens_as_token_ids": True}
    whole = strict(await api.complete(PROMPT, **asked))
    found = whole["choices"][0]["logprobs"]
    assert {len(found[name]) for name in ("tokens", "token_logprobs", "text_offset")} == {NUM_TOKENS}
    assert_scores(found["token_logprobs"])
    for token, score, tops in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"] or [{}] * NUM_TOKENS, strict=True
    ):
        assert num_alternatives <= len(tops) <= num_alternatives + 1
        assert_scores(list(tops.values()))
        assert not tops or tops[token] == pytest.approx(score)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in events((await api.complete(
        PROMPT, **asked, stream=True)).text)[:-1] if chunk["choices"][0].get("logprobs")]
    assert [score for part in streamed for score in part["token_logprobs"]] == pytest.approx(found["token_logprobs"])
    assert [token for part in streamed for token in part["tokens"]] == found["tokens"]


async def test_a_bias_of_minus_a_hundred_or_few_allowed_tokens_leave_no_infinity_in_the_answer(api: Api) -> None:
    """B10"""
    for sampling in ({"allowed_token_ids": [300, 301]}, {"logit_bias": {str(i): -100 for i in range(300, 400)}},
                     {"top_k": 1, "temperature": 1}, {"structured_outputs": {"regex": "[ab]{12}"}}):
        body = strict(await api.complete(PROMPT, logprobs=5, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling))
        found = body["choices"][0]["logprobs"]
        assert len(found["tokens"]) == body["usage"]["completion_tokens"]
        assert_scores([*found["token_logprobs"], *(score for tops in found["top_logprobs"] for score in tops.values())])


@pytest.mark.parametrize("prompt", ["A B C", PROMPT, [1000, 2000, 3000], [7]])
async def test_no_output_with_an_echo_is_the_prompt_with_a_logprob_for_each_of_its_tokens(
    api: Api, prompt: Any
) -> None:
    """B03"""
    num_tokens = len(prompt) if isinstance(prompt, list) else len(await api.tokens(prompt=prompt))
    async with api.unharmed():
        for asked in ({"logprobs": 1}, {"logprobs": 0}, {"logprobs": 5, "n": 2}):
            body = strict(await api.complete(prompt, max_tokens=0, echo=True, **asked))
            assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (num_tokens, 0)
            assert len(body["choices"]) == asked.get("n", 1)
            for choice in body["choices"]:
                assert not isinstance(prompt, str) or choice["text"] == prompt
                found = choice["logprobs"]
                assert len(found["tokens"]) == len(found["token_logprobs"]) == num_tokens
                assert found["token_logprobs"][0] is None
                assert_scores(found["token_logprobs"][1:])


async def test_a_prompt_is_scored_alike_with_and_without_output_and_as_it_was_when_it_was_drawn(api: Api) -> None:
    """B03"""
    drawn = strict(await api.complete(
        PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, return_token_ids=True))
    prompt_ids, ids = await api.tokens(prompt=PROMPT), drawn["choices"][0]["token_ids"]
    scored = [strict(await api.complete(prompt_ids + ids, max_tokens=m, echo=True, logprobs=1)) for m in (0, 1)]
    without, with_one = (body["choices"][0]["logprobs"]["token_logprobs"] for body in scored)
    num_tokens = len(prompt_ids) + NUM_TOKENS
    assert (len(without), len(with_one)) == (num_tokens, num_tokens + 1)
    assert without[1:] == pytest.approx(with_one[1:num_tokens], abs=1e-4)
    assert without[len(prompt_ids):] == pytest.approx(drawn["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3)
