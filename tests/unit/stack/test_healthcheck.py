from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import ConfigError, Unavailable
from stack.healthcheck import check
from stack.ports import free_port
from tests.certificates import Ca


class Ready(BaseHTTPRequestHandler):
    """200 for `/ready?verbose` alone."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready?verbose" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


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


def test_the_plaintext_health_port_and_the_tls_port_of_one_service_can_both_be_asked(
    served: tuple[health.HealthServicer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = served
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    ca = Ca(tmp_path)
    cert, key = ca.issue("service", ("shoal.internal",))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    pair = [(key.read_bytes(), cert.read_bytes())]
    secured = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    server.start()
    monkeypatch.setenv("SHOAL_HOST", "0.0.0.0")  # a service of its own would be refused here
    monkeypatch.setenv("SHOAL_DECODE_TLS_CA", str(ca.path))
    monkeypatch.setenv("SHOAL_TLS_SERVER_NAME", "shoal.internal")
    monkeypatch.setenv("SHOAL_HEALTH_PORT", address.rpartition(":")[2])
    check(address, "", "", 3)
    check(f"127.0.0.1:{secured}", "", "", 3)
    with pytest.raises(Unavailable):
        check(address, "", "", 1, tls=True)
    with pytest.raises(Unavailable):
        check(f"127.0.0.1:{secured}", "", "", 1, tls=False)
    server.stop(None)


def test_a_gateway_with_a_certificate_of_our_own_is_asked_the_whole_url(tmp_path: Path) -> None:
    cert, key = Ca(tmp_path).issue("gateway", ("shoal.example",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}/ready"
        check("", f"{url}?verbose", "", 3)
        with pytest.raises(Unavailable, match="404"):
            check("", url, "", 3)
        server.shutdown()


def test_an_answer_that_trickles_does_not_outlive_the_deadline() -> None:
    def trickle(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            while True:
                client.sendall(b"H")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        with pytest.raises(Unavailable, match="TimeoutError"):
            check("", f"http://127.0.0.1:{listener.getsockname()[1]}/ready", "", 0.4)


@pytest.mark.parametrize(("grpc_address", "url"), [("", ""), ("127.0.0.1:1", "http://127.0.0.1/")])
def test_exactly_one_target_is_wanted(grpc_address: str, url: str) -> None:
    with pytest.raises(ConfigError, match="either"):
        check(grpc_address, url, "", 1)


def test_the_command_exits_with_0_or_1_and_never_loads_torch(served: tuple[health.HealthServicer, str]) -> None:
    servicer, address = served
    code = ("import sys; from stack.__main__ import app; sys.argv = ['shoal', 'healthcheck', '--grpc', sys.argv[1]]\n"
            "try: app()\nfinally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules")
    statuses = health_pb2.HealthCheckResponse
    assert subprocess.run([sys.executable, "-c", code, ""], timeout=60).returncode == 1  # bad settings too
    for status, expected in ((statuses.SERVING, 0), (statuses.NOT_SERVING, 1)):
        servicer.set("", status)
        assert subprocess.run([sys.executable, "-c", code, address], timeout=60).returncode == expected
