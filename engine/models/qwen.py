"""Qwen2ForCausalLM: Llama with biases on Q, K and V. Qwen3ForCausalLM: an RMS norm over each query and key head."""

from __future__ import annotations

from engine.models.config_fields import ConfigFields
from engine.models.layer_windows import from_layer, read_windows
from engine.models.llama import ACTIVATIONS, pre_norm_layer
from engine.models.parts import Attention, Decoder, Mlp, Norm
from engine.models.rope_fields import read_rope


def qwen2(fields: ConfigFields) -> Decoder:
    return _qwen(fields, head_dim=None, qkv_bias=True, out_bias=False, has_head_norms=False)


def qwen3(fields: ConfigFields) -> Decoder:
    bias = fields.flag("attention_bias")
    return _qwen(fields, head_dim=128, qkv_bias=bias, out_bias=bias, has_head_norms=True)


def _qwen(fields: ConfigFields, head_dim: int | None, *, qkv_bias: bool, out_bias: bool,
          has_head_norms: bool) -> Decoder:
    sizes = fields.sizes() if head_dim is None else fields.sizes(head_dim=head_dim)
    eps, rope = fields.positive("rms_norm_eps", 1e-6), read_rope(fields)
    mlp = Mlp(fields.choice("hidden_act", ACTIVATIONS, "silu"))
    head_norms = (Norm("self_attn.q_norm", eps), Norm("self_attn.k_norm", eps)) if has_head_norms else None
    return Decoder(sizes, tuple(
        pre_norm_layer(Attention(sizes.head_dim**-0.5, rope, window, qkv_bias, out_bias, head_norms), mlp, eps)
        for window in _windows(fields, sizes.num_layers)), Norm("norm", eps), fields.flag("tie_word_embeddings"))


def _windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """`sliding_window` counts only with `use_sliding_window`, and then from layer `max_window_layers` up."""
    window = fields.optional_size("sliding_window", 4096)
    window = window if fields.flag("use_sliding_window") else None
    first = fields.value("max_window_layers")
    first = num_layers if window is None else 28 if first is None else first
    if not isinstance(first, int) or first < 0:
        fields.refuse("max_window_layers", f"must be an integer of at least 0, got {first!r}")
    return read_windows(fields, num_layers, window, from_layer(first, num_layers))
