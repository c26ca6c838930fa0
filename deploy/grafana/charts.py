"""A panel's chart, by its type: what Grafana would show, from the same JSON and the same answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deploy.grafana.frame import DIM, GRID, TEXT, Frame
from deploy.grafana.series import Series
from deploy.grafana.units import formatted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = {"green": "#73bf69", "yellow": "#f2cc0c", "red": "#f2495c"}
_LINES: Final = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#b877d9", "#8ab8ff", "#f2495c", "#c0d8ff")
_ROW_PX: Final = 15  # of the legend
_DIGIT_PX: Final = 6.5  # of a number in it, at most
_MOST_ROWS: Final = 4
_CORNER: Final = 0.08  # of the time axis: a label there would run into the one of the value axis
Panel = Mapping[str, Any]


def draw(frame: Frame, panel: Panel, found: Sequence[Series]) -> None:
    """Into `frame`, below the title. `found`: the series of all targets; none is said in words."""
    drawn = [series for series in found if not math.isnan(series.highest)]
    if not drawn:
        frame.text(frame.width / 2, frame.height / 2, "No data", size=13, color=DIM, ha="center")
        return
    _CHARTS[panel["type"]](frame, panel, drawn)


def threshold_color(panel: Panel, value: float) -> str:
    """Of the last step that the value has reached."""
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLORS[reached[-1]]


def stat(frame: Frame, panel: Panel, found: Sequence[Series]) -> None:
    """The newest value, large, on the colour of its threshold, over a line of how it came there."""
    series = found[0]
    frame.box(_darker(threshold_color(panel, series.last)))
    if len(series.values) > 1:
        axes = frame.inner(1, frame.height * 0.55, 1, 1).axes()
        axes.set_axis_off()
        axes.set_xlim(series.times[0], series.times[-1])
        axes.set_ylim(0, series.highest * 1.15 or 1)
        axes.fill_between(series.times, series.values, color="white", alpha=0.18, linewidth=0)
        axes.plot(series.times, series.values, color="white", alpha=0.45, linewidth=1)
    frame.text(frame.width / 2, frame.height * 0.42, _number(panel, series.last), size=28, color="white", bold=True,
               ha="center")


def timeseries(frame: Frame, panel: Panel, found: Sequence[Series]) -> None:
    """Lines over time, dashed lines at the thresholds, and a legend with the last and, with room, the highest value."""
    columns = 1 if len(found) <= 3 else 2
    rows = min(math.ceil(len(found) / columns), _MOST_ROWS)
    axes = frame.inner(58, 4, 10, 26 + (rows + 1) * _ROW_PX).axes()
    _time_axis(axes, found[0].times)
    custom = panel["fieldConfig"]["defaults"]["custom"]
    stacked = custom["stacking"]["mode"] == "normal"
    top = _plot_stacked(axes, found) if stacked else _plot_lines(axes, found, custom["fillOpacity"] / 100)
    _value_axis(axes, panel, top)
    if custom["thresholdsStyle"]["mode"] == "dashed":
        for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]:
            axes.axhline(step["value"], color=COLORS[step["color"]], linewidth=0.9, linestyle=(0, (5, 4)))
    _legend(frame.inner(8, frame.height - (rows + 1) * _ROW_PX - 4, 8, 4), panel, found, columns, rows)


def heatmap(frame: Frame, panel: Panel, found: Sequence[Series]) -> None:
    """Each band between two bounds of the histogram, the more requests the brighter."""
    ordered = sorted(found, key=lambda series: float(series.labels["le"]))
    counts = np.nan_to_num(np.array([series.values for series in ordered]))  # [bound, time], cumulative
    bands = np.maximum(np.diff(counts, axis=0, prepend=0.0), 0)
    used = np.flatnonzero(bands.sum(axis=1))
    first, last = (int(used[0]), int(used[-1])) if used.size else (0, len(ordered) - 1)
    axes = frame.inner(58, 4, 10, 26).axes()
    times = ordered[0].times
    shown = np.where(bands > 0, bands, np.nan)[first : last + 1]
    axes.pcolormesh(_edges(times), np.arange(last - first + 2), shown, cmap="inferno", vmin=-0.25 * bands.max(),
                    edgecolors="none", snap=True)
    _time_axis(axes, times)
    axes.set_ylim(0, last - first + 1)
    axes.set_yticks(np.arange(1, last - first + 2), [_number(panel, float(series.labels["le"])) for series in
                                                    ordered[first : last + 1]])


def bargauge(frame: Frame, panel: Panel, found: Sequence[Series]) -> None:
    """A bar for each series, the name left of it and the value right of it."""
    row = min(30.0, frame.height / len(found))
    most = max(series.last for series in found) or 1.0
    for number, series in enumerate(found):
        line = frame.inner(8, number * row, 8, frame.height - (number + 1) * row)
        color = threshold_color(panel, series.last)
        line.text(0, row / 2, series.name, size=11, room=line.width * 0.38)
        line.text(line.width, row / 2, _number(panel, series.last), size=11, color=color, ha="right")
        room = line.width * 0.42
        bar = line.inner(line.width * 0.4, 5, line.width * 0.6 - max(2.0, room * series.last / most), 5)
        bar.box(color)


_CHARTS: Final[Mapping[str, Callable[[Frame, Panel, Sequence[Series]], None]]] = {
    "stat": stat, "timeseries": timeseries, "heatmap": heatmap, "bargauge": bargauge}


def _plot_lines(axes: Axes, found: Sequence[Series], opacity: float) -> float:
    for number, series in enumerate(found):
        color = _LINES[number % len(_LINES)]
        axes.plot(series.times, series.values, color=color, linewidth=1.2)
        axes.fill_between(series.times, series.values, color=color, alpha=opacity, linewidth=0)
    return max(series.highest for series in found)


def _plot_stacked(axes: Axes, found: Sequence[Series]) -> float:
    base = np.zeros(len(found[0].times))
    for number, series in enumerate(found):
        color, top = _LINES[number % len(_LINES)], base + np.nan_to_num(np.array(series.values))
        axes.fill_between(series.times, base, top, color=color, alpha=0.3, linewidth=0)
        axes.plot(series.times, top, color=color, linewidth=1.2)
        base = top
    return float(base.max())


def _time_axis(axes: Axes, times: Sequence[float]) -> None:
    """Four or so moments of the clock, in UTC."""
    span = times[-1] - times[0]
    gap = next((g for g in (15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600) if span / g <= 5), 86400)
    first = math.ceil((times[0] + span * _CORNER) / gap) * gap
    ticks = np.arange(first, times[-1] + 1, gap)
    form = "%H:%M:%S" if gap < 60 else "%H:%M"
    axes.set_xlim(times[0], max(times[-1], times[0] + 1))
    axes.set_xticks(ticks, [datetime.fromtimestamp(float(tick), UTC).strftime(form) for tick in ticks])
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _value_axis(axes: Axes, panel: Panel, top: float) -> None:
    from matplotlib.ticker import MaxNLocator

    most = panel["fieldConfig"]["defaults"].get("max") or top * 1.1 or 1.0
    axes.set_ylim(0, most)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    even = 1024.0 ** int(math.log(most, 1024)) if unit == "bytes" and most > 1 else 1.0
    ticks = [float(tick) * even for tick in MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, most / even)
             if tick * even <= most]
    axes.set_yticks(ticks, [formatted(tick, unit) for tick in ticks])


def _legend(frame: Frame, panel: Panel, found: Sequence[Series], columns: int, rows: int) -> None:
    """Two columns have no room for the highest values."""
    shown = [("last", 1.0)] if columns == 2 else [("last", 0.76), ("max", 1.0)]
    width = frame.width / columns
    longest = max(len(_number(panel, value)) for series in found for value in (series.last, series.highest))
    for column in range(columns):
        here = frame.inner(column * width, 0, frame.width - (column + 1) * width + 10 * (columns - 1 - column), 0)
        for word, right in shown:
            here.text(here.width * right, _ROW_PX / 2, word, size=10, color=DIM, ha="right")
        for row, series in enumerate(found[column * rows : (column + 1) * rows]):
            y = (row + 1.5) * _ROW_PX
            color = _LINES[(column * rows + row) % len(_LINES)]
            here.inner(0, y - 1.5, here.width - 9, here.height - y - 1.5).box(color, radius=1)
            here.text(14, y, series.name or panel["title"], size=11,
                      room=here.width * shown[0][1] - longest * _DIGIT_PX - 18)
            for (_, right), value in zip(shown, (series.last, series.highest), strict=False):
                here.text(here.width * right, y, _number(panel, value), size=10.5, color=TEXT, ha="right")
    if len(found) > columns * rows:
        frame.text(0, _ROW_PX / 2, f"{columns * rows} of {len(found)}", size=10, color=DIM)


def _number(panel: Panel, value: float) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    return formatted(value, defaults["unit"], defaults.get("decimals"))


def _edges(times: Sequence[float]) -> list[float]:
    """Each time is the end of its cell."""
    step = times[1] - times[0] if len(times) > 1 else 1.0
    return [times[0] - step, *times]


def _darker(color: str) -> str:
    """For a background with white text on it."""
    return "#" + "".join(f"{int(int(color[i : i + 2], 16) * 0.55):02x}" for i in (1, 3, 5))
