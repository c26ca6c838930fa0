from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from common.errors import Unavailable
from stack.api_client import ApiClient
from stack.scrape import scrape


class Canned(http.server.BaseHTTPRequestHandler):
    """Answers every request with what the test put here."""

    status: ClassVar[int] = 200
    body: ClassVar[bytes] = b""
    seen: ClassVar[list[tuple[str, str | None, bytes]]] = []

    def answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.path, self.headers.get("Authorization"), sent))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_POST = answer  # noqa: N815 (the base class's names)

    def log_message(self, *_args: object) -> None:
        return


@pytest.fixture
def address() -> Iterator[str]:
    Canned.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=5)


def canned(status: int, body: str) -> None:
    Canned.status, Canned.body = status, body.encode()


def streamed(address: str, body: str) -> list[object]:
    canned(200, body)
    with ApiClient(f"http://{address}", "sesame") as api:
        return list(api.stream("/v1/completions", {"prompt": "x"}))


def test_a_stream_gives_its_events_then_none_and_skips_comments(address: str) -> None:
    assert streamed(address, ': ping\n\ndata: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n') == [
        {"a": 1}, {"a": 2}, None]
    path, key, sent = Canned.seen[0]
    assert (path, key, json.loads(sent)) == ("/v1/completions", "Bearer sesame", {"prompt": "x", "stream": True})


def test_a_stream_that_just_ends_is_an_error_and_not_a_short_answer(address: str) -> None:
    with pytest.raises(Unavailable, match=r"without \[DONE\]"):
        streamed(address, 'data: {"a": 1}\n\n')


def test_an_error_event_is_raised_with_its_message(address: str) -> None:
    with pytest.raises(Unavailable, match="worker is gone"):
        streamed(address, 'data: {"a": 1}\n\ndata: {"error": {"message": "worker is gone"}}\n\n')


def test_a_refused_stream_is_raised_with_status_and_message(address: str) -> None:
    canned(503, '{"error": {"message": "full"}}')
    with ApiClient(f"http://{address}") as api, pytest.raises(Unavailable, match="503: full"):
        next(api.stream("/v1/completions", {}))


def test_a_gateway_that_is_not_there_is_one_clear_error() -> None:
    with ApiClient("http://127.0.0.1:9") as api, pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9"):
        api.models()


def test_metrics_are_summed_over_labels_without_buckets(address: str) -> None:
    canned(200, '# TYPE a counter\na_total{m="1"} 2\na_total{m="2"} 3\n# TYPE h histogram\n'
                'h_bucket{le="+Inf"} 4\nh_sum 1.5\nh_count 4\n')
    assert scrape(address) == {"a_total": 5.0, "h_sum": 1.5, "h_count": 4.0}


def test_metrics_of_a_process_that_is_gone_are_an_error() -> None:
    with pytest.raises(Unavailable, match=r"no metrics at 127.0.0.1:9"):
        scrape("127.0.0.1:9")
