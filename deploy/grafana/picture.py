"""A picture of a dashboard without Grafana, for a text that shows one:

    python -m deploy.grafana.picture --prometheus http://127.0.0.1:9090 --board overview [--minutes 5] OUT.png

Reads the same JSON that Grafana loads and asks Prometheus each panel's own queries. It says in the picture who drew it.
Needs matplotlib, the extra `bench`.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from common.errors import ConfigError, ShoalError
from deploy.grafana import charts
from deploy.grafana.dashboards import FOLDER
from deploy.grafana.frame import DIM, EDGE, PANEL, Frame, new_figure
from deploy.grafana.series import PrometheusApi, Series, Span

if TYPE_CHECKING:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

_COLUMNS, _COLUMN_PX, _ROW_PX, _GAP_PX = 24, 46, 31, 8  # of Grafana's grid
_HEADER_PX, _MARGIN_PX, _TITLE_PX = 50, 10, 28
_MOST_MINUTES: Final = 24 * 60
HONEST: Final = "drawn from this board's queries by deploy/grafana/picture.py, not by Grafana"


def read_board(name: str) -> dict[str, Any]:
    """The JSON of `shoal-NAME`. Raises `ConfigError` with the names that there are."""
    names = sorted(path.stem.removeprefix("shoal-") for path in FOLDER.glob("shoal-*.json"))
    if name not in names:
        raise ConfigError(f"--board: must be one of {', '.join(names)}, got {name!r}", param="board")
    board: dict[str, Any] = json.loads((FOLDER / f"shoal-{name}.json").read_text())
    return board


def place(grid: Mapping[str, int]) -> tuple[int, int, int, int]:
    """x, y, width, height in pixels of a panel's `gridPos`; panels of one row leave a gap between them."""
    return (_MARGIN_PX + grid["x"] * _COLUMN_PX, _HEADER_PX + grid["y"] * _ROW_PX,
            grid["w"] * _COLUMN_PX - _GAP_PX, grid["h"] * _ROW_PX - _GAP_PX)


def size(board: Mapping[str, Any]) -> tuple[int, int]:
    """Width and height of the whole picture in pixels."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    return 2 * _MARGIN_PX + _COLUMNS * _COLUMN_PX - _GAP_PX, _HEADER_PX + rows * _ROW_PX + _MARGIN_PX - _GAP_PX


def ask(prometheus: PrometheusApi, board: Mapping[str, Any], span: Span) -> dict[int, list[Series]]:
    """Id of a panel → the series of all its targets."""
    return {panel["id"]: [series for target in panel["targets"] for series in prometheus.series(target, span)]
            for panel in board["panels"] if panel["type"] != "row"}


def draw(board: Mapping[str, Any], found: Mapping[int, Sequence[Series]], span: Span) -> bytes:
    """The PNG."""
    width, height = size(board)
    figure, canvas = new_figure(width, height)
    page = Frame(figure, 0, 0, width, height)
    clock = [datetime.fromtimestamp(at, UTC).strftime("%H:%M") for at in (span.start, span.end)]
    page.text(_MARGIN_PX, 18, board["title"], size=17, bold=True)
    page.text(_MARGIN_PX, 38, HONEST, size=11, color=DIM)
    page.text(width - _MARGIN_PX, 18, f"{clock[0]} to {clock[1]} UTC", size=12, ha="right")
    page.text(width - _MARGIN_PX, 38, board["description"], size=11, color=DIM, ha="right")
    for panel in board["panels"]:
        frame = Frame(figure, *place(panel["gridPos"]))
        if panel["type"] == "row":
            frame.text(2, frame.height / 2 + 2, f"▾ {panel['title']}", size=13, bold=True)
        else:
            frame.box(PANEL, EDGE)
            frame.text(9, 15, panel["title"], size=12.5, bold=True, room=frame.width - 18)
            charts.draw(frame.inner(1, _TITLE_PX, 1, 1), panel, found[panel["id"]])
    return _png(canvas)


def _png(canvas: FigureCanvasAgg) -> bytes:
    """With a palette, which a third of the bytes is enough for."""
    from PIL import Image

    drawn, out = io.BytesIO(), io.BytesIO()
    canvas.figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True)
    return out.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Exit code 2 for what was asked wrongly, 1 for a Prometheus that does not answer."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.picture", description="Draw a dashboard.")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--board", default="overview")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long before the end it begins (5)")
    parser.add_argument("--end", type=float, default=None, help="seconds since 1970 (now)")
    parser.add_argument("out", type=Path, metavar="OUT.png")
    asked = parser.parse_args(arguments)
    try:
        _require_matplotlib()
        if not 1 <= asked.minutes <= _MOST_MINUTES:
            raise ConfigError(f"--minutes: must be 1 to {_MOST_MINUTES}, got {asked.minutes:g}", param="minutes")
        board, end = read_board(asked.board), time.time() if asked.end is None else asked.end
        span = Span(end - asked.minutes * 60, end)
        with PrometheusApi(asked.prometheus) as prometheus:
            asked.out.write_bytes(draw(board, ask(prometheus, board, span), span))
    except ShoalError as error:
        print(f"picture: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'shoal[bench]'", param="out") from None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
