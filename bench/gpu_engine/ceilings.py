"""What the GPU can do at most, measured in the same run: copies and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.figures import Figure

_COPY_BYTES = 4 << 30
_SIZE = 8192
_ROUNDS = 9


def measure(device: torch.device) -> Iterator[Figure]:
    yield Figure("copy, bytes read and written", 2 * _COPY_BYTES / _copy_s(device) / 1e12, "TB/s")
    yield Figure(f"matrix product of {_SIZE}, bfloat16", 2 * _SIZE**3 / _product_s(device) / 1e12, "TFLOP/s")
    torch.cuda.empty_cache()


def _copy_s(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _median_s(lambda: target.copy_(source))


def _product_s(device: torch.device) -> float:
    a, b = (torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return _median_s(lambda: torch.matmul(a, b, out=out))


def _median_s(act: Callable[[], object]) -> float:
    act()
    times: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        act()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[_ROUNDS // 2]
