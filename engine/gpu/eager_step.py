"""A step with chunks, or with rows that the host samples: kernel by kernel, decode rows first, then the chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.generation import TokenLogprobs
from engine.gpu.decoder import Attend
from engine.gpu.device_state import DeviceState
from engine.sampling.batch_sampler import BatchSampler
from engine.step import UNKNOWN_TOKEN, PlannedRow, StepPlan
from kernels.decode_attention import plan_units
from kernels.decode_rows import gather
from kernels.extend_attention import extend_attention, make_tiles

Int64s = NDArray[np.int64]


class EagerStep:
    """`sampled`: indices of the plan's rows that draw, in the order of the drawn tokens."""

    def __init__(self, state: DeviceState, plan: StepPlan, row_of: Mapping[str, int]) -> None:
        """Stages what the device's rows must know of the chunks; `DeviceRows.flush` comes before `run`."""
        self._state, self._plan, self._row_of = state, plan, row_of
        self._num_decode = len(plan.decode)
        self.sampled = [*range(self._num_decode),
                        *(self._num_decode + i for i, row in enumerate(plan.chunks) if row.samples)]
        for row in plan.chunks:
            at = row_of[row.request_id]
            state.rows.set_table(at, row.block_ids)
            if row.samples:  # `advance` then makes it one more of each
                state.rows.place(at, 0, row.start + len(row.token_ids) - 1, row.output_position)

    def run(self, sampler: BatchSampler | None) -> tuple[torch.Tensor, dict[int, TokenLogprobs]]:
        """(drawn [len(sampled)] int64 on the device, logprobs by the plan's row). `sampler`: draws on the host."""
        state, num_decode = self._state, self._num_decode
        tokens, positions, slots, lasts = self._flat()
        rows = self._sent([self._row_of[name] for name in self._plan.decode.request_ids], np.int32)
        lens = torch.empty(num_decode, dtype=torch.int32, device=rows.device)
        if num_decode:
            gather(rows, state.rows.last_tokens, state.rows.num_computed, state.rows.tables, state.block_size,
                   tokens, positions, lens, slots)
            plan_units(lens, state.block_size, state.workspace)
        x, residual = state.decoder.forward(tokens, self._attend(rows, lens, positions, slots))
        select = self._sent([*range(num_decode), *lasts], np.int64)
        drawn = torch.empty(len(self.sampled), dtype=torch.int64, device=rows.device)
        logprobs: dict[int, TokenLogprobs] = {}
        if len(self.sampled):
            logits = state.decoder.logits(x[select], residual[select])
            drawing = self._sent([self._row_of[self._plan.rows[i].request_id] for i in self.sampled], np.int32)
            if sampler is None:
                state.draw(logits, drawing, drawn)
            else:
                ids, logprobs = self._draw_on_host(logits, sampler)
                drawn.copy_(self._sent(ids, np.int64))
            state.advance(drawing, drawn)
        return drawn, logprobs

    def _flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Tokens, positions and slots of the whole step, those of decode rows still empty; the last of each row."""
        size = self._state.block_size
        tokens: list[Int64s] = [np.zeros(self._num_decode, np.int64)]
        positions: list[Int64s] = [np.zeros(self._num_decode, np.int64)]
        slots: list[Int64s] = [np.zeros(self._num_decode, np.int64)]
        lasts, unknown, first = [], [], self._num_decode
        for row in self._plan.chunks:
            where = np.arange(row.start, row.start + len(row.token_ids), dtype=np.int64)
            blocks = np.asarray(row.block_ids, dtype=np.int64)
            ids = np.asarray(row.token_ids, dtype=np.int64)
            if ids[0] == UNKNOWN_TOKEN:
                unknown.append((first, self._row_of[row.request_id]))
                ids[0] = 0
            tokens.append(ids)
            positions.append(where)
            slots.append(blocks[where // size] * size + where % size)
            first += len(ids)
            if row.samples:
                lasts.append(first - 1)
        sent = self._sent(np.concatenate(tokens), np.int64)
        for flat, at in unknown:
            sent[flat] = self._state.rows.last_tokens[at]
        return (sent, self._sent(np.concatenate(positions), np.int32), self._sent(np.concatenate(slots), np.int64),
                lasts)

    def _attend(
        self, rows: torch.Tensor, lens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Attend:
        state, num_decode, sizes = self._state, self._num_decode, self._state.decoder.sizes
        chunks = self._plan.chunks
        q_lens = [len(row.token_ids) for row in chunks]
        firsts = (np.cumsum([num_decode, *q_lens])[:-1]).tolist()
        tiles = make_tiles([self._row_of[row.request_id] for row in chunks], firsts, [row.start for row in chunks],
                           q_lens, sizes.num_heads // sizes.num_kv_heads) if chunks else None
        tiles = tiles.pin_memory().to(rows.device, non_blocking=True) if tiles is not None else None
        num_tokens = num_decode + sum(q_lens)
        out = torch.empty(num_tokens, sizes.num_heads, sizes.head_dim, dtype=state.decoder.cache.dtype,
                          device=rows.device)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            if num_decode:
                state.attend_decode(layer, qkv[:num_decode], rows, lens, out[:num_decode])
            if tiles is not None:
                state.decoder.turn_and_write(layer, qkv[num_decode:], positions[num_decode:], slots[num_decode:])
                scale = state.decoder.decoder.layers[layer].attention.scale
                extend_attention(
                    qkv, state.decoder.cache, state.strips, layer, state.rows.tables, tiles, scale, out)
            return out

        return attend

    def _draw_on_host(self, logits: torch.Tensor, sampler: BatchSampler) -> tuple[list[int], dict[int, TokenLogprobs]]:
        rows = [self._plan.rows[index] for index in self.sampled]
        for row in self._plan.rows:
            sampler.learn(_without_unknown(row))
        masks = self._plan.masks.wait() if self._plan.masks is not None else {}
        ids, scores = sampler.draw(rows, logits.float().cpu().numpy(), [masks.get(index) for index in self.sampled])
        return ids, {index: score for index, score in zip(self.sampled, scores, strict=True) if score is not None}

    def _sent(self, values: Sequence[int] | Int64s, kind: type[np.int32 | np.int64]) -> torch.Tensor:
        staged = torch.from_numpy(np.asarray(values, dtype=kind)).pin_memory()
        return staged.to(self._state.decoder.cache.device, non_blocking=True)


def _without_unknown(row: PlannedRow) -> PlannedRow:
    """A token that the sampler drew itself is nothing new to it."""
    if row.token_ids[0] != UNKNOWN_TOKEN:
        return row
    return row._replace(token_ids=row.token_ids[1:], start=row.start + 1)
