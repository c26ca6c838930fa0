"""All captured steps of one device, in one pool of memory: they never run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from engine.gpu.decode_graph import DecodeGraph, bare_sizes, decode_sizes
from engine.gpu.device_state import DeviceState
from engine.gpu.extend_graph import ExtendGraph, extend_shapes
from engine.gpu.flat_inputs import FlatLayout

Say = Callable[..., object]  # (event, **fields), as a logger's `info`
_EVERY_S = 5.0


class StepGraphs:
    """`decode` and `bare` by size, `extend` in the order of `extend_shapes`. Empty until `capture`."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._decode_sizes, self._bare_sizes = decode_sizes(max_num_seqs), bare_sizes(max_num_seqs)
        self._shapes = extend_shapes(max_num_seqs, max_num_batched_tokens)
        self.decode: list[DecodeGraph] = []
        self.bare: list[DecodeGraph] = []
        self.extend: list[ExtendGraph] = []

    @property
    def num_wanted(self) -> int:
        return len(self._decode_sizes) + len(self._bare_sizes) + len(self._shapes)

    @torch.inference_mode()
    def capture(self, state: DeviceState, words: torch.Tensor, say: Say, limit: int | None = None) -> None:
        """The first `limit` of them, the largest first: the others fit into its memory. `words` is the input."""
        jobs = self._jobs(state, words)[:limit]
        pool, said_at = None, time.monotonic()
        for index, job in enumerate(jobs):
            pool = job(pool)
            if time.monotonic() - said_at >= _EVERY_S:
                said_at = time.monotonic()
                say("capturing_graphs", done=index + 1, total=len(jobs))
        for graphs in (self.decode, self.bare, self.extend):
            graphs.reverse()
        torch.cuda.synchronize(words.device)

    def _jobs(self, state: DeviceState, words: torch.Tensor) -> list[Callable[[Any], Any]]:
        group = state.decoder.sizes.num_heads // state.decoder.sizes.num_kv_heads

        def extend(shape: tuple[int, int, int], pool: Any) -> Any:
            tokens, rows, num_decode = shape
            layout = FlatLayout.padded(tokens, rows, group)
            _pad(layout, words)
            self.extend.append(ExtendGraph(state, layout, num_decode, words, pool))
            return self.extend[-1].pool

        def decode(graphs: list[DecodeGraph], size: int, draws: bool, pool: Any) -> Any:
            graphs.append(DecodeGraph(state, size, pool, draws=draws))
            return graphs[-1].pool

        return [
            *(lambda pool, shape=shape: extend(shape, pool) for shape in reversed(self._shapes)),  # type: ignore[misc]
            *(lambda pool, size=size: decode(self.decode, size, True, pool)  # type: ignore[misc]
              for size in reversed(self._decode_sizes)),
            *(lambda pool, size=size: decode(self.bare, size, False, pool)  # type: ignore[misc]
              for size in reversed(self._bare_sizes))]


def _pad(layout: FlatLayout, words: torch.Tensor) -> None:
    parts = layout.split(words)
    for part, value in ((parts.codes, 0), (parts.positions, 0), (parts.slots, -1), (parts.decode_rows, -1),
                        (parts.drawing, -1), (parts.selected, 0), (parts.tiles, 0)):
        part.fill_(value)
