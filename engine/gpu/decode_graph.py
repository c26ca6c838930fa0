"""One decode step of a fixed number of rows, captured: gather, all layers, logits, draw, advance.

States: captured → replayed any number of times. All it reads from outside is `rows`; all it gives is `drawn`, and the
device's rows one token further.
"""

from __future__ import annotations

from typing import Any

import torch

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
        self._step(state)  # compiles, and lets the libraries take their workspaces
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._step(state)
        self.pool = self._graph.pool()

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
        state.draw(state.decoder.logits(x, residual), self.rows, self.drawn)
        state.advance(self.rows, self.drawn)
