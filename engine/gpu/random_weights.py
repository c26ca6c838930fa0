"""Weights of a shape and no model, made on the device: for measurements."""

from __future__ import annotations

import torch

from engine.models.decoder_weights import DecoderWeights, LayerWeights
from engine.models.parts import Decoder, Layer

_STD = 0.02


def random_weights(decoder: Decoder, dtype: torch.dtype, device: torch.device, seed: int = 0) -> DecoderWeights:
    """Matrices from N(0, 0.02), norms uniform in 0.9 .. 1.1, biases where the shape has them from N(0, 0.02)."""
    make = _Maker(decoder, dtype, device, seed)
    head = make.matrix(decoder.sizes.hidden, decoder.sizes.vocab)
    embedding = head.t() if decoder.is_tied else make.matrix(decoder.sizes.vocab, decoder.sizes.hidden)
    layers = tuple(make.layer(layer) for layer in decoder.layers)
    return DecoderWeights(embedding, layers, make.norm(decoder.sizes.hidden), head)


class _Maker:
    def __init__(self, decoder: Decoder, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._sizes, self._dtype, self._device = decoder.sizes, dtype, device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(self, *shape: int) -> torch.Tensor:
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.normal_(0.0, _STD, generator=self._generator)

    def norm(self, *shape: int) -> torch.Tensor:
        uniform = torch.rand(shape, generator=self._generator, device=self._device)
        return (uniform * 0.2 + 0.9).to(self._dtype)

    def layer(self, layer: Layer) -> LayerWeights:
        sizes, attention = self._sizes, layer.attention
        qkv = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        head_norms = self.norm(sizes.num_heads + sizes.num_kv_heads, sizes.head_dim) if attention.head_norms else None
        return LayerWeights(
            attention_norm=self.norm(sizes.hidden), qkv=self.matrix(sizes.hidden, qkv),
            qkv_bias=self.matrix(qkv) if attention.qkv_bias else None, head_norms=head_norms,
            attention_out=self.matrix(sizes.num_heads * sizes.head_dim, sizes.hidden), attention_out_bias=None,
            attention_post_norm=None, mlp_norm=self.norm(sizes.hidden),
            gate_up=self.matrix(sizes.hidden, 2 * sizes.intermediate), gate_up_bias=None,
            down=self.matrix(sizes.intermediate, sizes.hidden), down_bias=None, mlp_post_norm=None)
