"""All captured steps of one device, in one pool of memory: they never run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.gpu.decode_graph import DecodeGraph, decode_sizes
from engine.gpu.device_state import DeviceState
from engine.gpu.extend_graph import ExtendGraph, extend_shapes
from engine.gpu.flat_inputs import FlatLayout

Say = Callable[..., object]  # (event, **fields), as a logger's `info`
_EVERY_S = 5.0


class StepGraphs:
    """`decode` by size, `extend` in the order of `extend_shapes`. Empty until `capture`."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._sizes = decode_sizes(max_num_seqs)
        self._shapes = extend_shapes(max_num_seqs, max_num_batched_tokens)
        self._pool: Any = None
        self.decode: list[DecodeGraph] = []
        self.extend: list[ExtendGraph] = []

    @property
    def num_wanted(self) -> int:
        return len(self._sizes) + len(self._shapes)

    @property
    def num_captured(self) -> int:
        return len(self.extend) + len(self.decode)

    @torch.inference_mode()
    def capture(self, state: DeviceState, words: torch.Tensor, say: Say, limit: int | None = None) -> None:
        """The next `limit` of them, the largest first: the others fit into its memory. `words` is the input."""
        jobs = [*(partial(self._extend, state, words, shape) for shape in reversed(self._shapes)),
                *(partial(self._decode, state, size) for size in reversed(self._sizes))][self.num_captured :][:limit]
        said_at = time.monotonic()
        for job in jobs:
            job()
            if time.monotonic() - said_at >= _EVERY_S:
                said_at = time.monotonic()
                say("capturing_graphs", done=self.num_captured, total=self.num_wanted)
        torch.cuda.synchronize(words.device)

    def _extend(self, state: DeviceState, words: torch.Tensor, shape: tuple[int, int, int]) -> None:
        tokens, rows, num_decode = shape
        layout = FlatLayout.padded(tokens, rows, state.decoder.sizes.num_heads // state.decoder.sizes.num_kv_heads)
        _pad(layout, words)
        graph = ExtendGraph(state, layout, num_decode, words, self._pool)
        self._pool = graph.pool
        self.extend.insert(0, graph)

    def _decode(self, state: DeviceState, size: int) -> None:
        graph = DecodeGraph(state, size, self._pool)
        self._pool = graph.pool
        self.decode.insert(0, graph)


def _pad(layout: FlatLayout, words: torch.Tensor) -> None:
    parts = layout.split(words)
    for part, value in ((parts.codes, 0), (parts.positions, 0), (parts.slots, -1), (parts.decode_rows, -1),
                        (parts.drawing, -1), (parts.selected, 0), (parts.tiles, 0)):
        part.fill_(value)
