"""Loads the tensors that a `Decoder` names, in the shapes that a forward pass wants.

Matrices are held as [in, out], so that one token is `x @ w` streaming `w` row by row: on a CPU almost twice as fast
as the stored [out, in] at batch 1, on a GPU a few percent up to batch 32 and level above. Q, K and V are one matrix,
gate and up are one. Biases are None where there are none. Interleaved rotary positions become
half-and-half ones here: the rows of Q and K change places, and scores are the same for any order of a head's
dimensions that Q and K share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.models.parts import Attention, Decoder, Layer, Norm, Sizes
from engine.weights import WeightFolder

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [hidden, (num_heads + 2 * num_kv_heads) * head_dim], in the order Q, K, V
    qkv_bias: torch.Tensor | None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    head_norms: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim], a row for each query and key head
    attention_out: torch.Tensor  # [num_heads * head_dim, hidden]
    attention_out_bias: torch.Tensor | None  # [hidden]
    attention_post_norm: torch.Tensor | None  # [hidden]
    mlp_norm: torch.Tensor | None  # [hidden]; None in a parallel block
    gate_up: torch.Tensor  # [hidden, 2 * intermediate], in the order gate, up
    gate_up_bias: torch.Tensor | None  # [2 * intermediate]
    down: torch.Tensor  # [intermediate, hidden]
    down_bias: torch.Tensor | None  # [hidden]
    mlp_post_norm: torch.Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [vocab, hidden]; a view of `head` where they are tied
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [hidden, vocab]


def load_decoder(
    decoder: Decoder, weights: WeightFolder, dtype: torch.dtype, device: torch.device = _CPU
) -> DecoderWeights:
    """Takes every tensor from `weights` once, straight to `device`.

    One that is missing, misshapen or left over is a `ModelLoadError`.
    """
    sizes = decoder.sizes
    take = _Taker(weights, dtype, sizes, device)
    model = f"{decoder.prefix}model."
    embed_tokens = f"{model}embed_tokens"
    layers = tuple(take.layer(f"{model}layers.{index}.", layer) for index, layer in enumerate(decoder.layers))
    norm = take.norm(model, decoder.norm, sizes.hidden)
    if decoder.is_tied:
        head = take.matrix(sizes.hidden, [(embed_tokens, sizes.vocab)])
        embedding = head.t()
    else:
        head = take.matrix(sizes.hidden, [(f"{decoder.prefix}lm_head", sizes.vocab)])
        embedding = take.vectors(embed_tokens, (sizes.vocab, sizes.hidden))
    weights.refuse_untaken(
        decoder.unused, ("rotary_emb.inv_freq", *(("lm_head.weight",) if decoder.is_tied else ())))
    return DecoderWeights(embedding, layers, norm, head)


class _Taker:
    def __init__(self, weights: WeightFolder, dtype: torch.dtype, sizes: Sizes, device: torch.device) -> None:
        self._weights = weights
        self._dtype, self._device = dtype, device
        self._sizes = sizes

    def layer(self, prefix: str, layer: Layer) -> LayerWeights:
        sizes, hidden = self._sizes, self._sizes.hidden
        q_size = sizes.num_heads * sizes.head_dim
        attention, mlp = layer.attention, layer.mlp
        qkv, qkv_bias = self._qkv(prefix, attention)
        out, down = (f"{prefix}self_attn.o_proj", hidden), (f"{prefix}mlp.down_proj", hidden)
        gate_up = [(f"{prefix}mlp.{name}_proj", sizes.intermediate) for name in ("gate", "up")]
        return LayerWeights(
            attention_norm=self.norm(prefix, layer.attention_norm, hidden),
            qkv=qkv, qkv_bias=qkv_bias, head_norms=self._head_norms(prefix, attention),
            attention_out=self.matrix(q_size, [out]),
            attention_out_bias=self._bias([out]) if attention.out_bias else None,
            attention_post_norm=self._optional_norm(prefix, layer.attention_post_norm),
            mlp_norm=self._optional_norm(prefix, layer.mlp_norm),
            gate_up=self.matrix(hidden, gate_up), gate_up_bias=self._bias(gate_up) if mlp.bias else None,
            down=self.matrix(sizes.intermediate, [down]), down_bias=self._bias([down]) if mlp.bias else None,
            mlp_post_norm=self._optional_norm(prefix, layer.mlp_post_norm))

    def matrix(self, size_in: int, parts: Sequence[tuple[str, int]]) -> torch.Tensor:
        """The named [out, in] tensors side by side as one [in, sum of outs]."""
        size_out = sum(size for _, size in parts)
        joined = torch.empty(size_in, size_out, dtype=self._dtype, device=self._device)
        column = 0
        for name, size in parts:
            joined.t()[column : column + size] = self._weights.take(f"{name}.weight", (size, size_in))
            column += size
        return joined

    def vectors(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as it is stored, in memory of its own."""
        return self._weights.take(f"{name}.weight", shape).to(self._device, self._dtype, copy=True)

    def norm(self, prefix: str, norm: Norm, size: int) -> torch.Tensor:
        weight = self._weights.take(f"{prefix}{norm.name}.weight", (size,)).float()
        return (weight + 1 if norm.one_plus else weight).to(self._device, self._dtype, copy=True)

    def _optional_norm(self, prefix: str, norm: Norm | None) -> torch.Tensor | None:
        return None if norm is None else self.norm(prefix, norm, self._sizes.hidden)

    def _bias(self, parts: Sequence[tuple[str, int]]) -> torch.Tensor:
        biases = [self._weights.take(f"{name}.bias", (size,)) for name, size in parts]
        return torch.cat(biases).to(self._device, self._dtype)

    def _qkv(self, prefix: str, attention: Attention) -> tuple[torch.Tensor, torch.Tensor | None]:
        sizes = self._sizes
        heads = {"q": sizes.num_heads, "k": sizes.num_kv_heads, "v": sizes.num_kv_heads}
        parts = [(f"{prefix}self_attn.{name}_proj", count * sizes.head_dim) for name, count in heads.items()]
        matrix = self.matrix(sizes.hidden, parts)
        bias = self._bias(parts) if attention.qkv_bias else None
        if attention.rope is not None and attention.rope.interleaved:
            num_turning = sizes.num_heads + sizes.num_kv_heads
            for columns in (matrix,) if bias is None else (matrix, bias):
                _to_halves(columns, num_turning, sizes.head_dim)
        return matrix, bias

    def _head_norms(self, prefix: str, attention: Attention) -> torch.Tensor | None:
        if attention.head_norms is None:
            return None
        sizes = self._sizes
        q, k = (self.norm(prefix, norm, sizes.head_dim) for norm in attention.head_norms)
        return torch.cat((q.expand(sizes.num_heads, -1), k.expand(sizes.num_kv_heads, -1)))


def _to_halves(columns: torch.Tensor, num_heads: int, head_dim: int) -> None:
    """In each of the first `num_heads` heads of the last axis: even dimensions first, then odd ones; in place."""
    turning = columns[..., : num_heads * head_dim].view(*columns.shape[:-1], num_heads, head_dim // 2, 2)
    turning.copy_(turning.transpose(-1, -2).contiguous().view(turning.shape))
