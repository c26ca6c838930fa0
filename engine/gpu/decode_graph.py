"""One decode step of a fixed number of rows, captured: gather, all layers, logits, draw, advance.

States: captured → replayed any number of times. All it reads from outside is `rows`; what it gives is `drawn`, the
device's rows one token further and, until another graph of its pool runs, the `logits`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.gpu.device_state import DeviceState
from kernels.decode_attention import plan_units
from kernels.decode_rows import gather


class DecodeGraph:
    """`rows` [size] int32 are rows of `DeviceRows`, -1 for padding; `drawn` [size] int64."""

    def __init__(self, state: DeviceState, size: int, pool: Any) -> None:
        """Compiles what is not compiled yet. `pool`: the memory of another graph, which never runs at the same time."""
        self.size = size
        device = state.decoder.cache.device
        self.rows = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(size, dtype=torch.int64, device=device)
        self.logits = torch.empty(0)  # [size, vocab]
        self._loaded: NDArray[np.int32] | None = None  # what `rows` says
        self._step(state)  # compiles, and lets the libraries take their workspaces
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._step(state)
        self.pool = self._graph.pool()

    def load(self, rows: NDArray[np.int32], staged: torch.Tensor) -> None:
        """`rows` for the next replay; through `staged`, pinned, unless they are the very rows of the last one."""
        if rows is self._loaded:
            return
        self._loaded = rows
        host = staged.numpy()
        host[: len(rows)] = rows
        host[len(rows) : self.size] = -1
        self.rows.copy_(staged[: self.size], non_blocking=True)

    def replay(self) -> None:
        self._graph.replay()

    def _step(self, state: DeviceState) -> None:
        size, device, held = self.size, self.rows.device, state.rows
        tokens = torch.empty(size, dtype=torch.int64, device=device)
        slots = torch.empty(size, dtype=torch.int64, device=device)
        positions = torch.empty(size, dtype=torch.int32, device=device)
        lens = torch.empty(size, dtype=torch.int32, device=device)
        gather(self.rows, held.last_tokens, held.num_computed, held.tables, state.block_size, tokens, positions, lens,
               slots)
        plan_units(lens, state.block_size, state.workspace)
        sizes = state.decoder.sizes
        out = torch.empty(size, sizes.num_heads, sizes.head_dim, dtype=state.decoder.cache.dtype, device=device)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            state.attend_decode(layer, qkv, self.rows, lens, out)
            return out

        x, residual = state.decoder.forward(tokens, attend)
        self.logits = state.decoder.logits(x, residual)
        state.draw(self.logits, self.rows, self.drawn)
        state.advance(self.rows, self.drawn)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Of the graphs: a step takes the least that holds its rows, and the largest holds all."""
    every = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 1025, 64), *range(1280, 4097, 256)]
    return [size for size in every if size < max_num_seqs] + [max_num_seqs]


def least_holding(graphs: Sequence[DecodeGraph], num_rows: int) -> DecodeGraph | None:
    """`graphs` by size. None: too many for all."""
    at = bisect_left(graphs, num_rows, key=lambda graph: graph.size)
    return graphs[at] if at < len(graphs) else None
