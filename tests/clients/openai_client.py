"""openai: plain and async, whole and streamed, its stream helpers, parsed answers, a tool's round trip."""

from __future__ import annotations

import json
from typing import Any, Literal

from client_checks import ASK, ASK_WEATHER, CITIES, is_weather, run
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=40)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def chat(model: str, ask: str = ASK, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": ask}], "temperature": 0, "max_tokens": 24, **more}


def models_are_listed(url: str, model: str) -> None:
    assert model in [m.id for m in client(url).models.list()]
    assert client(url).models.retrieve(model).id == model


def whole_and_streamed_are_the_same_text(url: str, model: str) -> None:
    whole = client(url).chat.completions.create(**chat(model))
    text, usage = whole.choices[0].message.content, whole.usage
    assert text
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = list(client(url).chat.completions.create(
        **chat(model, stream=True, stream_options={"include_usage": True})))
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens


async def the_async_client_gets_the_same(url: str, model: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as asynchronous:
        whole = await asynchronous.chat.completions.create(**chat(model))
        stream = await asynchronous.chat.completions.create(**chat(model, stream=True))
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


def several_choices_with_logprobs(url: str, model: str) -> None:
    answer = client(url).chat.completions.create(
        **chat(model, n=2, logprobs=True, top_logprobs=2, max_tokens=4, temperature=1, seed=7))
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 2


def completions_echo_their_prompts_in_order(url: str, model: str) -> None:
    answer = client(url).completions.create(
        model=model, prompt=["One two", "Red green"], n=2, max_tokens=2, echo=True, logprobs=1, temperature=0)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text.split()[0] for c in answer.choices] == ["One", "One", "Red", "Red"]
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert "".join(choice.logprobs.tokens) == choice.text


def an_answer_is_parsed(url: str, model: str) -> None:
    answer = client(url).chat.completions.parse(**chat(model, ASK_WEATHER, response_format=Weather, max_tokens=64))
    assert is_weather(answer.choices[0].message.parsed)


def a_streamed_answer_is_parsed(url: str, model: str) -> None:
    with client(url).chat.completions.stream(
            **chat(model, ASK_WEATHER, response_format=Weather, max_tokens=64)) as stream:
        kinds = {event.type for event in stream}
        assert is_weather(stream.get_final_completion().choices[0].message.parsed)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def json_mode_gives_an_object(url: str, model: str) -> None:
    answer = client(url).chat.completions.create(
        **chat(model, f"{ASK} Answer as JSON.", response_format={"type": "json_object"}, max_tokens=64))
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def a_required_tool_makes_its_round_trip(url: str, model: str) -> None:
    ask = chat(model, ASK_WEATHER, tools=[pydantic_function_tool(GetWeather)], max_tokens=64)
    answer = client(url).chat.completions.create(**ask, tool_choice="required")
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in message.tool_calls] == ["GetWeather"]
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in CITIES
    ask["messages"] += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}]
    assert client(url).chat.completions.create(**ask, tool_choice="none").choices[0].message.content


def a_named_tool_is_streamed(url: str, model: str) -> None:
    with client(url).chat.completions.stream(**chat(
            model, ASK_WEATHER, tools=[pydantic_function_tool(GetWeather)], max_tokens=64,
            tool_choice={"type": "function", "function": {"name": "GetWeather"}})) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert message.tool_calls[0].function.parsed_arguments.city in CITIES


def refusals_are_typed_errors(url: str, model: str) -> None:
    for changes, kind, param in (({"model": "nope"}, NotFoundError, "model"),
                                 ({"temperature": 3}, BadRequestError, "temperature")):
        error = refused(url, {**chat(model), **changes})
        assert isinstance(error, kind), error
        assert error.param == param
        assert error.request_id


def refused(url: str, body: dict[str, Any]) -> APIStatusError:
    try:
        client(url).chat.completions.create(**body)
    except APIStatusError as error:
        return error
    raise AssertionError(f"{body} was not refused")


run(models_are_listed, whole_and_streamed_are_the_same_text, the_async_client_gets_the_same,
    several_choices_with_logprobs, completions_echo_their_prompts_in_order, an_answer_is_parsed,
    a_streamed_answer_is_parsed, json_mode_gives_an_object, a_required_tool_makes_its_round_trip,
    a_named_tool_is_streamed, refusals_are_typed_errors)
