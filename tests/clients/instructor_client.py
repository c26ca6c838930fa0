"""instructor: typed answers by a forced tool and by JSON schema; streamed as growing parts."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from client_checks import ASK_WEATHER, CITIES, is_weather, run
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=40)


class GetWeather(BaseModel):
    """Ask for the weather of a city."""

    city: Literal["Paris", "Rome"]


def client(url: str, mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120), mode=mode)


def ask(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": ASK_WEATHER}], "temperature": 0, "max_tokens": 64,
            "max_retries": 0}


def answers_are_typed_by_a_forced_tool(url: str, model: str) -> None:
    assert is_weather(client(url, Mode.TOOLS).chat.completions.create(response_model=Weather, **ask(model)))


def answers_are_typed_by_json_schema(url: str, model: str) -> None:
    assert is_weather(client(url, Mode.JSON_SCHEMA).chat.completions.create(response_model=Weather, **ask(model)))


def growing_parts_end_in_the_whole(url: str, model: str) -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        parts = list(client(url, mode).chat.completions.create_partial(response_model=Weather, **ask(model)))
        assert len(parts) > 1, mode
        assert is_weather(parts[-1]), mode


def a_tools_result_goes_back(url: str, model: str) -> None:
    wanted, completion = client(url, Mode.TOOLS).chat.completions.create_with_completion(
        response_model=GetWeather, **ask(model))
    assert wanted.city in CITIES
    message = completion.choices[0].message.model_dump()
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21 degrees"}
    more = ask(model)
    more["messages"] += [message, result]
    assert is_weather(client(url, Mode.TOOLS).chat.completions.create(response_model=Weather, **more))


run(answers_are_typed_by_a_forced_tool, answers_are_typed_by_json_schema, growing_parts_end_in_the_whole,
    a_tools_result_goes_back)
