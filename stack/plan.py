"""Which processes a stack is made of: a pure function from options to child specifications."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from common.host_port import host_port
from stack.child import ChildSpec, Gate

_GATES = Callable[[str, str], Gate]  # (service, service_id) → its gate
RUNNERS = ("torch", "mock-echo", "mock-hash")  # as the workers name them
TRANSPORTS = ("auto", "shm", "grpc")  # as the decode service names them
_MAX_REPLICAS = 64
_LEAST_REPLICAS = {"prefill": 0, "decode": 0, "mixed": 0, "kvstore": 0, "router": 0, "gateway": 1, "tokenizer": 1}
_STOP_SLACK_S = 5.0  # a service ends within its drain limit plus this, or is killed

# One thread per process: several workers on few cores otherwise wait for each other at every barrier.
_CHILD_ENV = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "GRPC_VERBOSITY": "ERROR",
}


def default_mixed(prefill: int, decode: int) -> int:
    """A stack whose roles are apart has a mixed worker only when it is asked for."""
    return 0 if prefill or decode else 1


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `shoal up` was asked for. `port` is the first gateway's; the next ones follow it."""

    model_path: Path
    state_dir: Path
    prefill: int = 0
    decode: int = 0
    mixed: int = 1
    kvstore: int = 1
    router: int = 1
    gateway: int = 1
    tokenizer: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    http_tls: bool = False  # the gateways have a certificate, by flag or environment
    gateway_flags: tuple[str, ...] = ()
    insecure: bool = False  # all services: plaintext beyond loopback
    api_key: str = ""
    nats_url: str = ""  # empty: embedded
    redis_url: str = ""
    runner: str = "torch"
    transport: str = "auto"
    kvstore_dram_bytes: int = 512 << 20  # of each store; pages are taken when first written
    kvstore_ssd_bytes: int = 2 << 30
    drain_timeout_s: float = 30.0
    engine_flags: Mapping[str, str] = field(default_factory=dict)  # field of every worker → value

    def __post_init__(self) -> None:
        for name, least in _LEAST_REPLICAS.items():
            if not least <= getattr(self, name) <= _MAX_REPLICAS:
                raise ConfigError(f"--{name} must be {least} to {_MAX_REPLICAS}, got {getattr(self, name)}", param=name)
        if self.decode + self.mixed == 0:
            raise ConfigError("nobody would decode: --decode or --mixed must be at least 1", param="decode")
        if self.port + self.gateway - 1 > 65535:
            raise ConfigError(f"--port {self.port} with --gateway {self.gateway} goes beyond 65535", param="port")
        if self.prefill and self.engine_flags.get("device", "").startswith("cuda"):
            raise ConfigError("--prefill: the KV of a GPU cannot be handed off yet; run --mixed workers on GPUs",
                              param="prefill")
        for name, known in (("runner", RUNNERS), ("transport", TRANSPORTS)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"--{name} must be one of {', '.join(known)}; got {value!r}", param=name)

    @property
    def model_name(self) -> str:
        return self.model_path.name

    @property
    def gateway_ports(self) -> range:
        return range(self.port, self.port + self.gateway)

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{'https' if self.http_tls else 'http'}://{host_port(host, self.port)}"


@dataclass(frozen=True, slots=True)
class _Kind:
    """`num` processes `<name>-<index>` of `module`, registered as `service`. `flags` are given each one's index."""

    name: str
    num: int
    module: str
    service: str
    rank: int  # a higher one is stopped before those that it needs
    flags: Callable[[int], tuple[str, ...]] = lambda _index: ()
    port: Callable[[int], int] = lambda _index: 0


def service_specs(
    options: StackOptions, shm_dir: Path, nats_url: str, redis_url: str, gates: _GATES,
) -> list[ChildSpec]:
    """All services, in the order in which they are shown."""

    def spec(kind: _Kind, index: int) -> ChildSpec:
        name = f"{kind.name}-{index}"
        argv = (sys.executable, "-m", kind.module, "--service-id", name, "--port", str(kind.port(index)),
                "--metrics-port", "0", "--log-format", "json",
                "--drain-timeout-s", f"{options.drain_timeout_s:g}", *(("--insecure",) if options.insecure else ()),
                *kind.flags(index))
        # URLs and keys go by environment, out of sight of other users of the machine.
        own = f"SHOAL_{kind.service.upper()}_"
        env = {**_CHILD_ENV, f"{own}NATS_URL": nats_url, f"{own}REDIS_URL": redis_url}
        if kind.name == "gateway" and options.api_key:
            env[f"{own}API_KEYS"] = options.api_key
        return ChildSpec(name, kind.rank, argv, gates(kind.service, name), env,
                         stop_timeout_s=options.drain_timeout_s + _STOP_SLACK_S)

    return [spec(kind, index) for kind in _kinds(options, shm_dir) for index in range(kind.num)]


def _kinds(options: StackOptions, shm_dir: Path) -> tuple[_Kind, ...]:
    model = f"{options.model_name}={options.model_path}"
    transport = () if options.transport == "auto" else ("--transport", options.transport)

    def worker(index: int) -> tuple[str, ...]:
        """Of several workers each has a GPU of its own, where no index was asked for."""
        engine = {**options.engine_flags}
        if engine.get("device") == "cuda":
            engine["device"] = f"cuda:{index}"
        flags = (part for name, value in engine.items() for part in (_flag(name), value))
        return ("--model-path", str(options.model_path), "--model-name", options.model_name,
                "--runner", options.runner, "--shm-dir", str(shm_dir), *flags)

    def decoder(role: str, index: int) -> tuple[str, ...]:
        return ("--role", role, *worker(index), *transport)

    def store(index: int) -> tuple[str, ...]:
        return ("--shm-dir", str(shm_dir), "--dram-bytes", str(options.kvstore_dram_bytes),
                "--ssd-path", str(options.state_dir / f"kvstore-{index}.ssd"),
                "--ssd-bytes", str(options.kvstore_ssd_bytes))

    return (
        _Kind("tokenizer", options.tokenizer, "tokenizer_svc", "tokenizer", 1, lambda _: ("--models", model)),
        _Kind("kvstore", options.kvstore, "kvstore_svc", "kvstore", 1, store),
        _Kind("router", options.router, "router_svc", "router", 1),
        _Kind("prefill", options.prefill, "prefill_svc", "prefill", 2, worker),
        _Kind("decode", options.decode, "decode_svc", "decode", 3, lambda index: decoder("decode", index)),
        _Kind("mixed", options.mixed, "decode_svc", "decode", 3,
              lambda index: decoder("mixed", options.decode + index)),
        _Kind("gateway", options.gateway, "gateway", "gateway", 4,
              lambda _: ("--host", options.host, *options.gateway_flags), options.gateway_ports.__getitem__),
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
