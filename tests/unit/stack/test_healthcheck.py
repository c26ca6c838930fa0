from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import ConfigError, Unavailable
from stack.healthcheck import check
from stack.ports import free_port


@pytest.fixture
def served() -> Iterator[tuple[health.HealthServicer, str]]:
    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


def test_a_service_that_takes_work_is_healthy_and_one_that_drains_is_not(
    served: tuple[health.HealthServicer, str]
) -> None:
    servicer, address = served
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    check(address, "", "", 3)
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    servicer.set("live", health_pb2.HealthCheckResponse.SERVING)
    check(address, "", "live", 3)
    with pytest.raises(Unavailable, match="NOT_SERVING"):
        check(address, "", "", 3)


def test_nothing_that_listens_is_unhealthy_within_the_deadline() -> None:
    port = free_port("127.0.0.1")
    with pytest.raises(Unavailable):
        check(f"127.0.0.1:{port}", "", "", 0.5)
    with pytest.raises(Unavailable):
        check("", f"http://127.0.0.1:{port}/ready", "", 0.5)


@pytest.mark.parametrize("status", [200, 503])
def test_over_http_only_200_is_healthy(status: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/ready"
        if status == 200:
            check("", url, "", 3)
        else:
            with pytest.raises(Unavailable, match="503"):
                check("", url, "", 3)
        server.shutdown()


@pytest.mark.parametrize(("grpc_address", "url"), [("", ""), ("127.0.0.1:1", "http://127.0.0.1/")])
def test_exactly_one_target_is_wanted(grpc_address: str, url: str) -> None:
    with pytest.raises(ConfigError, match="either"):
        check(grpc_address, url, "", 1)


def test_the_command_exits_with_0_or_1_and_never_loads_torch(served: tuple[health.HealthServicer, str]) -> None:
    servicer, address = served
    code = ("import sys; from stack.__main__ import app; sys.argv = ['shoal', 'healthcheck', '--grpc', sys.argv[1]]\n"
            "try: app()\nfinally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules")
    statuses = health_pb2.HealthCheckResponse
    for status, expected in ((statuses.SERVING, 0), (statuses.NOT_SERVING, 1)):
        servicer.set("", status)
        assert subprocess.run([sys.executable, "-c", code, address], timeout=60).returncode == expected
