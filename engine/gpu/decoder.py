"""The forward pass of a described model on a GPU: eight launches a layer, matrix products by cuBLAS."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.errors import ModelLoadError
from engine.models.decoder_weights import DecoderWeights
from engine.models.parts import Decoder, Layer
from engine.models.rotary import rotary_tables
from kernels.add_rms_norm import add_rms_norm
from kernels.rope_write import rope_write
from kernels.silu_mul import silu_mul

# (layer, qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]) → [num_tokens, num_heads, head_dim]
Attend = Callable[[int, torch.Tensor], torch.Tensor]


class GpuDecoder:
    """Weights on one device. `cache` [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] is the pool."""

    def __init__(self, decoder: Decoder, weights: DecoderWeights, cache: torch.Tensor, max_len: int) -> None:
        """Raises `ModelLoadError` for a part that has no kernel here."""
        check_supported(decoder)
        self.decoder, self.sizes = decoder, decoder.sizes
        self.weights, self.cache = weights, cache
        rope = decoder.layers[0].attention.rope
        assert rope is not None
        cos, sin = rotary_tables(rope, self.sizes.head_dim, max_len, torch.float32)
        self.cos, self.sin = (table[:, 0].contiguous().to(cache.device) for table in (cos, sin))

    def norm_eps(self, layer: int) -> float:
        """Of the head norms; 0 where there are none."""
        head_norms = self.decoder.layers[layer].attention.head_norms
        return 0.0 if head_norms is None else head_norms[0].eps

    def turn_and_write(
        self, layer: int, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, *, keeps_k: bool = False
    ) -> None:
        """Norms and positions of Q in place, of K on its way to the cache, beside V; see `rope_write`."""
        rope_write(qkv, self.weights.layers[layer].head_norms, self.norm_eps(layer), self.cos, self.sin, positions,
                   slots, self.cache[:, layer], self.sizes.num_heads, keeps_k=keeps_k)

    def forward(self, token_ids: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_ids` [num_tokens] int64 → (x, residual), whose sum is the last layer's output.

        `attend` gets each layer's QKV as the matrix product left it.
        """
        sizes, weights = self.sizes, self.weights
        num_tokens = len(token_ids)
        x = torch.nn.functional.embedding(token_ids, weights.embedding)
        residual, normed = torch.empty_like(x), torch.empty_like(x)
        gated = x.new_empty(num_tokens, sizes.intermediate)
        num_all = sizes.num_heads + 2 * sizes.num_kv_heads
        for index, (layer, held) in enumerate(zip(self.decoder.layers, weights.layers, strict=True)):
            assert layer.mlp_norm is not None
            assert held.mlp_norm is not None
            add_rms_norm(x, residual, held.attention_norm, layer.attention_norm.eps, normed, first=index == 0)
            qkv = _linear(normed, held.qkv, held.qkv_bias).view(num_tokens, num_all, sizes.head_dim)
            x = attend(index, qkv).view(num_tokens, -1) @ held.attention_out
            add_rms_norm(x, residual, held.mlp_norm, layer.mlp_norm.eps, normed, first=False)
            silu_mul(normed @ held.gate_up, gated)
            x = gated @ held.down
        return x, residual

    def logits(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Rows of what `forward` returned → [num_rows, vocab]; `residual` is changed."""
        normed = torch.empty_like(x)
        add_rms_norm(x, residual, self.weights.norm, self.decoder.norm.eps, normed, first=False)
        return normed @ self.weights.head


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def check_supported(decoder: Decoder) -> None:
    """Raises `ModelLoadError` for a part that has no kernel here."""
    for layer in decoder.layers:
        _check(layer)
    _check_whole(decoder)


def _check(layer: Layer) -> None:
    attention, mlp = layer.attention, layer.mlp
    unsupported = {
        "a window": attention.window is not None, "no positions": attention.rope is None,
        "a bias of attention's output": attention.out_bias, "a parallel block": layer.mlp_norm is None,
        "norms after a part": layer.attention_post_norm is not None or layer.mlp_post_norm is not None,
        f"activation {mlp.activation}": mlp.activation != "silu", "biases of the MLP": mlp.bias,
        "a mean norm": layer.attention_norm.kind != "rms"}
    _refuse(unsupported)


def _check_whole(decoder: Decoder) -> None:
    head_dim = decoder.sizes.head_dim
    _refuse({
        f"heads of {head_dim} dimensions": head_dim < 16 or head_dim & (head_dim - 1) != 0,
        "several ropes": len({layer.attention.rope for layer in decoder.layers}) > 1,
        "a scaled embedding": decoder.embedding_scale != 1.0, "scaled logits": decoder.logit_scale != 1.0,
        "soft-capped logits": decoder.logit_softcap is not None, "a mean norm": decoder.norm.kind != "rms"})


def _refuse(unsupported: dict[str, bool]) -> None:
    found = [name for name, is_there in unsupported.items() if is_there]
    if found:
        raise ModelLoadError(f"model: {', '.join(found)} cannot run on a GPU yet; use device=cpu", param="device")
