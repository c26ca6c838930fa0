"""The forward pass of every described model, whose arithmetic is that of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.model_config import ModelConfig
from engine.models.decoder_weights import DecoderWeights, LayerWeights
from engine.models.parts import Layer, Norm
from engine.models.rotary import rotary_tables

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}

Turn = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin of a step's positions, [num_tokens, 1, head_dim]


class AttentionStep(Protocol):
    """One step's attention. Keeps `kv` and returns what `q` finds in it and in all that was kept before."""

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor, scale: float,
                 window: int | None) -> torch.Tensor:
        """`q` [num_tokens, num_heads, head_dim], `kv` [num_tokens, 2, num_kv_heads, head_dim], positions applied.

        Scores are times `scale`; with a `window`, a query sees only so many positions, the last of them its own.
        Returns [num_tokens, num_heads * head_dim].
        """


class DecoderModel:
    """Weights on one device, never changed after loading; keeps nothing between calls."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_len: int) -> None:
        """`max_len` bounds the positions."""
        self.config = config
        self._decoder = decoder = config.decoder
        self._weights = weights
        ropes = {layer.attention.rope for layer in decoder.layers} - {None}
        self._tables = {rope: rotary_tables(rope, decoder.sizes.head_dim, max_len, weights.norm.dtype)
                        for rope in ropes if rope is not None}

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionStep) -> torch.Tensor:
        """`token_ids`, `positions` [num_tokens] int64 → [num_tokens, hidden], the last layer's sum."""
        turns = {rope: (cos[positions], sin[positions]) for rope, (cos, sin) in self._tables.items()}
        x = F.embedding(token_ids, self._weights.embedding)
        if self._decoder.embedding_scale != 1.0:
            x = x * torch.tensor(self._decoder.embedding_scale, dtype=x.dtype)
        for index, (layer, weights) in enumerate(zip(self._decoder.layers, self._weights.layers, strict=True)):
            rope = layer.attention.rope
            x = self._block(index, layer, weights, x, None if rope is None else turns[rope], attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] of `forward` → [num_rows, vocab] float32."""
        logits = (_normed(hidden, self._decoder.norm, self._weights.norm) @ self._weights.head).float()
        if self._decoder.logit_scale != 1.0:
            logits *= self._decoder.logit_scale
        if (cap := self._decoder.logit_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _block(self, index: int, layer: Layer, weights: LayerWeights, x: torch.Tensor, turn: Turn | None,
               attention: AttentionStep) -> torch.Tensor:
        """x [num_tokens, hidden] → the same, with what attention and the MLP add."""
        normed = _normed(x, layer.attention_norm, weights.attention_norm)
        q, kv = self._qkv(layer, weights, normed, turn)
        attended = attention(index, q, kv, layer.attention.scale, layer.attention.window)
        x = _added(x, attended, weights.attention_out, weights.attention_out_bias, layer.attention_post_norm,
                   weights.attention_post_norm)
        if layer.mlp_norm is not None and weights.mlp_norm is not None:
            normed = _normed(x, layer.mlp_norm, weights.mlp_norm)
        gate, up = _linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
        gated = ACTIVATIONS[layer.mlp.activation](gate).mul_(up)
        return _added(x, gated, weights.down, weights.down_bias, layer.mlp_post_norm, weights.mlp_post_norm)

    def _qkv(self, layer: Layer, weights: LayerWeights, normed: torch.Tensor,
             turn: Turn | None) -> tuple[torch.Tensor, torch.Tensor]:
        """q [num_tokens, num_heads, head_dim] and kv [num_tokens, 2, num_kv_heads, head_dim], positions applied."""
        heads, kv_heads, head_dim = (
            self._decoder.sizes.num_heads, self._decoder.sizes.num_kv_heads, self._decoder.sizes.head_dim)
        qkv = _linear(normed, weights.qkv, weights.qkv_bias).view(-1, heads + 2 * kv_heads, head_dim)
        q_and_k = qkv[:, : heads + kv_heads]
        turning = q_and_k
        if layer.attention.head_norms is not None and weights.head_norms is not None:
            turning = F.rms_norm(q_and_k, (head_dim,), None, layer.attention.head_norms[0].eps) * weights.head_norms
        if turn is not None:
            torch.addcmul(turning * turn[0], turning.roll(head_dim // 2, -1), turn[1], out=q_and_k)
        elif turning is not q_and_k:
            q_and_k.copy_(turning)
        return qkv[:, :heads], qkv[:, heads:].view(-1, 2, kv_heads, head_dim)


def _normed(x: torch.Tensor, norm: Norm, weight: torch.Tensor) -> torch.Tensor:
    if norm.kind == "mean":
        return F.layer_norm(x, weight.shape, weight, None, norm.eps)
    return F.rms_norm(x, weight.shape, weight, norm.eps)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _added(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None,
           norm_weight: torch.Tensor | None) -> torch.Tensor:
    """x plus y through an output matrix, its bias and the norm after it, where there are such."""
    if norm is not None and norm_weight is not None:
        return x + _normed(_linear(y, weight, bias), norm, norm_weight)
    x = torch.addmm(x, y, weight)
    return x if bias is None else x + bias
