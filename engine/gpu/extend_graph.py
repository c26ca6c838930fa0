"""A captured step with chunks: up to so many tokens in up to so many rows, padded.

A short extend takes the GPU a few milliseconds, and launching its 400 kernels one by one takes a CPU as long.
States: captured → replayed any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.gpu.device_state import DeviceState
from engine.gpu.flat_inputs import FlatLayout
from engine.gpu.flat_step import drawing_logits, forward

# So close that padding costs less than a tile of a matrix product; above, launches hide behind the work.
_TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
_PROMPTS = 16  # rows of the graphs in which nothing decodes
_DECODING = (64, 1 << 16)  # and of those in which rows decode: a few, or all there are


class ExtendGraph:
    """Reads `layout` of `words`; gives `drawn` [layout.num_rows] int64 and `logits` as a decode graph does.

    `num_decode` rows may decode.
    """

    def __init__(
        self, state: DeviceState, layout: FlatLayout, num_decode: int, words: torch.Tensor, pool: Any
    ) -> None:
        """Compiles what is not compiled yet. `words` say padding now. `pool`: as for `DecodeGraph`."""
        self.layout, self.num_decode = layout, num_decode
        self.parts = layout.split(words)
        self.logits = torch.empty(0)  # [layout.num_rows, vocab]
        self.drawn = torch.zeros(layout.num_rows, dtype=torch.int64, device=words.device)
        self._step(state)
        torch.cuda.synchronize(words.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._step(state)
        self.pool = self._graph.pool()

    def replay(self) -> None:
        self._graph.replay()

    def _step(self, state: DeviceState) -> None:
        x, residual = forward(state, self.parts, self.num_decode)
        self.logits = drawing_logits(state, self.parts, x, residual, self.layout.num_rows)
        state.draw(self.logits, self.parts.drawing, self.drawn)
        state.advance(self.parts.drawing, self.drawn)


def extend_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[tuple[int, int, int]]:
    """(tokens, rows, rows that may decode) of the graphs that are worth their memory, the smallest first."""
    shapes = []
    for tokens in (size for size in _TOKENS if size <= max_num_batched_tokens):
        shapes.append((tokens, min(_PROMPTS, max_num_seqs), 0))
        shapes += ((tokens, rows, rows) for rows in sorted({min(rows, tokens, max_num_seqs) for rows in _DECODING}))
    return shapes


def least_fitting(
    graphs: Sequence[ExtendGraph], num_tokens: int, num_rows: int, num_decode: int
) -> ExtendGraph | None:
    """The first that holds so much; `graphs` are in the order of `extend_shapes`. None: too much for all."""
    for graph in graphs:
        if (num_tokens <= graph.layout.num_tokens and num_rows <= graph.layout.num_rows
                and (num_decode == 0 or num_decode <= graph.num_decode)):
            return graph
    return None
