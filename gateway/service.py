"""Joins the gateway's parts; serves HTTP and registers.

States: starting → ready → draining (`/ready` is 503, new requests are refused, streams go on) → cut (what is left ends
with an error event) → stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from collections.abc import Generator

import uvicorn

from common import logs
from common.advertise import advertised_host
from common.clients.channels import ChannelPool
from common.clients.decode import DecodeClient
from common.clients.router import RouterClient
from common.clients.tokenizer import TokenizerClient
from common.directory import Directory
from common.errors import ConfigError, Unavailable
from common.host_port import host_port
from common.metrics import MetricsServer
from common.registry import Lease
from common.server_url import open_redis
from common.service_host import Deps, version
from common.service_record import ServiceRecord
from common.wire_security import check_http_pair, is_loopback, load_security, metrics_address, metrics_host
from gateway.admission import Admission
from gateway.app import Ports, build_app
from gateway.config import GatewayConfig
from gateway.tenants.admin_app import AdminDesk, build_admin_app
from gateway.tenants.key_ring import KeyRing
from gateway.tenants.redis_limits import MAX_CALLS, RedisLimits

log = logs.get(__name__)
_BACKLOG = 2048
_STOP_TIMEOUT_S = 3


def build(config: GatewayConfig, deps: Deps) -> GatewayService:
    """Raises `ConfigError` for a key file that cannot be used and for an admin port that nobody or anybody could."""
    return GatewayService(config, deps)


class GatewayService:
    """One gateway process."""

    def __init__(self, config: GatewayConfig, deps: Deps) -> None:
        self._config, self._deps = config, deps
        self._service_id = config.named().service_id
        self._directory = Directory(deps.registry)
        channels = ChannelPool(load_security(config))
        self._tokenizer = TokenizerClient(self._directory, channels)
        self._decode = DecodeClient(self._directory, deps.bus, channels)
        self._router = RouterClient(self._directory, deps.bus, channels)
        self._admission = Admission(config.max_concurrent_requests, config.overload_retry_after_s)
        self._keys = KeyRing(config.api_keys, config.api_key_file)
        self._redis = open_redis(
            config.redis_url, config.servers_ca_file, socket_timeout=config.rate_limit_timeout_s,
            socket_connect_timeout=config.rate_limit_timeout_s, max_connections=2 * MAX_CALLS)  # used for limits only
        limits = RedisLimits(self._redis, config.rate_limit_timeout_s)
        app = build_app(config, self._keys, Ports(
            self._tokenizer, self._decode, self._router, self._directory, limits), self._admission, version())
        self._http = HttpServer(app, config)
        self._admin = self._admin_server(limits) if config.admin_port else None
        self._watching: asyncio.Task[None] | None = None
        self._metrics: MetricsServer | None = None
        self._lease: Lease | None = None

    async def start(self) -> None:
        config = self._config
        self._keys.use_salt_key(await self._deps.registry.deployment_key())
        if config.api_key_file:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._keys.look_now)
            self._watching = asyncio.create_task(self._keys.watch(config.api_key_reload_s))
        await self._http.start()
        if self._admin is not None:
            await self._admin.start()
        try:
            self._metrics = MetricsServer(metrics_host(config), config.metrics_port)
        except OSError as error:
            raise ConfigError(f"cannot bind {metrics_host(config)} metrics port {config.metrics_port}: "
                              f"{error.strerror}", param="metrics_port") from None
        await self._directory.start()
        await self._decode.start()
        address = host_port(advertised_host(config), self._http.port)
        self._lease = await self._deps.registry.register(ServiceRecord(
            service="gateway", service_id=self._service_id, incarnation=secrets.token_hex(8), address=address,
            metrics_address=metrics_address(config, self._metrics.port),
            capacity={"max_concurrent_requests": config.max_concurrent_requests},
            started_at_unix_s=time.time(), version=version()), config.lease_ttl_s)
        log.info("ready", address=address, metrics=self._metrics.address)

    async def drain(self) -> None:
        await self._begin_drain()
        await self._admission.idle()

    async def _begin_drain(self) -> int:
        """Returns how many requests are still in work."""
        self._admission.start_drain()
        if self._lease is not None:
            await self._lease.update(state="draining")
        return self._admission.num_running

    def _admin_server(self, limits: RedisLimits) -> HttpServer:
        config = self._config
        if not config.admin_token and not config.api_key_file:
            raise ConfigError("admin_port: nobody could use it: set admin_token, or api_key_file with a key of an "
                              "admin", param="admin_port")
        if not is_loopback(config.admin_host) and not config.has_server_tls and not config.insecure:
            raise ConfigError(f"admin_host={config.admin_host!r}: not a loopback address, and there is no TLS: set "
                              f"{config.tls_fields}, or allow plaintext with --insecure", param="admin_host")
        app = build_admin_app(AdminDesk(self._keys, limits, self._begin_drain), config.admin_token)
        return HttpServer(app, config.model_copy(update={"host": config.admin_host, "port": config.admin_port}))

    async def stop(self) -> None:
        self._admission.cut(Unavailable("this gateway is shutting down", retry_after_s=1.0))
        await self._http.stop()
        if self._admin is not None:
            await self._admin.stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._lease is not None:
            await self._lease.release()
        await self._decode.stop()
        await self._tokenizer.stop()
        await self._router.stop()
        await self._directory.stop()
        await self._redis.aclose()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)


class HttpServer:
    """uvicorn inside this process's loop. States: bound → serving → stopped."""

    def __init__(self, app: object, config: GatewayConfig) -> None:
        self._host, self._asked_port = config.host, config.port
        cert, key = config.http_cert
        if cert:
            check_http_pair(cert, key, "ssl_certfile" if config.ssl_certfile else "tls_cert")
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # requests and faults are logged by the observer
        self._server = _Server(uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,  # type: ignore[arg-type]
            ssl_certfile=cert or None, ssl_keyfile=key or None,
            server_header=False, timeout_keep_alive=int(config.keep_alive_s) or 1,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S, backlog=_BACKLOG))
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Bind and serve. Raises `ConfigError` when the port is taken."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # With the protocol named, asyncio turns Nagle's delay off on what is accepted (40 ms an answer otherwise).
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._asked_port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot bind {self._host} port {self._asked_port}: {error.strerror or error}", param="port") from None
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Answers in progress have a few seconds to be written; then connections close."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the service host."""
        yield
