"""pydantic-ai: runs whole and streamed, a tool's round trip, typed output by its tool and by JSON schema."""

from __future__ import annotations

from typing import Any, Literal

from client_checks import ASK, ASK_WEATHER, CITIES, is_weather, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=40)


def agent(url: str, model: str, *, max_tokens: int = 64, **more: Any) -> Agent:
    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(chat, model_settings={"temperature": 0, "max_tokens": max_tokens}, **more)


async def a_run_ends_in_text(url: str, model: str) -> None:
    result = await agent(url, model, max_tokens=24).run(ASK)
    assert result.output


async def a_streamed_run_gives_the_same_text(url: str, model: str) -> None:
    whole = await agent(url, model, max_tokens=24).run(ASK)
    async with agent(url, model, max_tokens=24).run_stream(ASK) as result:
        deltas = [delta async for delta in result.stream_text(delta=True, debounce_by=None)]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output
    assert result.usage.output_tokens > 0


async def output_is_typed_by_a_required_tool(url: str, model: str) -> None:
    assert is_weather((await agent(url, model, output_type=ToolOutput(Weather)).run(ASK_WEATHER)).output)


async def output_is_typed_by_json_schema(url: str, model: str) -> None:
    assert is_weather((await agent(url, model, output_type=NativeOutput(Weather)).run(ASK_WEATHER)).output)


async def typed_output_is_streamed(url: str, model: str) -> None:
    async with agent(url, model, output_type=ToolOutput(Weather)).run_stream(ASK_WEATHER) as result:
        assert is_weather(await result.get_output())


async def a_tool_makes_its_round_trip(url: str, model: str) -> None:
    called: list[str] = []
    helper = agent(url, model, output_type=ToolOutput(Weather))

    @helper.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "21 degrees"

    result = await helper.run(ASK_WEATHER)
    assert set(called) <= set(CITIES)
    assert is_weather(result.output)


run(a_run_ends_in_text, a_streamed_run_gives_the_same_text, output_is_typed_by_a_required_tool,
    output_is_typed_by_json_schema, typed_output_is_streamed, a_tool_makes_its_round_trip)
