"""All kernels for one model's shape, after the limits of this GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.figures import Figure
from bench.gpu_engine import ceilings as limits
from bench.gpu_engine.shapes import shape
from bench.kernels_area import attention, block_moves, draws, row_kernels
from bench.kernels_area.graph_time import Ceilings
from engine.device import find_device

_ROWS = (1, 32, 128, 256)
_CONTEXT = 1088


@torch.inference_mode()
def measure(name: str, device_name: str, *, quick: bool) -> list[Figure]:
    """`quick` takes one batch size."""
    device = torch.device(find_device(device_name).name)
    torch.cuda.set_device(device)
    found = list(limits.measure(device))
    return [*found, *_kernels(name, Ceilings(found[0].value * 1e12, found[1].value * 1e12), device, quick=quick)]


def _kernels(name: str, ceilings: Ceilings, device: torch.device, *, quick: bool) -> Iterator[Figure]:
    sizes = shape(name).decoder.sizes
    for num_rows in _ROWS[-1:] if quick else _ROWS:
        yield from row_kernels.measure(sizes, num_rows, ceilings, device)
        yield from attention.decode(sizes, num_rows, _CONTEXT, ceilings, device)
        yield from draws.measure(sizes.vocab, num_rows, ceilings, device)
        torch.cuda.empty_cache()
    for num_tokens in (2048,) if quick else (512, 2048, 8192):
        yield from attention.extend(sizes, num_tokens, ceilings, device)
    yield from row_kernels.measure(sizes, 8192, ceilings, device)
    yield from block_moves.measure(sizes, ceilings, device)
