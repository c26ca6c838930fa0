"""openai-agents in chat mode: its runner whole and streamed, a tool's round trip, a typed output."""

from __future__ import annotations

from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from client_checks import ASK, ASK_WEATHER, CITIES, is_weather, run
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=40)


def agent(url: str, model: str, *, max_tokens: int = 24, tool_choice: str | None = None, **more: Any) -> Agent:
    chat = OpenAIChatCompletionsModel(
        model=model, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120))
    settings = ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=tool_choice)
    return Agent(name="helper", instructions="Answer in one sentence.", model=chat, model_settings=settings, **more)


async def a_run_ends_in_text(url: str, model: str) -> None:
    result = await Runner.run(agent(url, model), ASK)
    assert result.final_output
    assert result.context_wrapper.usage.total_tokens > 0


async def a_streamed_run_gives_its_text_in_deltas(url: str, model: str) -> None:
    result = Runner.run_streamed(agent(url, model), ASK)
    deltas = [event.data.delta async for event in result.stream_events()
              if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == result.final_output


async def a_required_tool_makes_its_round_trip(url: str, model: str) -> None:
    await tool_round_trip(url, model, streamed=False)


async def a_required_tool_makes_its_round_trip_streamed(url: str, model: str) -> None:
    await tool_round_trip(url, model, streamed=True)


async def tool_round_trip(url: str, model: str, *, streamed: bool) -> None:
    called: list[str] = []

    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "21 degrees"

    helper = agent(url, model, tools=[get_weather], tool_choice="required", max_tokens=64)
    if streamed:
        result = Runner.run_streamed(helper, ASK_WEATHER, max_turns=3)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(helper, ASK_WEATHER, max_turns=3)
    assert called
    assert set(called) <= set(CITIES)
    assert result.final_output


async def an_output_is_typed(url: str, model: str) -> None:
    result = await Runner.run(agent(url, model, output_type=Weather, max_tokens=64), ASK_WEATHER)
    assert is_weather(result.final_output)


run(a_run_ends_in_text, a_streamed_run_gives_its_text_in_deltas, a_required_tool_makes_its_round_trip,
    a_required_tool_makes_its_round_trip_streamed, an_output_is_typed)
