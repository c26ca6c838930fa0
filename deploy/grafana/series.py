"""What Prometheus answers to a panel's queries, over its HTTP API.

Source of the API: https://prometheus.io/docs/prometheus/latest/querying/api/; of `$__rate_interval`: Grafana's
Prometheus data source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx2

from common.errors import ConfigError, Unavailable

SCRAPE_S: Final = 5  # timeInterval of provisioning/datasources
_POINTS: Final = 300  # at most, of a panel
_TIMEOUT_S: Final = 20.0
_ALL: Final = ".*"  # allValue of the dashboards' variables


@dataclass(frozen=True)
class Series:
    """One line of a panel: `times` are seconds since 1970, NaN in `values` is a gap."""

    name: str
    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """The newest number; NaN when there is none. Grafana calls it lastNotNull."""
        return next((v for v in reversed(self.values) if not math.isnan(v)), math.nan)

    @property
    def highest(self) -> float:
        return max((v for v in self.values if not math.isnan(v)), default=math.nan)


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, seconds since 1970, in steps of a whole number of scrapes."""

    start: float
    end: float

    @property
    def step_s(self) -> int:
        return SCRAPE_S * max(1, math.ceil((self.end - self.start) / _POINTS / SCRAPE_S))

    @property
    def rate_interval_s(self) -> int:
        return max(self.step_s + SCRAPE_S, 4 * SCRAPE_S)

    def times(self) -> list[float]:
        """Of the points, on multiples of the step as Grafana has them."""
        first, last = math.ceil(self.start / self.step_s), math.floor(self.end / self.step_s)
        return [float(n * self.step_s) for n in range(first, last + 1)]


class PrometheusApi:
    """Asks `url` while entered. Raises `Unavailable` when it does not answer, `ConfigError` when it refuses."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._http = httpx2.Client(timeout=_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self._http.close()

    def series(self, target: Mapping[str, Any], span: Span) -> list[Series]:
        """Of one target of a panel's JSON: with `instant` one value each, else a value for each time of `span`."""
        expr = filled(target["expr"], span)
        times = span.times()
        if target.get("instant"):
            found = self._result("query", {"query": expr, "time": times[-1]})
        else:
            found = self._result("query_range", {
                "query": expr, "start": times[0], "end": times[-1], "step": span.step_s})
        return [_series(each, target.get("legendFormat", ""), times) for each in found]

    def _result(self, path: str, parameters: Mapping[str, str | float]) -> list[dict[str, Any]]:
        try:
            answer = self._http.post(f"{self._url}/api/v1/{path}", data={k: str(v) for k, v in parameters.items()})
            body = answer.json()
            if body["status"] == "success":
                result: list[dict[str, Any]] = body["data"]["result"]
                return result
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"--prometheus: {self._url} does not answer as Prometheus does: {error}") from None
        raise ConfigError(f"Prometheus refuses {parameters['query']}: {body.get('error')}", param="query")


def filled(expr: str, span: Span) -> str:
    """The expression with the dashboard's variables as they are at first: All."""
    expr = expr.replace("$__rate_interval", f"{span.rate_interval_s}s")
    return re.sub(r"\$(job|instance|model_name)\b", _ALL, expr)


def legend(text: str, labels: Mapping[str, str]) -> str:
    """`{{label}}` replaced by its value; without a text, the labels themselves."""
    if not text:
        return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), text)


def _series(found: Mapping[str, Any], text: str, times: list[float]) -> Series:
    labels = {name: value for name, value in found["metric"].items() if name != "__name__"}
    points = found["values"] if "values" in found else [(times[-1], found["value"][1])]
    at = {round(float(time)): float(value) for time, value in points}
    shown = times if "values" in found else times[-1:]
    return Series(legend(text, labels), labels, tuple(shown), tuple(at.get(round(time), math.nan) for time in shown))
