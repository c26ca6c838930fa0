"""MistralForCausalLM: Llama whose every layer sees a sliding window, if there is one."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config_fields import ConfigFields
from engine.models.llama import llama
from engine.models.parts import Decoder

_WINDOW = 4096  # where config.json does not say; null means none


def mistral(fields: ConfigFields) -> Decoder:
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    plain = llama(fields)
    window = fields.optional_size("sliding_window", _WINDOW)
    return replace(plain, layers=tuple(
        replace(layer, attention=replace(layer.attention, window=window)) for layer in plain.layers))
