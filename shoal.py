"""The engine as a Python library: `from shoal import LLM, SamplingParams`."""

from __future__ import annotations

from typing import Any

from common.errors import ShoalError
from engine.offline import llm
from engine.offline.asked_sampling import SamplingParams, StructuredOutputsParams
from engine.offline.request_output import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "ShoalError", "StructuredOutputsParams",
]


class LLM(llm.LLM):
    """As `engine.offline.llm.LLM`; the known small model may be named, and is fetched when it is missing."""

    def __init__(self, model: str = "SmolLM2-135M-Instruct", **options: Any) -> None:
        from stack.model_progress import ensure_model

        super().__init__(str(ensure_model(model)), **options)
