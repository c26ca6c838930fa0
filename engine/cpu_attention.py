"""Paged attention on the CPU for one step's ragged batch: causal, grouped-query, over the block table.

K and V are gathered strip by strip into a scratch buffer that fits the processor's cache, so that each byte comes
from memory once, and attended there before the next piece overwrites it. Single-token rows go in groups of like
context, padded and masked; a chunk goes alone. What a row gets does not depend on its neighbours, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kv_cache import KvCache
from engine.ragged_batch import BatchRow

_GROUP_BYTES = 2 << 20  # gathered K and V of one group: about what a core's share of the last-level cache holds
_LEAST_FILL = 0.6  # of a group's padded context that its shortest row must really have


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that are gathered and attended together: several of one token each, or one of several tokens."""

    first: int  # of the flat batch
    num_tokens: int
    num_rows: int
    context_len: int  # padded: the longest row's
    strip_ids: torch.Tensor  # [2 * num_rows * num_kv_heads * num_blocks] int64, of layer 0
    mask: torch.Tensor | None  # added to the scores; broadcasts to [rows, kv heads, queries, context_len]


class CpuAttention:
    """Made once a step, called once a layer: writes the layer's new K and V, then attends to all of it."""

    def __init__(self, cache: KvCache, rows: Sequence[BatchRow], slot_mapping: torch.Tensor) -> None:
        self._cache = cache
        self._slots = cache.slots(slot_mapping)
        self._pieces = [_chunk(cache, piece[0]) if piece[0].q_len > 1 else _group(cache, piece)
                        for piece in _split(cache, rows)]
        most = max(piece.strip_ids.numel() for piece in self._pieces)
        self._scratch = torch.empty(most, cache.strips.shape[1], dtype=cache.strips.dtype)

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """`q` [num_tokens, num_heads, head_dim], `kv` [num_tokens, 2, num_kv_heads, head_dim], positions applied.

        Returns [num_tokens, num_heads * head_dim].
        """
        self._cache.write(layer, self._slots, kv)
        num_tokens, num_heads, head_dim = q.shape
        grouped = q.view(num_tokens, self._cache.num_kv_heads, -1, head_dim)  # [num_tokens, kv heads, group, head_dim]
        out = torch.empty(grouped.shape, dtype=q.dtype)
        for piece in self._pieces:
            tokens = slice(piece.first, piece.first + piece.num_tokens)
            k, v = self._gather(layer, piece, head_dim)
            if piece.num_tokens == piece.num_rows:
                # The heads of a group share K and V, so they stand as the queries: [rows, kv heads, group, head_dim].
                out[tokens] = F.scaled_dot_product_attention(grouped[tokens], k, v, attn_mask=piece.mask)
            else:
                # kv heads as the batch, K and V repeated by stride 0: [kv heads, group, q_len, head_dim].
                queries = grouped[tokens].permute(1, 2, 0, 3)
                k, v = (t[0, :, None].expand(-1, queries.shape[1], -1, -1) for t in (k, v))
                attended = F.scaled_dot_product_attention(
                    queries, k, v, attn_mask=piece.mask, is_causal=piece.mask is None)
                out[tokens] = attended.permute(2, 0, 1, 3)
        return out.view(num_tokens, num_heads * head_dim)

    def _gather(self, layer: int, piece: _Piece, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [rows, kv heads, context_len, head_dim], valid until the next gather."""
        target = self._scratch[: piece.strip_ids.numel()]
        ids = piece.strip_ids + layer * self._cache.strips_per_layer
        torch.index_select(self._cache.strips, 0, ids, out=target)
        kv = target.view(2, piece.num_rows, self._cache.num_kv_heads, -1, head_dim)[..., : piece.context_len, :]
        return kv[0], kv[1]


def _split(cache: KvCache, rows: Sequence[BatchRow]) -> list[list[BatchRow]]:
    """Neighbouring single-token rows together while they are of like length and fit the scratch size."""
    pieces: list[list[BatchRow]] = []
    row_bytes = cache.block_bytes // cache.num_layers
    for row in rows:
        if pieces and row.q_len == 1 and pieces[-1][0].q_len == 1:
            longest = max(row.context_len, *(r.context_len for r in pieces[-1]))
            shortest = min(row.context_len, *(r.context_len for r in pieces[-1]))
            padded_bytes = (len(pieces[-1]) + 1) * -(-longest // cache.block_size) * row_bytes
            if padded_bytes <= _GROUP_BYTES and shortest >= _LEAST_FILL * longest:
                pieces[-1].append(row)
                continue
        pieces.append([row])
    return pieces


def _group(cache: KvCache, rows: Sequence[BatchRow]) -> _Piece:
    """Shorter tables are padded with their own first block, and masked."""
    context_len = max(row.context_len for row in rows)
    lengths = torch.tensor([row.context_len for row in rows])
    tables = torch.zeros(len(rows), -(-context_len // cache.block_size), dtype=torch.int64)
    for table, row in zip(tables, rows, strict=True):
        table[:] = int(row.blocks[0])
        table[: len(row.blocks)] = torch.from_numpy(row.blocks)
    mask = None
    if int(lengths.min()) < context_len:
        beyond = torch.arange(context_len)[None, :] >= lengths[:, None]
        mask = torch.zeros(beyond.shape, dtype=cache.strips.dtype).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None, :]
    return _Piece(rows[0].first, len(rows), len(rows), context_len, cache.strip_ids(tables).flatten(), mask)


def _chunk(cache: KvCache, row: BatchRow) -> _Piece:
    """Query i sees positions 0 .. start + i; with nothing before the chunk that is plain causal attention."""
    mask = None
    if row.start:
        mask = torch.full((row.q_len, row.context_len), float("-inf"), dtype=cache.strips.dtype).triu_(row.start + 1)
    table = torch.from_numpy(row.blocks)[None]
    return _Piece(row.first, row.q_len, 1, row.context_len, cache.strip_ids(table).flatten(), mask)
