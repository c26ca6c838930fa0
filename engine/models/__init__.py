"""The architectures that the engine can run. One more is a file that declares its parts, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from engine.models.cohere2 import cohere2
from engine.models.config_fields import ConfigFields
from engine.models.gemma3 import gemma3, gemma3_with_images
from engine.models.llama import llama
from engine.models.mistral import mistral
from engine.models.parts import Decoder
from engine.models.qwen import qwen2, qwen3

ARCHITECTURES: dict[str, Callable[[ConfigFields], Decoder]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_with_images,
    "Cohere2ForCausalLM": cohere2,
}
