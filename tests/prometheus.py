"""A real Prometheus that scrapes given processes, for tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from stack.ports import free_port

MISSING = "prometheus and promtool are not installed (Debian: apt-get install prometheus)"


def is_installed() -> bool:
    return bool(shutil.which("prometheus") and shutil.which("promtool"))


class RunningPrometheus:
    """`targets`: job → addresses. Scrapes, and evaluates the rules, every second."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]], rules: Path) -> None:
        self._folder, self._targets, self._rules = folder, targets, rules
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._folder.mkdir()
        shutil.copy(self._rules, self._folder / "rules.yml")
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                               for job, addresses in self._targets.items()]}))
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["prometheus", f"--config.file={self._folder}/prometheus.yml", f"--web.listen-address=127.0.0.1:{port}",
                 f"--storage.tsdb.path={self._folder}/data", "--enable-feature=exemplar-storage"],
                stdout=log, stderr=log)
        try:
            self._wait_for_scrapes()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout=30)

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return result

    def labels_by_metric(self) -> dict[str, set[str]]:
        """Every metric that was scraped or recorded, with the labels that any of its series has."""
        found: dict[str, set[str]] = {}
        for series in self.get("series", **{"match[]": '{__name__=~".+"}'}):
            found.setdefault(series.pop("__name__"), set()).update(series)
        return found

    def wait_for_new_scrapes(self, num: int = 2) -> None:
        """Return when every target has been scraped `num` times from now on; then rates see what happened before."""
        before = self._num_scrapes()
        self._until(lambda: all(n >= before[target] + num for target, n in self._num_scrapes().items()),
                    "no new scrapes")

    def wait_for(self, *metrics: str) -> None:
        """Return when each has a sample: rules are evaluated at times of their own."""
        self._until(lambda: all(self.query(name) for name in metrics), f"not all of {', '.join(metrics)} are there")

    def _num_scrapes(self) -> dict[str, int]:
        return {row["metric"]["instance"]: int(row["value"][1]) for row in self.query("count_over_time(up[1h])")}

    def _wait_for_scrapes(self) -> None:
        num_targets = sum(map(len, self._targets.values()))
        self._until(lambda: len(self.query("up == 1")) == num_targets, "not all targets are up")

    def _until(self, met: Any, otherwise: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if met():
                    return
            except OSError:
                pass  # it does not listen yet
            assert time.monotonic() < deadline, f"{otherwise}: {(self._folder / 'log').read_text()[-2000:]}"
            time.sleep(0.1)
