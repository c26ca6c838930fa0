from __future__ import annotations

import io
import json
import logging

import pytest

from stack.console import Console, read_line


@pytest.mark.parametrize(("line", "level"), [
    ('{"event": "worker_lost", "level": "warning"}', logging.WARNING),
    ('{"event": "ready", "level": "info"}', logging.INFO),
    ('{"event": "x", "level": "error"}', logging.ERROR),
    ("[7548] 2026/11/30 23:28:56.060277 [ERR] broken", logging.ERROR),
    ("[7548] 2026/11/30 23:28:56.060277 [INF] fine", logging.INFO),
    ("7550:M 30 Nov 2026 23:28:47.613 # Fatal error loading the DB", logging.WARNING),
    ("7550:M 30 Nov 2026 23:28:47.613 # WARNING Memory overcommit must be enabled, or saves may fail", logging.INFO),
    ("7550:M 30 Nov 2026 23:28:47.613 * Ready to accept connections tcp", logging.INFO),
    ("plain words", logging.INFO),
    ("{not json", logging.INFO),
    ('{"no": "event"}', logging.INFO),
])
def test_the_level_of_a_line_is_found_in_every_format(line: str, level: int) -> None:
    assert read_line(line)[0] == level


def test_a_json_event_reads_as_clock_level_event_and_facts() -> None:
    line = json.dumps({"event": "lease_lost", "level": "warning", "timestamp": "2026-11-30T23:28:56.1Z", "lease": 2,
                       "service": "decode", "exception": "Traceback"})
    assert read_line(line)[1] == "23:28:56 warning lease_lost lease=2\nTraceback"


def test_a_quiet_console_shows_warnings_and_a_verbose_one_all() -> None:
    for verbose, shown in ((False, ["bad"]), (True, ["good", "bad"])):
        out = io.StringIO()
        console = Console(verbose=verbose, out=out)
        for event, level in (("good", "info"), ("bad", "warning")):
            console.child_line("decode-0", json.dumps({"event": event, "level": level}))
        assert [line.split()[-1] for line in out.getvalue().splitlines()] == shown
        assert all(line.startswith("decode-0 ") for line in out.getvalue().splitlines())


def test_json_output_is_one_object_a_line_with_the_original_line_inside() -> None:
    out = io.StringIO()
    console = Console("json", verbose=True, out=out)
    console.child_line("nats", '[1] [WRN] "quoted"')
    console.say("stopped")
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"process": "nats", "level": "warning", "line": '[1] [WRN] "quoted"'},
        {"process": "shoal", "level": "info", "line": "stopped"}]
