"""LlamaForCausalLM: pre-norm, rotary positions, gated SiLU MLP. Also the plain block that others vary."""

from __future__ import annotations

from engine.models.config_fields import ConfigFields
from engine.models.parts import Activation, Attention, Decoder, Layer, Mlp, Norm
from engine.models.rope_fields import read_rope

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def llama(fields: ConfigFields) -> Decoder:
    sizes = fields.sizes()
    fields.only("pretraining_tp", 1)
    bias = fields.flag("attention_bias")
    layer = pre_norm_layer(
        Attention(scale=sizes.head_dim**-0.5, rope=read_rope(fields), qkv_bias=bias, out_bias=bias),
        Mlp(fields.choice("hidden_act", ACTIVATIONS, "silu"), bias=fields.flag("mlp_bias")),
        eps := fields.positive("rms_norm_eps", 1e-6))
    return Decoder(sizes, (layer,) * sizes.num_layers, Norm("norm", eps), fields.flag("tie_word_embeddings"))


def pre_norm_layer(attention: Attention, mlp: Mlp, eps: float) -> Layer:
    """Both parts behind an RMS norm of their own."""
    return Layer(attention, mlp, Norm("input_layernorm", eps), Norm("post_attention_layernorm", eps))
