"""The forward pass of a Qwen3-shaped model in plain torch operations, without pages, graphs or kernels of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.models.decoder_weights import DecoderWeights, LayerWeights
from engine.models.parts import Decoder
from engine.models.rotary import rotary_tables


class PlainTorch:
    """In the weights' dtype: each operation rounds its result to it, as a library's model does."""

    def __init__(self, decoder: Decoder, weights: DecoderWeights, max_len: int) -> None:
        self._decoder, self._weights = decoder, weights
        rope = decoder.layers[0].attention.rope
        assert rope is not None
        cos, sin = rotary_tables(rope, decoder.sizes.head_dim, max_len, torch.float32)
        self._cos, self._sin = (table[:, 0].to(weights.norm) for table in (cos, sin))

    @torch.inference_mode()
    def last_logits(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """[num_prompts, vocab] float32, after the last token of each."""
        return torch.stack([self._last_logits(prompt) for prompt in prompts])

    def _last_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        weights = self._weights
        x = weights.embedding[torch.tensor(token_ids, device=weights.norm.device)]
        for layer, held in zip(self._decoder.layers, weights.layers, strict=True):
            assert layer.mlp_norm is not None
            assert held.mlp_norm is not None
            normed = _rms_norm(x, held.attention_norm, layer.attention_norm.eps)
            x = x + self._attention(normed, held)
            normed = _rms_norm(x, held.mlp_norm, layer.mlp_norm.eps)
            gate, up = (normed @ held.gate_up).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ held.down
        return (_rms_norm(x[-1], weights.norm, self._decoder.norm.eps) @ weights.head).float()

    def _attention(self, normed: torch.Tensor, held: LayerWeights) -> torch.Tensor:
        sizes, num_tokens = self._decoder.sizes, len(normed)
        heads = (normed @ held.qkv).view(num_tokens, -1, sizes.head_dim)
        turning, v = heads[:, : -sizes.num_kv_heads], heads[:, -sizes.num_kv_heads :]
        head_norms = self._decoder.layers[0].attention.head_norms
        if held.head_norms is not None and head_norms is not None:
            turning = _rms_norm(turning, held.head_norms, head_norms[0].eps)
        cos, sin = self._cos[:num_tokens, None], self._sin[:num_tokens, None]
        turning = turning * cos + turning.roll(sizes.head_dim // 2, -1) * sin
        q, k, v = (part.transpose(0, 1)[None] for part in (
            turning[:, : sizes.num_heads], turning[:, sizes.num_heads :], v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(num_tokens, -1) @ held.attention_out


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
