"""The bytes of the paged KV cache; who owns which block is decided elsewhere.

Layout, block-major: `[num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]`. A block is one
contiguous run of bytes, so moving it is one copy; a *strip* is the innermost contiguous run
`[block_size, head_dim]` of one (block, layer, K or V, head). All indices are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine import block_memory
from engine.block_memory import Allocate
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the tokens of one step go; made once a step, used by every layer."""

    block: torch.Tensor  # [num_kept] int64
    offset: torch.Tensor  # [num_kept] int64, 0 .. block_size - 1
    kept: torch.Tensor | None  # [num_kept] int64 indices of the tokens that are not padding; None = all


class KvCache:
    """Allocated zeroed (a never-written slot is finite: masked attention multiplies it by 0), never resized."""

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype,
        allocate: Allocate = block_memory.private,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = model.num_layers
        self.num_kv_heads = model.num_kv_heads
        self.block_bytes = block_bytes(model, block_size, dtype)
        shape = (num_blocks, model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim)
        self._bytes = allocate(num_blocks * self.block_bytes)  # a large pool costs memory only as it is used
        raw = np.frombuffer(self._bytes, np.uint8)
        self.blocks = torch.from_numpy(raw).view(dtype).view(shape)
        self.strips = self.blocks.view(-1, block_size * model.head_dim)

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of one block, all layers, in place. Raises `IndexError` outside the pool."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is outside the pool of {self.num_blocks}")
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def slots(self, slot_mapping: torch.Tensor) -> Slots:
        """`slot_mapping` [num_tokens] int64: block_id * block_size + offset, or -1 for a token that is not kept."""
        kept = None
        if bool((slot_mapping < 0).any()):
            kept = torch.nonzero(slot_mapping >= 0).squeeze(1)
            slot_mapping = slot_mapping[kept]
        block = torch.div(slot_mapping, self.block_size, rounding_mode="floor")
        return Slots(block, slot_mapping - block * self.block_size, kept)

    def write(self, layer: int, slots: Slots, kv: torch.Tensor) -> None:
        """`kv` [num_tokens, 2, num_kv_heads, head_dim] into the slots of one layer."""
        if slots.kept is not None:
            kv = kv[slots.kept]
        self.blocks[:, layer].permute(0, 3, 1, 2, 4)[slots.block, slots.offset] = kv

    def strip_ids(self, blocks: torch.Tensor) -> torch.Tensor:
        """Indices into `strips` of layer 0, `[2, rows, num_kv_heads, columns]` for `blocks` [rows, columns] int64.

        Layer l's are these plus `l * strips_per_layer`.
        """
        head = torch.arange(self.strips_per_layer).view(2, 1, self.num_kv_heads, 1)
        return blocks[None, :, None, :] * (self.num_layers * self.strips_per_layer) + head

    @property
    def strips_per_layer(self) -> int:
        return 2 * self.num_kv_heads


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """The size of one block, all layers, K and V."""
    return model.num_layers * 2 * model.num_kv_heads * block_size * model.head_dim * dtype.itemsize
