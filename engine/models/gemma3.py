"""Gemma3ForCausalLM: norms times 1 + weight before and after both parts, local layers with a rope of their own.

Gemma3ForConditionalGeneration is the same under `text_config`; its vision tower is left alone, for text only.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.config_fields import ConfigFields
from engine.models.layer_windows import every_nth_full, read_windows
from engine.models.llama import ACTIVATIONS
from engine.models.parts import Attention, Decoder, Layer, Mlp, Norm, Rope
from engine.models.rope_fields import rope_of, rope_section

_SIZES = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
          "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
          "max_position_embeddings": 131_072}
_OF_IMAGES = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def gemma3(fields: ConfigFields) -> Decoder:
    sizes, eps = fields.sizes(**_SIZES), fields.positive("rms_norm_eps", 1e-6)
    fields.only("attn_logit_softcapping", None)
    fields.only("use_bidirectional_attention", False)
    pattern = fields.size("sliding_window_pattern", fields.size("_sliding_window_pattern", 6))
    windows = read_windows(fields, sizes.num_layers, fields.optional_size("sliding_window", 4096),
                           every_nth_full(pattern, sizes.num_layers))
    global_rope, local_rope = _ropes(fields)
    bias, scale = fields.flag("attention_bias"), fields.positive("query_pre_attn_scalar", 256) ** -0.5
    mlp = Mlp(fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"))
    fields.value("hidden_act")  # of older files, where hidden_activation is what counts

    def norm(name: str) -> Norm:
        return Norm(name, eps, one_plus=True)

    def layer(window: int | None) -> Layer:
        rope = global_rope if window is None else local_rope
        head_norms = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        return Layer(
            Attention(scale, rope, window, bias, bias, head_norms), mlp,
            attention_norm=norm("input_layernorm"), attention_post_norm=norm("post_attention_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"), mlp_post_norm=norm("post_feedforward_layernorm"))

    return Decoder(
        sizes, tuple(map(layer, windows)), norm("norm"), fields.flag("tie_word_embeddings", True),
        embedding_scale=sizes.hidden**0.5, logit_softcap=fields.optional_positive("final_logit_softcapping"))


def gemma3_with_images(fields: ConfigFields) -> Decoder:
    text = fields.section("text_config")
    if text is None:
        fields.refuse("text_config", "is missing")
    for name in _OF_IMAGES:
        fields.value(name)
    decoder = gemma3(text)
    text.refuse_unread()
    return replace(decoder, is_tied=fields.flag("tie_word_embeddings", decoder.is_tied), prefix="language_model.",
                   unused=("vision_tower.", "multi_modal_projector."))


def _ropes(fields: ConfigFields) -> tuple[Rope, Rope]:
    """(of the global layers, of the local ones): named by layer type in newer files, two bases in older ones."""
    global_theta = fields.positive("rope_theta", 1_000_000.0)
    local_theta = fields.positive("rope_local_base_freq", 10_000.0)
    section = rope_section(fields)
    if section is None or not ("full_attention" in section or "sliding_attention" in section):
        return rope_of(section, fields, global_theta), Rope(local_theta)
    ropes = (rope_of(section.section("full_attention"), fields, global_theta),
             rope_of(section.section("sliding_attention"), fields, local_theta))
    section.refuse_unread()
    return ropes
