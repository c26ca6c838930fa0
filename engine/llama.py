"""The Llama forward pass (LlamaForCausalLM of Hugging Face transformers, whose arithmetic it follows).

Matrices are held as [in, out], so that one token is `x @ w` streaming `w` row by row: on a CPU almost twice as fast
as the stored [out, in] at batch 1 and the same at larger ones. Q, K and V are one matrix, gate and up are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.model_config import ModelConfig
from engine.weights import WeightFolder


class Attention(Protocol):
    """One step's attention. Keeps `kv` and returns what `q` finds in it and in all that was kept before."""

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """`q` [num_tokens, num_heads, head_dim], `kv` [num_tokens, 2, num_kv_heads, head_dim].

        Returns [num_tokens, num_heads * head_dim].
        """


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [hidden, (num_heads + 2 * num_kv_heads) * head_dim]
    attention_out: torch.Tensor  # [num_heads * head_dim, hidden]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [hidden, 2 * intermediate]
    down: torch.Tensor  # [intermediate, hidden]


class Llama:
    """Weights on one device, never changed after loading; keeps nothing between calls."""

    def __init__(self, config: ModelConfig, weights: WeightFolder, dtype: torch.dtype, max_len: int) -> None:
        """Takes every tensor from `weights`; `max_len` bounds the positions. Raises `ModelLoadError`."""
        self.config = config
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embedding = weights.take("model.embed_tokens.weight", (vocab, hidden)).to(dtype).clone()
        self._layers = [_load_layer(config, weights, dtype, layer) for layer in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", (hidden,)).to(dtype).clone()
        if config.tie_word_embeddings:
            self._head = self._embedding.t().contiguous()  # [hidden, vocab]
        else:
            self._head = _transposed(weights, dtype, hidden, ("lm_head.weight", vocab))
        weights.refuse_untaken(("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tie_word_embeddings else ())))
        self._cos, self._sin = _rotary_tables(config, max_len, dtype)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """`token_ids`, `positions` [num_tokens] int64 → [num_tokens, hidden], the last layer's sum."""
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        size, eps = (config.hidden_size,), config.rms_norm_eps
        cos, sin = self._cos[positions], self._sin[positions]  # [num_tokens, 1, head_dim]
        x = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = F.rms_norm(x, size, layer.attention_norm, eps) @ layer.qkv
            qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)
            turning = qkv[:, : heads + kv_heads]
            torch.addcmul(turning * cos, turning.roll(head_dim // 2, -1), sin, out=turning)
            attended = attention(index, qkv[:, :heads], qkv[:, heads:].view(-1, 2, kv_heads, head_dim))
            x = torch.addmm(x, attended, layer.attention_out)
            gate, up = (F.rms_norm(x, size, layer.mlp_norm, eps) @ layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] of `forward` → [num_rows, vocab] float32."""
        normed = F.rms_norm(hidden, (self.config.hidden_size,), self._norm, self.config.rms_norm_eps)
        return (normed @ self._head).float()


def _load_layer(config: ModelConfig, weights: WeightFolder, dtype: torch.dtype, index: int) -> _Layer:
    prefix, hidden, intermediate = f"model.layers.{index}.", config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(size_in: int, *parts: tuple[str, int]) -> torch.Tensor:
        return _transposed(weights, dtype, size_in, *((f"{prefix}{name}.weight", size) for name, size in parts))

    def norm(name: str) -> torch.Tensor:
        return weights.take(f"{prefix}{name}.weight", (hidden,)).to(dtype).clone()

    return _Layer(
        attention_norm=norm("input_layernorm"),
        qkv=matrix(hidden, ("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)),
        attention_out=matrix(q_size, ("self_attn.o_proj", hidden)),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=matrix(hidden, ("mlp.gate_proj", intermediate), ("mlp.up_proj", intermediate)),
        down=matrix(intermediate, ("mlp.down_proj", hidden)),
    )


def _transposed(weights: WeightFolder, dtype: torch.dtype, size_in: int, *parts: tuple[str, int]) -> torch.Tensor:
    """The named [out, in] tensors side by side as one [in, sum of outs]."""
    joined = torch.empty(size_in, sum(size for _, size in parts), dtype=dtype)
    column = 0
    for name, size in parts:
        joined[:, column : column + size] = weights.take(name, (size, size_in)).t()
        column += size
    return joined


def _rotary_tables(config: ModelConfig, max_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, each [max_len, 1, head_dim], for `x * cos + roll(x, head_dim / 2) * sin`.

    Rotary positions (Su et al. 2021) over the two halves of a head. Computed in float32, as transformers does.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    angles = torch.arange(max_len).float()[:, None] * (1.0 / config.rope_theta**exponents)[None, :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)
