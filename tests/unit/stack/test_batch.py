"""Batches against a real HTTP server that answers as a test tells it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from common.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from stack import batch
from stack.batch import BatchCounts, read_requests, run_batch
from tests.certificates import Ca

Answer = tuple[int, dict[str, Any]]


class _Server(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, *_args: object) -> None:
        """Quiet: some clients hang up."""


class Gateway:
    """`answers(body, nth time this prompt is asked)`; remembers what it was asked."""

    def __init__(
        self, answers: Callable[[dict[str, Any], int], Answer], context: ssl.SSLContext | None = None
    ) -> None:
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
                self.send_header("X-Request-Id", "r-" + quote(body["prompt"]))
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_args: object) -> None:
                """Quiet."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self._server.server_port}"

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
    return {line["custom_id"]: line for line in map(json.loads, path.read_text("utf-8").rstrip("\n").split("\n"))}


def request(custom_id: str, prompt: str) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}})


def run(folder: Path, url: str, timeout_s: float = 5.0, concurrency: int = 4, out: str = "out.jsonl",
        bad: str = "bad.jsonl") -> BatchCounts:
    return asyncio.run(run_batch(
        folder / "in.jsonl", folder / out, folder / bad, url, "", concurrency=concurrency, timeout_s=timeout_s))


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
    (request("a", "x") + "\n" + request("b", "\ud800"), "in.jsonl:2: holds half of a surrogate pair"),
    (request("a", "x").replace('"x"', "NaN"), "in.jsonl:1: not JSON .*NaN is no number"),
])
def test_a_line_that_is_no_request_stops_the_run_before_anything_is_asked(
    tmp_path: Path, line: str, told: str
) -> None:
    (tmp_path / "in.jsonl").write_text(line)
    with pytest.raises(InvalidRequest, match=told):
        list(read_requests(tmp_path / "in.jsonl"))


def test_a_line_ends_only_at_a_line_feed(tmp_path: Path, echo: Gateway) -> None:
    prompt = "one\u2028two\x85three\x0bfour"
    raw = json.dumps(json.loads(request("a", prompt)), ensure_ascii=False)
    (tmp_path / "in.jsonl").write_bytes((raw + "\r\n").encode())
    assert run(tmp_path, echo.url) == BatchCounts(0, 1, 0)
    assert echo.asked == [prompt]
    assert run(tmp_path, echo.url) == BatchCounts(1, 0, 0), "nor do the lines of the output"


@pytest.mark.parametrize(("out", "bad"), [("in.jsonl", "bad.jsonl"), ("out.jsonl", "in.jsonl"),
                                          ("out.jsonl", "./out.jsonl"), ("link.jsonl", "bad.jsonl")])
def test_one_file_in_two_roles_is_refused_and_left_as_it_is(tmp_path: Path, echo: Gateway, out: str, bad: str) -> None:
    (tmp_path / "in.jsonl").write_text(request("a", "x"))
    (tmp_path / "link.jsonl").hardlink_to(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match="each file of a batch must be another"):
        run(tmp_path, echo.url, out=out, bad=bad)
    assert (tmp_path / "in.jsonl").read_text() == request("a", "x")
    assert echo.asked == []


@pytest.mark.parametrize("name", ["out.jsonl", "bad.jsonl"])
@pytest.mark.parametrize(("text", "number"), [
    ("my notes", 1), ("{broken\n", 1), ('{"custom_id": "a", "response": {}}\n{"custom_id": "b"}\n', 2), ("[]\n", 1)])
def test_a_file_that_is_not_of_a_batch_is_never_written(
    tmp_path: Path, echo: Gateway, name: str, text: str, number: int
) -> None:
    (tmp_path / "in.jsonl").write_text(request("a", "x"))
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=rf"{name}:{number}: not an answer of a batch"):
        run(tmp_path, echo.url)
    assert (tmp_path / name).read_text() == text
    assert echo.asked == []


def test_two_runs_never_write_one_output(tmp_path: Path, echo: Gateway) -> None:
    (tmp_path / "in.jsonl").write_text(request("a", "x"))
    with (tmp_path / "out.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match=r"out\.jsonl: another run writes"):
            run(tmp_path, echo.url)
    assert run(tmp_path, echo.url).num_completed == 1


def test_a_fault_of_one_request_is_its_error_line_and_no_other_request_notices(
    tmp_path: Path, echo: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = batch.answer

    async def faulty(http: Any, asked: batch.BatchRequest) -> dict[str, Any]:
        if asked.custom_id == "b":
            raise ZeroDivisionError("oh")
        return await sound(http, asked)

    monkeypatch.setattr(batch, "answer", faulty)
    (tmp_path / "in.jsonl").write_text("\n".join(request(i, f"p{i}") for i in "abc"))
    assert run(tmp_path, echo.url) == BatchCounts(0, 2, 1)
    assert lines(tmp_path / "bad.jsonl")["b"]["error"] == {"code": "client_error", "message": "ZeroDivisionError: oh"}


def test_an_answer_that_is_no_whole_text_is_written_escaped(tmp_path: Path) -> None:
    gateway = Gateway(lambda _body, _nth: (200, {"text": "\ud83d"}))
    (tmp_path / "in.jsonl").write_text(request("a", "x"))
    assert run(tmp_path, gateway.url).num_completed == 1
    gateway.close()
    assert lines(tmp_path / "out.jsonl")["a"]["response"]["body"] == {"text": "\ud83d"}


def test_as_many_requests_run_at_once_as_are_asked_for(tmp_path: Path) -> None:
    together = threading.Barrier(120, timeout=20)  # passes only when all of them are under way

    def answers(_body: dict[str, Any], _nth: int) -> Answer:
        together.wait()
        return 200, {}

    gateway = Gateway(answers)
    (tmp_path / "in.jsonl").write_text("\n".join(request(str(i), f"p{i}") for i in range(120)))
    assert run(tmp_path, gateway.url, timeout_s=20, concurrency=120).num_completed == 120
    gateway.close()


def test_the_deadline_is_of_the_whole_request_with_all_its_tries(tmp_path: Path) -> None:
    gateway = Gateway(lambda _body, _nth: (503, {}))
    (tmp_path / "in.jsonl").write_text(request("a", "x"))
    assert run(tmp_path, gateway.url, timeout_s=0.1).num_failed == 1
    gateway.close()
    assert lines(tmp_path / "bad.jsonl")["a"]["error"] == {"code": "timeout", "message": "no answer within 0.1 s"}


def test_an_https_gateway_is_known_by_the_deployments_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = Ca(tmp_path)
    cert, key = ca.issue("gateway")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    gateway = Gateway(lambda _body, _nth: (200, {}), context)
    (tmp_path / "in.jsonl").write_text(request("a", "x"))
    monkeypatch.setattr(batch, "MAX_TRIES", 1)
    assert run(tmp_path, gateway.url).num_failed == 1
    monkeypatch.setenv("SHOAL_TLS_CA", str(ca.path))
    assert run(tmp_path, gateway.url).num_completed == 1
    gateway.close()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"absent\.jsonl"):
        list(read_requests(tmp_path / "absent.jsonl"))
