"""Bodies and parameters drawn from our own OpenAPI document: no fault of ours, and no answer that it does not declare.

Half of the bodies are drawn to fit the document and half not to. Of what fits, most get what no drawing hits: the name
of the model, an input, and but a few fields: of many drawn at once some ask for too much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.answer_schemas import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from tests.http_gateway import events
from tests.stack import RunningStack

WEATHER = {"type": "object", "additionalProperties": False, "required": ["city"],
           "properties": {"city": {"enum": ["Paris", "Rome"]}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
OF_BOTH: tuple[dict[str, Any], ...] = (
    {"n": 2, "return_token_ids": True}, {"stop": ["e", " "]}, {"ignore_eos": True, "seed": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}, "max_tokens": 40})
OF_CHAT = (*OF_BOTH, {"logprobs": True, "top_logprobs": 2}, {"tools": [TOOL], "tool_choice": "required", "n": 2})
OF_COMPLETIONS = (*OF_BOTH, {"logprobs": 2, "echo": True}, {"prompt": ["A b", "C d"], "n": 2}, {"logprobs": 0})
INPUTS = {"messages", "prompt", "tokens", "max_tokens", "max_completion_tokens"}
INPUT_OF: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]}, "/v1/completions": {"prompt": "hi"}}
OPTIONS = ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True})
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("stack"), runner="mock-hash", mixed=1, kvstore=0) as running:
        yield running


def explore(stack: RunningStack, max_examples: int) -> dict[str, Counter[int]]:
    """How often each status came, by operation, of so many examples."""
    document = httpx2.get(f"{stack.url}/openapi.json").raise_for_status().json()
    schema = schemathesis.openapi.from_dict(document)
    seen: dict[str, Counter[int]] = {}
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            seen[operation.label] = call_all(operation, stack, session, max_examples)
    return seen


def call_all(operation: Any, stack: RunningStack, session: requests.Session, max_examples: int) -> Counter[int]:
    statuses: Counter[int] = Counter()

    def check(case: Case) -> None:
        answer = case.call(base_url=stack.url, session=session, timeout=60)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    modes = [GenerationMode.POSITIVE]
    if "requestBody" in operation.definition.raw:  # in a path or a query every text is a text
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:
        cases = operation.as_strategy(generation_mode=mode)
        if mode is GenerationMode.POSITIVE:
            cases = st.builds(aimed, cases, st.sampled_from((stack.model, stack.model, stack.model, None)),
                              st.sets(st.integers(0, 60), max_size=4), st.booleans())
        cases = cases.map(with_an_end)
        run = settings(
            max_examples=max_examples // len(modes), deadline=None, database=None, derandomize=True,
            phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
        run(given(cases)(check))()
    return statuses


def with_an_end(case: Case) -> Case:
    """Few tokens of output, where any are asked for: of n choices without a limit each may fill the context."""
    if case.operation.path in INPUT_OF and isinstance(case.body, dict):
        case.body.setdefault("max_tokens", 8)
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 8)
    return case


def aimed(case: Case, model: str | None, kept: set[int], has_input: bool) -> Case:
    """The case as drawn, or for a model that is there and with few of its fields, by their number."""
    if model is not None and isinstance(case.body, dict):
        case.body = {name: value for number, (name, value) in enumerate(sorted(case.body.items()))
                     if number in kept or name in INPUTS}
        case.body["model"] = model
        if has_input:
            case.body |= INPUT_OF.get(case.operation.path, {})
    if model is not None and "model_id" in (case.path_parameters or {}):
        case.path_parameters["model_id"] = model
    if model is not None and "model" in (case.query or {}):
        case.query["model"] = model
    return case


@pytest.mark.parametrize(("path", "prompt", "asked", "whole", "chunk"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, OF_CHAT, ChatCompletion,
     ChatCompletionChunk),
    ("/v1/completions", {"prompt": "One two"}, OF_COMPLETIONS, Completion, CompletionChunk)])
def test_answers_have_no_field_that_is_not_documented(
    stack: RunningStack, path: str, prompt: dict[str, Any], asked: tuple[dict[str, Any], ...], whole: type[BaseModel],
    chunk: type[BaseModel],
) -> None:
    def post(**changes: Any) -> httpx2.Response:
        return httpx2.post(stack.url + path, json={"max_tokens": 8, **prompt, **changes}, timeout=60).raise_for_status()

    for changes in (*asked, {"prompt_logprobs": 1}):
        whole.model_validate(post(**changes).json(), strict=True, extra="forbid")
    for changes in asked:
        for options in OPTIONS:
            chunks = events(post(**changes, stream=True, stream_options=options).text)
            assert chunks[-1] == "[DONE]", changes
            for body in chunks[:-1]:
                chunk.model_validate(body, strict=True, extra="forbid")


def test_a_few_drawn_requests_of_each_operation_are_answered_as_declared(stack: RunningStack) -> None:
    seen = explore(stack, 10)
    assert len(seen) >= 16


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_hundred_drawn_requests_of_each_operation_are_answered_as_declared(stack: RunningStack) -> None:
    for operation, statuses in explore(stack, 100).items():
        assert 200 in statuses, operation
        assert statuses.total() >= 100 or not operation.startswith("POST"), operation  # a GET has less to vary
