"""The parts of which a decoder-only model is described. Torch-free: plain values, no weights.

An architecture file turns the fields of a `config.json` into these; `engine.models.decoder_weights` loads what they
name and `engine.models.decoder` runs it. A new forward (another device) reads the same description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """All at least 1; `num_heads` a multiple of `num_kv_heads`, `head_dim` even."""

    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int  # positions: tokens of prompt + output


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last axis, times a weight stored as `name`.weight (or 1 + it)."""

    name: str
    eps: float
    kind: Literal["rms", "mean"] = "rms"  # "mean": the mean is taken off first (layer norm without bias)
    one_plus: bool = False


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions closer by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies closer by `factor`, fast ones kept, smooth between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp over the dimensions, and cos and sin times `attention_factor`."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_len: int
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (Su et al. 2021). `interleaved`: neighbours turn together, else the two halves of a head."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """`window`: how many positions a query sees, its own included; None = all up to its own."""

    scale: float  # of the scores, before the softmax
    rope: Rope | None  # None: this layer knows no positions
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: tuple[Norm, Norm] | None = None  # of each query head and each key head, before the rope


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate(x)) * up(x))."""

    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """x += post(attention(pre(x))); x += post(mlp(pre(x))).

    `mlp_norm` None: the block is parallel, the MLP reads what attention reads. A post norm is of a part's output.
    """

    attention: Attention
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm | None
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """logits = softcap(logit_scale * head(norm(layers(embedding_scale * embedding))))."""

    sizes: Sizes
    layers: tuple[Layer, ...]
    norm: Norm
    is_tied: bool  # the head is the embedding
    prefix: str = ""  # of every tensor's name
    unused: tuple[str, ...] = ()  # beginnings of names of stored tensors that belong to no part
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # cap * tanh(logits / cap)
