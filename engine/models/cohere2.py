"""Cohere2ForCausalLM: attention and MLP in parallel behind one mean-free norm; global layers know no positions."""

from __future__ import annotations

from engine.models.config_fields import ConfigFields
from engine.models.layer_windows import every_nth_full, read_windows
from engine.models.llama import ACTIVATIONS
from engine.models.parts import Attention, Decoder, Layer, Mlp, Norm
from engine.models.rope_fields import read_rope


def cohere2(fields: ConfigFields) -> Decoder:
    sizes, eps = fields.sizes(), fields.positive("layer_norm_eps", 1e-5)
    for name, value in _ALWAYS.items():
        fields.only(name, value)
    windows = read_windows(fields, sizes.num_layers, fields.optional_size("sliding_window", 4096),
                           every_nth_full(fields.size("sliding_window_pattern", 4), sizes.num_layers))
    rope, bias = read_rope(fields, interleaved=True), fields.flag("attention_bias")
    mlp = Mlp(fields.choice("hidden_act", ACTIVATIONS, "silu"))
    layers = tuple(
        Layer(Attention(sizes.head_dim**-0.5, rope if window else None, window, bias, bias), mlp,
              attention_norm=Norm("input_layernorm", eps, "mean"), mlp_norm=None) for window in windows)
    return Decoder(
        sizes, layers, Norm("norm", eps, "mean"), fields.flag("tie_word_embeddings", True),
        logit_scale=fields.positive("logit_scale", 0.0625))


# What published files say beside what transformers reads, with the only values that mean this block.
_ALWAYS: dict[str, object] = {
    "use_parallel_block": True, "use_gated_activation": True, "use_embedding_sharing": True, "rotary_pct": 1.0,
    "use_parallel_embedding": False, "use_qk_norm": False, "position_embedding_type": "rope_gptj", "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first"}
