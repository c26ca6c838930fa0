"""What a Grafana dashboard is made of, in the few shapes that ours use; `Dashboard.json` is what Grafana loads.

A panel's place follows from the order: rows of 24 columns, filled from the left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, RED = "green", "yellow", "red"
_COLUMNS = 24


@dataclass(frozen=True)
class Query:
    """A PromQL expression and what its series are called; `{{label}}` in the legend is the label's value."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """`kind`: timeseries, stat, bargauge or heatmap. `unit` is Grafana's word for it (s, Bps, percentunit, short).

    `warn` and `bad` colour values from there on; with `low_is_bad` up to there.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    warn: float | None = None
    bad: float | None = None
    low_is_bad: bool = False
    stacked: bool = False
    maximum: float | None = None
    decimals: int | None = None

    def json(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        return {
            "id": panel_id, "type": self.kind, "title": self.title, "description": self.description,
            "datasource": DATASOURCE, "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": [self._target(i, query) for i, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []}, "options": self._options(),
        }

    def _target(self, index: int, query: Query) -> dict[str, Any]:
        target: dict[str, Any] = {
            "refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend,
            "range": self.kind != "bargauge", "instant": self.kind == "bargauge"}
        if query.exemplars:
            target["exemplar"] = True
        if self.kind == "heatmap":
            target["format"] = "heatmap"
        return target

    def _defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {"unit": self.unit, "thresholds": self._thresholds(), "min": 0}
        if self.maximum is not None:
            defaults["max"] = self.maximum
        if self.decimals is not None:
            defaults["decimals"] = self.decimals
        if self.kind == "timeseries":
            has_limits = self.warn is not None or self.bad is not None
            defaults["custom"] = {
                "drawStyle": "line", "lineWidth": 1, "fillOpacity": 25 if self.stacked else 8, "showPoints": "never",
                "spanNulls": False, "stacking": {"mode": "normal" if self.stacked else "none"},
                "thresholdsStyle": {"mode": "dashed" if has_limits else "off"}}
        return defaults

    def _thresholds(self) -> dict[str, Any]:
        first, last = (RED, GREEN) if self.low_is_bad else (GREEN, RED)
        limits = [(self.bad, YELLOW), (self.warn, last)] if self.low_is_bad else [(self.warn, YELLOW), (self.bad, last)]
        steps: list[dict[str, Any]] = [{"color": first if any(v is not None for v, _ in limits) else GREEN,
                                        "value": None}]
        steps += [{"color": color, "value": value} for value, color in limits if value is not None]
        return {"mode": "absolute", "steps": steps}

    def _options(self) -> dict[str, Any]:
        if self.kind == "timeseries":
            return {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
                    "tooltip": {"mode": "multi", "sort": "desc"}}
        if self.kind == "heatmap":
            return {"calculate": False, "yAxis": {"unit": self.unit}, "color": {"scheme": "Oranges", "steps": 64},
                    "cellGap": 1, "exemplars": {"color": "rgba(50,116,217,0.8)"}}
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "area",
                "orientation": "horizontal" if self.kind == "bargauge" else "auto"}


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """`uid` is its file's name and its address in Grafana."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    jobs: str  # regular expression of the jobs that `$job` offers
    model_values: str = ""  # the query that fills `$model_name`; empty: the dashboard has no such variable
    tags: tuple[str, ...] = field(default=("shoal",))

    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]

    def json(self) -> dict[str, Any]:
        return {
            "uid": self.uid, "title": self.title, "description": self.description, "tags": list(self.tags),
            "schemaVersion": 39, "version": 1, "editable": False, "graphTooltip": 1, "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"}, "timezone": "browser",
            "links": [{"type": "dashboards", "tags": ["shoal"], "title": "shoal", "asDropdown": True,
                       "keepTime": True, "includeVars": True}],
            "templating": {"list": self._variables()}, "panels": self._placed()}

    def _variables(self) -> list[dict[str, Any]]:
        variables: list[dict[str, Any]] = [{
            "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
            "current": {"text": "Prometheus", "value": "prometheus"}}]
        queries = [("job", "Service", f'label_values(up{{job=~"{self.jobs}"}}, job)')]
        if self.model_values:
            queries.append(("model_name", "Model", self.model_values))
        queries.append(("instance", "Instance", 'label_values(up{job=~"$job"}, instance)'))
        for name, label, query in queries:
            variables.append({
                "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "query": query, "refresh": 2,
                "multi": True, "includeAll": True, "allValue": ".*", "sort": 1,
                "current": {"text": ["All"], "value": ["$__all"]}})
        return variables

    def _placed(self) -> list[dict[str, Any]]:
        placed: list[dict[str, Any]] = []
        x = y = height = 0
        for row in self.rows:
            y, x, height = y + height, 0, 0
            placed.append({"id": len(placed) + 1, "type": "row", "title": row.title, "collapsed": False,
                           "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": y}, "panels": []})
            y += 1
            for panel in row.panels:
                if x + panel.width > _COLUMNS:
                    y, x, height = y + height, 0, 0
                placed.append(panel.json(len(placed) + 1, x, y))
                x, height = x + panel.width, max(height, panel.height)
        return placed
