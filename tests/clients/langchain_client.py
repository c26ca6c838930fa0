"""langchain-openai: invoke and stream, bound tools, structured output by schema and by a forced tool."""

from __future__ import annotations

from typing import Literal

from client_checks import ASK, ASK_WEATHER, CITIES, is_weather, run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=40)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"21 degrees in {city}"


def chat(url: str, model: str, max_tokens: int = 64) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=max_tokens, max_retries=0)


def invoked_and_streamed_are_the_same_text(url: str, model: str) -> None:
    whole = chat(url, model, 24).invoke(ASK)
    assert whole.content
    assert whole.usage_metadata["total_tokens"] > 0
    assert "".join(chunk.content for chunk in chat(url, model, 24).stream(ASK)) == whole.content


def completions_continue_a_prompt(url: str, model: str) -> None:
    assert OpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=8).invoke("One two three")


def a_bound_tool_makes_its_round_trip(url: str, model: str) -> None:
    for choice in ("any", "get_weather"):
        bound = chat(url, model).bind_tools([get_weather], tool_choice=choice)
        message = bound.invoke(ASK_WEATHER)
        call = message.tool_calls[0]
        assert call["name"] == "get_weather"
        assert call["args"]["city"] in CITIES
        result = get_weather.invoke(call)
        after = chat(url, model, 24).bind_tools([get_weather], tool_choice="none")
        assert after.invoke([HumanMessage(ASK_WEATHER), message, result]).content


def a_bound_tool_is_streamed(url: str, model: str) -> None:
    bound = chat(url, model).bind_tools([get_weather], tool_choice="any")
    chunks = list(bound.stream(ASK_WEATHER))
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    assert message.tool_calls[0]["args"]["city"] in CITIES


def output_is_structured(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        assert is_weather(chat(url, model).with_structured_output(Weather, method=method).invoke(ASK_WEATHER)), method


run(invoked_and_streamed_are_the_same_text, completions_continue_a_prompt, a_bound_tool_makes_its_round_trip,
    a_bound_tool_is_streamed, output_is_structured)
