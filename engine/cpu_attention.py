"""Paged attention on the CPU for one step's ragged batch: causal, grouped-query, windowed, over the block table.

K and V are gathered strip by strip into a scratch buffer that fits the processor's cache, so that each byte comes
from memory once, and attended there before the next piece overwrites it. Single-token rows go in groups of like
context, padded and masked; a chunk goes alone. What a row gets does not depend on its neighbours, but for rounding.
Under a sliding window only the blocks that a row's queries can see are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kv_cache import KvCache
from engine.ragged_batch import BatchRow, Int64s

_GROUP_BYTES = 2 << 20  # gathered K and V of one group: about what a core's share of the last-level cache holds
_LEAST_FILL = 0.6  # of a group's padded context that its shortest row must really have


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that are gathered and attended together: several of one token each, or one of several tokens."""

    first: int  # of the flat batch
    num_tokens: int
    num_rows: int
    num_seen: int  # slots from the first visible block's on, padded: the longest row's
    strip_ids: torch.Tensor  # [2 * num_rows * num_kv_heads * num_blocks] int64, of layer 0
    mask: torch.Tensor | None  # added to the scores; broadcasts to [rows, kv heads, queries, num_seen]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one row's queries can see. Slots are counted from the start of the first visible block."""

    row: BatchRow
    blocks: Int64s
    num_slots: int  # up to and with the last query's own
    num_hidden: int  # leading slots that no query sees

    @staticmethod
    def of(row: BatchRow, window: int | None, block_size: int) -> _Seen:
        first = 0 if window is None else max(0, row.start + 1 - window)  # the first query's first position
        skipped = first // block_size
        return _Seen(row, row.blocks[skipped:], row.context_len - skipped * block_size, first - skipped * block_size)


class CpuAttention:
    """Made once a step, called once a layer: writes the layer's new K and V, then attends to what was kept."""

    def __init__(self, cache: KvCache, rows: Sequence[BatchRow], slot_mapping: torch.Tensor) -> None:
        self._cache = cache
        self._rows = rows
        self._longest = max(row.context_len for row in rows)
        self._slots = cache.slots(slot_mapping)
        self._pieces: dict[int | None, list[_Piece]] = {}  # by window; made when a layer first asks
        self._scratch = torch.empty(0, cache.strips.shape[1], dtype=cache.strips.dtype)

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor, scale: float,
                 window: int | None) -> torch.Tensor:
        """`q` [num_tokens, num_heads, head_dim], `kv` [num_tokens, 2, num_kv_heads, head_dim], positions applied.

        Scores are times `scale`; with a `window`, a query sees only so many positions, the last of them its own.
        Returns [num_tokens, num_heads * head_dim].
        """
        self._cache.write(layer, self._slots, kv)
        num_tokens, num_heads, head_dim = q.shape
        grouped = q.view(num_tokens, self._cache.num_kv_heads, -1, head_dim)  # [num_tokens, kv heads, group, head_dim]
        out = torch.empty(grouped.shape, dtype=q.dtype)
        for piece in self._pieces_for(window):
            tokens = slice(piece.first, piece.first + piece.num_tokens)
            k, v = self._gather(layer, piece, head_dim)
            if piece.num_tokens == piece.num_rows:
                # The heads of a group share K and V, so they stand as the queries: [rows, kv heads, group, head_dim].
                out[tokens] = F.scaled_dot_product_attention(grouped[tokens], k, v, attn_mask=piece.mask, scale=scale)
            else:
                # kv heads as the batch, K and V repeated by stride 0: [kv heads, group, q_len, head_dim].
                queries = grouped[tokens].permute(1, 2, 0, 3)
                k, v = (t[0, :, None].expand(-1, queries.shape[1], -1, -1) for t in (k, v))
                attended = F.scaled_dot_product_attention(
                    queries, k, v, attn_mask=piece.mask, is_causal=piece.mask is None, scale=scale)
                out[tokens] = attended.permute(2, 0, 1, 3)
        return out.view(num_tokens, num_heads * head_dim)

    def _pieces_for(self, window: int | None) -> list[_Piece]:
        window = None if window is None or window >= self._longest else window
        if window not in self._pieces:
            seen = [_Seen.of(row, window, self._cache.block_size) for row in self._rows]
            pieces = [_chunk(self._cache, group[0], window) if group[0].row.q_len > 1 else _group(self._cache, group)
                      for group in _split(self._cache, seen)]
            most = max(piece.strip_ids.numel() for piece in pieces)
            if most > len(self._scratch):
                self._scratch = torch.empty(most, self._scratch.shape[1], dtype=self._scratch.dtype)
            self._pieces[window] = pieces
        return self._pieces[window]

    def _gather(self, layer: int, piece: _Piece, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [rows, kv heads, num_seen, head_dim], valid until the next gather."""
        target = self._scratch[: piece.strip_ids.numel()]
        ids = piece.strip_ids + layer * self._cache.strips_per_layer
        torch.index_select(self._cache.strips, 0, ids, out=target)
        kv = target.view(2, piece.num_rows, self._cache.num_kv_heads, -1, head_dim)[..., : piece.num_seen, :]
        return kv[0], kv[1]


def _split(cache: KvCache, rows: Sequence[_Seen]) -> list[list[_Seen]]:
    """Neighbouring single-token rows together while they are of like length and fit the scratch size."""
    pieces: list[list[_Seen]] = []
    row_bytes = cache.block_bytes // cache.num_layers
    for seen in rows:
        if pieces and seen.row.q_len == 1 and pieces[-1][0].row.q_len == 1:
            longest = max(seen.num_slots, *(s.num_slots for s in pieces[-1]))
            shortest = min(seen.num_slots, *(s.num_slots for s in pieces[-1]))
            padded_bytes = (len(pieces[-1]) + 1) * -(-longest // cache.block_size) * row_bytes
            if padded_bytes <= _GROUP_BYTES and shortest >= _LEAST_FILL * longest:
                pieces[-1].append(seen)
                continue
        pieces.append([seen])
    return pieces


def _group(cache: KvCache, rows: Sequence[_Seen]) -> _Piece:
    """Shorter tables are padded with their own first block; what a row does not see is masked."""
    num_seen = max(seen.num_slots for seen in rows)
    tables = torch.zeros(len(rows), -(-num_seen // cache.block_size), dtype=torch.int64)
    for table, seen in zip(tables, rows, strict=True):
        table[:] = int(seen.blocks[0])
        table[: len(seen.blocks)] = torch.from_numpy(seen.blocks)
    mask = None
    if any(seen.num_slots < num_seen or seen.num_hidden for seen in rows):
        slot = torch.arange(num_seen)[None, :]
        last, first = (torch.tensor(edge)[:, None] for edge in zip(*((s.num_slots, s.num_hidden) for s in rows),
                                                                   strict=True))
        hidden = (slot >= last) | (slot < first)
        mask = torch.zeros(hidden.shape, dtype=cache.strips.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None, None, :]
    row = rows[0].row
    return _Piece(row.first, len(rows), len(rows), num_seen, cache.strip_ids(tables).flatten(), mask)


def _chunk(cache: KvCache, seen: _Seen, window: int | None) -> _Piece:
    """Query i sees positions 0 .. start + i, or the last `window` of these; with nothing before and no window that
    is plain causal attention."""
    row, mask = seen.row, None
    if row.start or (window is not None and window < row.q_len):
        start = seen.num_slots - row.q_len
        mask = torch.full((row.q_len, seen.num_slots), float("-inf"), dtype=cache.strips.dtype).triu_(start + 1)
        if window is not None:
            slot, own = torch.arange(seen.num_slots)[None, :], torch.arange(start, seen.num_slots)[:, None]
            mask.masked_fill_(slot <= own - window, float("-inf"))
    table = torch.from_numpy(seen.blocks)[None]
    return _Piece(row.first, row.q_len, 1, seen.num_slots, cache.strip_ids(table).flatten(), mask)
