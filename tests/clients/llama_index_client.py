"""llama-index openai-like: complete, chat and their streams, a required tool's round trip, structured prediction."""

from __future__ import annotations

from typing import Any, Literal

from client_checks import ASK, ASK_WEATHER, CITIES, is_weather, run
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=0, le=40)


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"21 degrees in {city}"


TOOL = FunctionTool.from_defaults(get_weather, fn_schema=City)


def llm(url: str, model: str, max_tokens: int = 64, **more: Any) -> OpenAILike:
    settings = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, **more}
    return OpenAILike(
        model=model, api_base=url, api_key="none", temperature=0, max_tokens=max_tokens, max_retries=0, **settings)


def chat_and_its_stream_are_the_same_text(url: str, model: str) -> None:
    messages = [ChatMessage(role="user", content=ASK)]
    whole = llm(url, model, 24).chat(messages).message.content
    assert whole
    deltas = [part.delta or "" for part in llm(url, model, 24).stream_chat(messages)]
    assert len(deltas) > 1
    assert "".join(deltas) == whole


def completions_and_their_stream_are_the_same_text(url: str, model: str) -> None:
    plain = llm(url, model, 8, is_chat_model=False, is_function_calling_model=False)
    whole = plain.complete("One two three").text
    assert whole
    assert "".join(part.delta for part in plain.stream_complete("One two three")) == whole


def a_required_tool_makes_its_round_trip(url: str, model: str) -> None:
    question = ChatMessage(role="user", content=ASK_WEATHER)
    answer = llm(url, model).chat_with_tools([TOOL], chat_history=[question], tool_required=True)
    calls = llm(url, model).get_tool_calls_from_response(answer)
    assert [call.tool_name for call in calls] == ["get_weather"]
    assert calls[0].tool_kwargs["city"] in CITIES
    result = ChatMessage(role="tool", content=str(TOOL(**calls[0].tool_kwargs)),
                         additional_kwargs={"tool_call_id": calls[0].tool_id})
    assert llm(url, model, 24).chat([question, answer.message, result]).message.content


def a_required_tool_is_streamed(url: str, model: str) -> None:
    parts = list(llm(url, model).stream_chat_with_tools([TOOL], user_msg=ASK_WEATHER, tool_required=True))
    calls = llm(url, model).get_tool_calls_from_response(parts[-1])
    assert calls[0].tool_kwargs["city"] in CITIES


def prediction_is_structured(url: str, model: str) -> None:
    for by_schema in (False, True):
        predicted = llm(url, model, should_use_structured_outputs=by_schema).structured_predict(
            Weather, PromptTemplate(ASK_WEATHER))
        assert is_weather(predicted), by_schema


run(chat_and_its_stream_are_the_same_text, completions_and_their_stream_are_the_same_text,
    a_required_tool_makes_its_round_trip, a_required_tool_is_streamed, prediction_is_structured)
