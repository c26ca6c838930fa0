"""The dashboards and rules as files: fresh, described, and with a runbook for every alert."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana.dashboards import DASHBOARDS, FOLDER, rendered, stale
from tests import prometheus
from tests.promql import faults, names

DEPLOY = FOLDER.parents[1]
RULES = DEPLOY / "prometheus" / "rules.yml"
needs_prometheus = pytest.mark.skipif(not prometheus.is_installed(), reason=prometheus.MISSING)


def test_the_reader_of_expressions_finds_metrics_matchers_and_groupings() -> None:
    found = names('sum by (job, le) (rate(a_total{x="y{z}",w!~"v"}[5m] offset 1h)) / on (k) group_left () b:c > bool 2 '
                  'and absent(up{job="decode"} == 1) or vector(0)')
    assert found.matched == {"a_total": {"x", "w"}, "b:c": set(), "up": {"job"}}
    assert found.grouped == {"job", "le", "k"}


def test_a_metric_a_matcher_and_a_grouping_that_are_not_there_are_found() -> None:
    labels = {"a_total": {"job", "code"}, "up": {"job"}}
    assert faults('sum by (code) (rate(a_total{job="x"}[5m])) / on () group_left () up', labels) == []
    assert faults("rate(b_total[5m])", labels) == ["no metric b_total"]
    assert faults('up{code="x"}', labels) == ["up has no label code"]
    assert faults("sum by (model) (a_total)", labels) == ["groups by model, which nothing has"]


def test_the_json_is_what_the_python_says() -> None:
    assert not stale(), "run python -m deploy.grafana.dashboards"
    assert len(rendered()) == len(list(FOLDER.glob("*.json"))) == 6


def test_a_changed_or_a_strange_file_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.grafana.dashboards.FOLDER", tmp_path)
    for path, text in rendered().items():
        path.write_text(text)
    assert not stale()
    changed, strange = tmp_path / "shoal-router.json", tmp_path / "other.json"
    changed.write_text(changed.read_text().replace("Refused", "refused"))
    strange.write_text("{}")
    assert stale() == [changed, strange]


def test_every_panel_has_a_unit_a_description_and_a_place_of_its_own() -> None:
    for board in DASHBOARDS:
        taken: set[tuple[int, int]] = set()
        for panel in board.json()["panels"]:
            spot = panel["gridPos"]
            cells = {(x, y) for x in range(spot["x"], spot["x"] + spot["w"])
                     for y in range(spot["y"], spot["y"] + spot["h"])}
            assert not cells & taken, f"{board.uid}: {panel['title']} overlaps"
            assert spot["x"] + spot["w"] <= 24
            taken |= cells
            if panel["type"] != "row":
                assert panel["description"].endswith("."), panel["title"]
                assert panel["fieldConfig"]["defaults"]["unit"]
                assert panel["targets"]


def test_every_dashboard_has_the_variables_that_its_expressions_use() -> None:
    for board in DASHBOARDS:
        have = {variable["name"] for variable in board.json()["templating"]["list"]}
        assert {"datasource", "job", "instance"} <= have
        for panel in board.panels():
            for query in panel.queries:
                assert "$model_name" not in query.expr or "model_name" in have, f"{board.uid}: {panel.title}"


def test_a_legend_names_only_labels_that_the_expression_keeps() -> None:
    for board in DASHBOARDS:
        for panel in board.panels():
            for query in panel.queries:
                kept = names(query.expr).grouped | ({"job", "instance"} if not names(query.expr).grouped else set())
                used = {part.split("}}")[0] for part in query.legend.split("{{")[1:]}
                assert used <= kept | ({"model"} if "shoal:slo_bad" in query.expr else set()), (panel.title, query)


def test_every_alert_has_a_severity_a_summary_and_a_runbook() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    assert len(alerts) >= 12
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["annotations"]["summary"]
        assert len(alert["annotations"]["runbook"]) > 60, alert["alert"]


@needs_prometheus
def test_the_rules_do_what_their_tests_say() -> None:
    for command in (["check", "config", "prometheus.yml"], ["check", "rules", "rules.yml"],
                    ["test", "rules", "rules_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_provisioning_points_at_what_is_there() -> None:
    folder = FOLDER.parent / "provisioning"
    datasource = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    assert datasource["uid"] == "prometheus"
    assert yaml.safe_load((folder / "dashboards" / "shoal.yaml").read_text())["providers"][0]["type"] == "file"
    for path in FOLDER.glob("*.json"):
        assert json.loads(path.read_text())["uid"] == path.stem


def test_the_scrape_config_names_every_service_of_ours_at_one_port() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs if "dns_sd_configs" in job}
    assert set(found) == {"gateway", "tokenizer", "router", "prefill", "decode", "kvstore"}
    assert {job["port"] for job in found.values()} == {9400}
    with_gpu = ("prefill", "decode")
    assert all(job["names"] == ([name, f"{name}-gpu"] if name in with_gpu else [name]) for name, job in found.items())
