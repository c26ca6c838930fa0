"""Bodies of the API as clients send them, and what becomes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.generation import ModelFacts
from gateway.chat_request import ChatRequest
from gateway.completion_request import CompletionRequest
from gateway.order import Order
from gateway.output_parsers import Formats
from gateway.request_body import parse

FACTS = ModelFacts("m", 512, 0)
FORMATS = Formats(tool_parser="hermes", reasoning_parser="deepseek_r1")
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**changes: Any) -> Order:
    """The order of a chat; a field that is `...` is left out."""
    body = {name: value for name, value in {**HI, **changes}.items() if value is not ...}
    (order,) = parse(ChatRequest, json.dumps(body).encode()).orders(FACTS, FORMATS)
    return order


def completions(**changes: Any) -> list[Order]:
    body = {name: value for name, value in {"prompt": "A B", **changes}.items() if value is not ...}
    return parse(CompletionRequest, json.dumps(body).encode()).orders(FACTS)


def complete(**changes: Any) -> Order:
    (order,) = completions(**changes)
    return order


def refused(call: Any, **changes: Any) -> InvalidRequest:
    """The refusal of a body by `chat`, `complete` or `completions`; it always names a field."""
    with pytest.raises(InvalidRequest) as refusal:
        call(**changes)
    assert refusal.value.param is not None
    assert refusal.value.message.startswith(refusal.value.param.split(".")[0]), refusal.value.message
    return refusal.value


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}
