"""A picture of a run: TTFT and ITL over time, how they are distributed, and throughput by second.

Needs matplotlib, the extra `bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.serve.record import Outcome, RequestRecord
from bench.serve.summary import tokens_by_second, values_ms
from common.errors import ConfigError

_LEAST_MS: Final = 0.1  # of the logarithmic axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """Raises `ConfigError` that names the extra; asked before the run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'shoal[bench]'", param="plot") from None


def plot(path: Path, title: str, records: Sequence[RequestRecord]) -> None:
    """Write a PNG. Times are seconds since the run began."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [record for record in records if record.outcome is Outcome.COMPLETED]
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    (ttft, itl), (spread, rate) = figure.subplots(2, 2)
    _ttft_over_time(ttft, done, [r for r in records if r.outcome not in (Outcome.COMPLETED, Outcome.NOT_SENT)])
    _itl_over_time(itl, done)
    _percentiles(spread, done)
    _throughput(rate, done)
    figure.savefig(path, dpi=110, format="png")


def _ttft_over_time(axes: Axes, done: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> None:
    axes.scatter([r.sent_s for r in done], [r.ttft_s * 1000 for r in done], s=10, label="completed")
    if others:
        axes.scatter([r.sent_s for r in others], [0.0] * len(others), s=24, marker="x", color="tab:red",
                     label="not completed")
        axes.legend()
    _label(axes, "TTFT", "sent at, s", "ms")


def _itl_over_time(axes: Axes, done: Sequence[RequestRecord]) -> None:
    times = [at for record in done for at in record.chunk_s[1:]]
    gaps = [gap * 1000 for record in done for gap in record.itls_s]
    axes.scatter(times, gaps, s=3, alpha=0.4)
    _label(axes, "ITL", "at, s", "ms")


def _percentiles(axes: Axes, done: Sequence[RequestRecord]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    values = values_ms(done)
    for name in ("ttft", "itl", "tpot"):
        if values[name]:
            levels = np.linspace(0, 100, 201)
            axes.plot(levels, np.maximum(np.percentile(values[name], levels), _LEAST_MS), label=name.upper())
    if any(values.values()):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend()
    _label(axes, "percentiles", "percentile", "ms")


def _throughput(axes: Axes, done: Sequence[RequestRecord]) -> None:
    tokens = tokens_by_second(done)
    axes.step(range(len(tokens)), tokens, where="post", label="output tokens/s")
    running = [sum(r.sent_s <= second + 0.5 < r.end_s for r in done) for second in range(len(tokens))]
    axes.step(range(len(tokens)), running, where="post", label="requests under way")
    axes.legend()
    _label(axes, "throughput", "s", "")


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
