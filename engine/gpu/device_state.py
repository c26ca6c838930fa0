"""What graphs and eager steps share on one device: the model, the sequences' rows, and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.gpu.decoder import GpuDecoder
from engine.gpu.device_rows import DeviceRows
from kernels.block_strips import strips_of
from kernels.decode_attention import DecodeWorkspace, decode_attention
from kernels.decode_rows import advance
from kernels.gumbel_argmax import gumbel_argmax, num_slices


@dataclass(frozen=True, slots=True)
class DeviceState:
    decoder: GpuDecoder
    rows: DeviceRows
    workspace: DecodeWorkspace
    slice_scores: torch.Tensor  # [max_rows, num_slices] float32
    slice_ids: torch.Tensor  # [max_rows, num_slices] int32
    strips: TensorDescriptor  # of the pool

    @staticmethod
    def make(decoder: GpuDecoder, max_rows: int, max_model_len: int) -> DeviceState:
        sizes, device = decoder.sizes, decoder.cache.device
        slices = num_slices(sizes.vocab)
        return DeviceState(
            decoder, DeviceRows(max_rows, -(-max_model_len // decoder.cache.shape[4]), device),
            DecodeWorkspace.make(max_rows, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, device),
            torch.empty(max_rows, slices, dtype=torch.float32, device=device),
            torch.empty(max_rows, slices, dtype=torch.int32, device=device), strips_of(decoder.cache))

    @property
    def block_size(self) -> int:
        return self.decoder.cache.shape[4]

    def attend_decode(
        self, layer: int, qkv: torch.Tensor, rows: torch.Tensor, context_lens: torch.Tensor, out: torch.Tensor
    ) -> None:
        """`qkv` as the matrix product left it, `out` [num_seqs, num_heads, head_dim]; see `decode_attention`."""
        decoder = self.decoder
        scale = decoder.decoder.layers[layer].attention.scale
        decode_attention(
            qkv, decoder.weights.layers[layer].head_norms, decoder.norm_eps(layer), decoder.cos, decoder.sin,
            decoder.cache, self.strips, layer, self.rows.tables, rows, context_lens, scale, self.workspace, out)

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor) -> None:
        """A token for each row of `logits`, by temperature alone, into `drawn` [num_rows] int64."""
        gumbel_argmax(logits, rows, self.rows.keys, self.rows.output_positions, self.rows.temperatures,
                      self.slice_scores, self.slice_ids, drawn)

    def advance(self, rows: torch.Tensor, drawn: torch.Tensor, by: int = 1) -> None:
        """`by` 0: `drawn` only replaces what the rows drew last."""
        advance(rows, drawn, self.rows.last_tokens, self.rows.num_computed, self.rows.output_positions, by)
