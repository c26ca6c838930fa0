"""Batches against a real HTTP server that answers as a test tells it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest, NotFound
from stack import batch
from stack.batch import BatchCounts, read_requests, run_batch

Answer = tuple[int, dict[str, Any]]


class Gateway:
    """`answers(body, nth time this prompt is asked)`; remembers what it was asked."""

    def __init__(self, answers: Callable[[dict[str, Any], int], Answer]) -> None:
        self.asked: list[str] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                gateway.asked.append(body["prompt"])
                status, answer = answers(body, gateway.asked.count(body["prompt"]))
                raw = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.send_header("X-Request-Id", "r-" + body["prompt"])
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(batch, "MAX_WAIT_S", 0.01)

    def answers(body: dict[str, Any], nth: int) -> Answer:
        if body["prompt"] == "busy" and nth < 3:
            return 503, {"error": {"message": "later"}}
        if body["prompt"] == "wrong":
            return 400, {"error": {"message": "no"}}
        return 200, {"text": body["prompt"].upper()}

    gateway = Gateway(answers)
    yield gateway
    gateway.close()


def lines(path: Path) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def request(custom_id: str, prompt: str) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}})


def run(folder: Path, url: str, timeout_s: float = 5.0) -> BatchCounts:
    return asyncio.run(run_batch(
        folder / "in.jsonl", folder / "out.jsonl", folder / "bad.jsonl", url, "", concurrency=4, timeout_s=timeout_s))


def test_answers_and_refusals_go_to_their_files_by_custom_id(tmp_path: Path, echo: Gateway) -> None:
    prompts = {"a": "one", "b": "wrong", "c": "busy"}
    (tmp_path / "in.jsonl").write_text("\n".join(request(i, p) for i, p in prompts.items()) + "\n\n")
    assert run(tmp_path, echo.url) == BatchCounts(0, 2, 1)
    good, bad = lines(tmp_path / "out.jsonl"), lines(tmp_path / "bad.jsonl")
    assert {i: line["response"]["body"] for i, line in good.items()} == {"a": {"text": "ONE"}, "c": {"text": "BUSY"}}
    assert good["a"]["response"]["request_id"] == "r-one"
    assert bad["b"]["response"]["status_code"] == 400
    assert echo.asked.count("busy") == 3


def test_a_second_run_asks_only_what_has_no_answer_yet(tmp_path: Path, echo: Gateway) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(request(str(i), f"p{i}") for i in range(5)))
    run(tmp_path, echo.url)
    out = tmp_path / "out.jsonl"
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[:3]) + whole[3][:20])  # killed in the middle of a line
    echo.asked.clear()
    assert run(tmp_path, echo.url) == BatchCounts(3, 2, 0)
    assert len(echo.asked) == 2
    assert set(lines(out)) == set("01234")


def test_a_gateway_that_is_away_is_named_for_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_WAIT_S", 0.01)
    (tmp_path / "in.jsonl").write_text(request("a", "x"))
    assert run(tmp_path, "http://127.0.0.1:9").num_failed == 1
    failed = lines(tmp_path / "bad.jsonl")["a"]
    assert failed["response"] is None
    assert failed["error"]["code"] == "connection_error"


@pytest.mark.parametrize(("line", "told"), [
    ("{", r"in.jsonl:1: not JSON"), ("[]", "must be a JSON object"),
    ('{"url": "/v1/completions", "body": {}}', "custom_id must be a str"),
    ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "url must be one of"),
    ('{"custom_id": "a", "url": "/v1/completions", "body": 3}', "body must be a dict"),
    ('{"custom_id": "a", "url": "/v1/completions", "body": {}, "method": "GET"}', "method must be POST"),
    ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', r"body\.stream must not be set"),
    (request("a", "x") + "\n" + request("a", "y"), "in.jsonl:2: custom_id 'a' is there twice"),
])
def test_a_line_that_is_no_request_stops_the_run_before_anything_is_asked(
    tmp_path: Path, line: str, told: str
) -> None:
    (tmp_path / "in.jsonl").write_text(line)
    with pytest.raises(InvalidRequest, match=told):
        list(read_requests(tmp_path / "in.jsonl"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"absent\.jsonl"):
        list(read_requests(tmp_path / "absent.jsonl"))
