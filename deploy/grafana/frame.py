"""A rectangle of a picture in pixels from its upper left corner, and what can be put into it.

matplotlib counts from below in fractions of the figure; nothing else here does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

PAGE, PANEL, EDGE = "#111217", "#181b1f", "#2c3037"
TEXT, DIM, GRID = "#d8d9da", "#9a9ba3", "#2a2d33"
DPI: Final = 100
_POINT_PX: Final = 72 / DPI
_LETTER: Final = 0.61  # mean width of a letter over the font's height


@dataclass(frozen=True)
class Frame:
    figure: Figure
    x: float
    y: float
    width: float
    height: float

    def inner(self, left: float, top: float, right: float, bottom: float) -> Frame:
        return Frame(self.figure, self.x + left, self.y + top, self.width - left - right, self.height - top - bottom)

    def box(self, color: str, edge: str = "none", radius: float = 3) -> None:
        from matplotlib.patches import FancyBboxPatch

        left, bottom, width, height = self._fractions()
        whole_px = self.figure.get_figwidth() * DPI
        self.figure.add_artist(FancyBboxPatch(
            (left, bottom), width, height, boxstyle=f"round,pad=0,rounding_size={radius / whole_px:.6f}",
            mutation_aspect=self.figure.get_figwidth() / self.figure.get_figheight(), facecolor=color, edgecolor=edge,
            linewidth=0.8, zorder=0))

    def text(self, x: float, y: float, words: str, *, size: float = 12, color: str = TEXT, bold: bool = False,
             ha: str = "left", va: str = "center", room: float | None = None) -> None:
        """At (x, y) from the upper left corner; shortened to `room` pixels."""
        if room is not None:
            words = shortened(words, int(room / (size * _LETTER)))
        whole_w, whole_h = self.figure.get_figwidth() * DPI, self.figure.get_figheight() * DPI
        self.figure.text((self.x + x) / whole_w, 1 - (self.y + y) / whole_h, words, fontsize=size * _POINT_PX,
                         color=color, fontweight="bold" if bold else "normal", ha=ha, va=va, parse_math=False)

    def axes(self) -> Axes:
        """Dark axes that fill the frame; labels of the ticks lie outside of it."""
        axes = self.figure.add_axes(self._fractions(), facecolor="none")
        axes.tick_params(colors=DIM, labelsize=10 * _POINT_PX, length=0, pad=3)
        axes.spines[:].set_visible(False)
        return axes

    def _fractions(self) -> tuple[float, float, float, float]:
        whole_w, whole_h = self.figure.get_figwidth() * DPI, self.figure.get_figheight() * DPI
        return (self.x / whole_w, 1 - (self.y + self.height) / whole_h, self.width / whole_w, self.height / whole_h)


def shortened(words: str, most: int) -> str:
    """To `most` letters, by "…" in the middle: what tells names apart often stands at the end."""
    if len(words) <= most:
        return words
    tail = max(0, most - 1) * 2 // 5
    return words[: max(0, most - 1 - tail)] + "…" + words[len(words) - tail :]


def new_figure(width: float, height: float) -> tuple[Figure, FigureCanvasAgg]:
    """An empty dark page of that many pixels, and the canvas that it needs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAGE)
    return figure, FigureCanvasAgg(figure)
