"""Numbers as Grafana writes them, in the units that our panels use: three digits, and a prefix where it is short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_Scale = Sequence[tuple[float, str]]  # the smallest number that the unit is used for, the unit; rising
_SECONDS: Final[_Scale] = ((1e-6, " µs"), (1e-3, " ms"), (1.0, " s"), (60.0, " min"), (3600.0, " hour"))
_BYTES: Final[_Scale] = ((1.0, " B"), (2.0**10, " KiB"), (2.0**20, " MiB"), (2.0**30, " GiB"), (2.0**40, " TiB"))
_PER_SECOND: Final[_Scale] = ((1.0, " B/s"), (1e3, " kB/s"), (1e6, " MB/s"), (1e9, " GB/s"))
_COUNTS: Final[_Scale] = ((1.0, ""), (1e3, " K"), (1e6, " Mil"), (1e9, " Bil"))
_SCALES: Final = {"s": _SECONDS, "bytes": _BYTES, "Bps": _PER_SECOND, "short": _COUNTS}


def formatted(value: float, unit: str, decimals: int | None = None) -> str:
    """`formatted(0.0123, "s")` is "12.3 ms". NaN is "–". A unit that is not known here is written behind the number."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "percentunit":
        return f"{_digits(value * 100, decimals)}%"
    if unit == "reqps":
        return f"{_digits(value, decimals)} req/s"
    scale = _SCALES.get(unit)
    if scale is None:
        return f"{_digits(value, decimals)} {unit}"
    return _scaled(value, scale, decimals)


def _scaled(value: float, scale: _Scale, decimals: int | None) -> str:
    if value == 0:
        return f"0{dict(scale)[1.0]}"
    size = abs(value) * (1 + 1e-9)
    if decimals is None:
        size = float(f"{size:.3g}")  # 0.99999 s is written as 1 s, not as 1000 ms
    divisor, name = next(((d, n) for d, n in reversed(scale) if size >= d), scale[0])
    return f"{_digits(value / divisor, decimals)}{name}"


def _digits(value: float, decimals: int | None) -> str:
    """As many decimals as make three digits, without zeros at the end, or just as many as asked for."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    size = abs(value)
    places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 3
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
