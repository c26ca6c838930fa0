"""The forward pass of a step with chunks, from the words of `flat_inputs` on the device to its draws.

Run as it is, kernel by kernel, or captured for a padded layout (`extend_graph`): both are this code.
"""

from __future__ import annotations

import torch

from engine.gpu.decoder import Attend
from engine.gpu.device_state import DeviceState
from engine.gpu.flat_inputs import FlatParts
from engine.gpu.whole_prompt import whole_prompt_attention
from kernels.decode_attention import plan_units
from kernels.decode_rows import gather
from kernels.extend_attention import extend_attention


def forward(
    state: DeviceState, parts: FlatParts, num_decode: int, *, is_whole_prompt: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, residual) of all flat tokens; see `GpuDecoder.forward`. The first `num_decode` rows may decode.

    `is_whole_prompt`: the tokens are those of one sequence from position 0, and torch's kernel attends.
    """
    rows = parts.decode_rows[:num_decode]
    lens = torch.empty(num_decode, dtype=torch.int32, device=rows.device)
    if num_decode:
        wide = torch.empty(2, num_decode, dtype=torch.int64, device=rows.device)  # `codes` and the kernel know these
        gather(rows, state.rows.last_tokens, state.rows.num_computed, state.rows.tables, state.block_size,
               wide[0], torch.empty_like(lens), lens, wide[1])
        plan_units(lens, state.block_size, state.workspace)
    attend = _attend_whole(state, parts) if is_whole_prompt else _attend(state, parts, rows, lens)
    return state.decoder.forward(_tokens(state, parts.codes), attend)


def drawing_logits(
    state: DeviceState, parts: FlatParts, x: torch.Tensor, residual: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """[num_rows, vocab] of what `forward` gave, for the first rows of `parts.drawing`."""
    selected = parts.selected[:num_rows]
    return state.decoder.logits(x.index_select(0, selected), residual.index_select(0, selected))


def _tokens(state: DeviceState, codes: torch.Tensor) -> torch.Tensor:
    drawn = state.rows.last_tokens.index_select(0, (-1 - codes).clamp_(min=0))
    return torch.where(codes < 0, drawn, codes)


def _attend(state: DeviceState, parts: FlatParts, rows: torch.Tensor, lens: torch.Tensor) -> Attend:
    """The decode rows' Q is read before `turn_and_write` turns it once more: of these it is not needed after."""
    decoder, sizes, num_decode = state.decoder, state.decoder.sizes, len(rows)
    slots, tiles = parts.slots.long(), parts.tiles.view(-1, 4)
    out = torch.empty(len(slots), sizes.num_heads, sizes.head_dim, dtype=decoder.cache.dtype, device=rows.device)

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        if num_decode:
            state.attend_decode(layer, qkv[:num_decode], rows, lens, out[:num_decode])
        if len(tiles):
            decoder.turn_and_write(layer, qkv, parts.positions, slots)
            extend_attention(qkv, decoder.cache, state.strips, layer, state.rows.tables, tiles,
                             decoder.decoder.layers[layer].attention.scale, out)
        return out

    return attend


def _attend_whole(state: DeviceState, parts: FlatParts) -> Attend:
    decoder, sizes, slots = state.decoder, state.decoder.sizes, parts.slots.long()

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        decoder.turn_and_write(layer, qkv, parts.positions, slots, keeps_k=True)
        return whole_prompt_attention(
            qkv, sizes.num_heads, sizes.num_kv_heads, decoder.decoder.layers[layer].attention.scale)

    return attend
