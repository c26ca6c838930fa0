"""The picture of a dashboard, drawn from what a small server answers as Prometheus does."""

from __future__ import annotations

import json
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from PIL import Image

from deploy.grafana import picture
from deploy.grafana.charts import threshold_color
from deploy.grafana.frame import shortened
from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.series import SCRAPE_S, PrometheusApi, Span, filled, legend

END = 1_700_000_000.0
BOARD = Dashboard("shoal-tiny", "tiny", "One panel of each type.", (
    Row("First", (
        Panel("Now", "A stat.", (Query("up"),), "percentunit", "stat", 6, 5, bad=.95, warn=.99, low_is_bad=True),
        Panel("Lines", "Two lines.", (Query('rate(a{job=~"$job"}[$__rate_interval])', "{{job}}"),), "s", width=9,
              warn=1),
        Panel("Stack", "Two areas.", (Query("a", "{{job}}"),), "bytes", width=9, stacked=True))),
    Row("Second", (
        Panel("Heat", "Buckets.", (Query("buckets"),), "s", "heatmap", 12),
        Panel("Bars", "Bars.", (Query("a", "{{job}}"),), "short", "bargauge", 6),
        Panel("Quiet", "Nothing.", (Query("nothing"),), width=6)))), jobs="decode")


class FakePrometheus(ThreadingHTTPServer):
    """Answers `nothing` with no series, `buckets` with a histogram, `wrong` with an error, all else with two jobs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, parameters: dict[str, str]) -> dict[str, Any]:
        self.asked.append((path, parameters))
        expr = parameters["query"]
        if expr == "wrong":
            return {"status": "error", "error": "parse error"}
        labels: list[dict[str, str]] = [{"__name__": "a", "job": job} for job in ("decode", "prefill")]
        if expr == "buckets":
            labels = [{"le": le} for le in ("+Inf", "0.1", "1", "0.5")]
        found = [{"metric": each, **_values(path, parameters, n + 1)} for n, each in enumerate(labels)]
        return {"status": "success", "data": {"result": [] if expr == "nothing" else found}}


def _values(path: str, parameters: dict[str, str], value: int) -> dict[str, Any]:
    if path.endswith("/query"):
        return {"value": [float(parameters["time"]), str(value)]}
    first, last, step = (float(parameters[name]) for name in ("start", "end", "step"))
    times = [first + n * step for n in range(int((last - first) / step) + 1)]
    return {"values": [[time, "NaN" if n == 1 else str(value)] for n, time in enumerate(times) if n != 2]}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        answer = cast(FakePrometheus, self.server).answer(self.path, dict(urllib.parse.parse_qsl(body)))
        self.send_response(400 if answer["status"] == "error" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[FakePrometheus]:
    with FakePrometheus() as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(picture, "FOLDER", tmp_path)
    (tmp_path / "shoal-tiny.json").write_text(json.dumps(BOARD.json()))
    return BOARD.json()


def test_a_board_with_a_panel_of_each_type_becomes_a_png_of_its_grids_size(
        server: FakePrometheus, board: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    arguments = ["--prometheus", server.url, "--board", "tiny", "--minutes", "2", "--end", str(END), str(out)]
    assert picture.main(arguments) == 0
    with Image.open(out) as drawn:
        assert (drawn.format, drawn.size) == ("PNG", picture.size(board))
        colors = drawn.convert("RGB").getcolors(1 << 20)
    assert colors is not None
    assert len(colors) > 50, "more than empty boxes"
    assert {path for path, _ in server.asked} == {"/api/v1/query", "/api/v1/query_range"}


def test_panels_lie_as_their_places_in_the_grid_do_and_none_covers_another(board: dict[str, Any]) -> None:
    width, height = picture.size(board)
    places = [picture.place(panel["gridPos"]) for panel in board["panels"]]
    for x, y, w, h in places:
        assert x >= 0
        assert y >= 0
        assert x + w < width
        assert y + h < height
    for i, (x, y, w, h) in enumerate(places):
        for x2, y2, w2, h2 in places[i + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
    now, lines = places[1], places[2]
    assert lines[0] > now[0] + now[2]
    assert lines[1] == now[1]
    assert lines[2] > now[2]


def test_a_range_is_asked_for_at_whole_steps_and_its_holes_are_gaps(server: FakePrometheus) -> None:
    span = Span(END - 60, END)
    with PrometheusApi(server.url) as prometheus:
        decode, prefill = prometheus.series({"expr": "a", "legendFormat": "of {{job}}"}, span)
    assert (decode.name, prefill.name) == ("of decode", "of prefill")
    assert decode.times == tuple(END - 60 + 5 * n for n in range(13))
    assert [value == value for value in decode.values[:4]] == [True, False, False, True], "NaN, and no point"
    assert (decode.last, prefill.last, prefill.highest) == (1, 2, 2)


def test_variables_become_all_and_the_rate_interval_is_what_grafana_makes_it() -> None:
    minute, day = Span(END - 60, END), Span(END - 86_400, END)
    assert filled('rate(a{job=~"$job",instance=~"$instance"}[$__rate_interval])', minute) == (
        'rate(a{job=~".*",instance=~".*"}[20s])')
    assert filled('a{m="$model_name"}[$__rate_interval]', day) == 'a{m=".*"}[295s]'
    provisioned = Path(picture.__file__).parent / "provisioning" / "datasources"
    (source,) = yaml.safe_load(next(provisioned.glob("*.y*ml")).read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == f"{SCRAPE_S}s"


def test_a_legend_is_its_text_with_labels_or_the_labels_themselves() -> None:
    assert legend("{{job}} at {{ instance }}{{nothing}}", {"job": "decode", "instance": "x:1"}) == "decode at x:1"
    assert legend("", {"job": "decode", "code": "7"}) == "code=7, job=decode"
    assert shortened("decode 127.0.0.1:40777", 14) == "decode 1…40777"
    assert shortened("decode", 6) == "decode"


def test_a_value_has_the_colour_of_the_last_threshold_that_it_reaches() -> None:
    stat = BOARD.json()["panels"][1]
    assert len({threshold_color(stat, value) for value in (.5, .97, 1)}) == 3
    assert threshold_color(stat, .5) == "#f2495c"
    assert threshold_color(stat, .95) == threshold_color(stat, .97)


def test_a_wrong_board_a_wrong_time_and_a_silent_server_are_named(
        server: FakePrometheus, board: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.png")
    assert picture.main(["--prometheus", server.url, "--board", "no", out]) == 2
    assert "--board: must be one of tiny" in capsys.readouterr().err
    assert picture.main(["--prometheus", server.url, "--board", "tiny", "--minutes", "0.5", out]) == 2
    assert "--minutes: must be 1 to 1440" in capsys.readouterr().err
    assert picture.main(["--prometheus", "http://127.0.0.1:9", "--board", "tiny", out]) == 1
    assert "--prometheus: http://127.0.0.1:9 does not answer" in capsys.readouterr().err
    with PrometheusApi(server.url) as prometheus, pytest.raises(Exception, match="refuses wrong: parse error"):
        prometheus.series({"expr": "wrong"}, Span(END - 60, END))
    assert not Path(out).exists()


def test_without_matplotlib_the_extra_is_named(
        board: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert picture.main(["--prometheus", "http://127.0.0.1:9", "--board", "tiny", "x.png"]) == 2
    assert "shoal[bench]" in capsys.readouterr().err
