"""Which processes a stack is made of: a pure function from options to child specifications."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from stack.child import ChildSpec, Gate

_GATES = Callable[[str, str], Gate]  # (service, service_id) → its gate
RUNNERS = ("torch", "mock-echo", "mock-hash")  # as the decode service names them
_MAX_REPLICAS = 64
_STOP_SLACK_S = 5.0  # a service ends within its drain limit plus this, or is killed

# One thread per process: several workers on few cores otherwise wait for each other at every barrier.
_CHILD_ENV = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "GRPC_VERBOSITY": "ERROR",
}


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `shoal up` was asked for. `port` is the first gateway's; the next ones follow it."""

    model_path: Path
    state_dir: Path
    mixed: int = 1
    gateway: int = 1
    tokenizer: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    nats_url: str = ""  # empty: embedded
    redis_url: str = ""
    runner: str = "torch"
    drain_timeout_s: float = 30.0
    engine_flags: Mapping[str, str] = field(default_factory=dict)  # field of the decode service → value

    def __post_init__(self) -> None:
        for name in ("mixed", "gateway", "tokenizer"):
            if not 1 <= getattr(self, name) <= _MAX_REPLICAS:
                raise ConfigError(f"--{name} must be 1 to {_MAX_REPLICAS}, got {getattr(self, name)}", param=name)
        if self.port + self.gateway - 1 > 65535:
            raise ConfigError(f"--port {self.port} with --gateway {self.gateway} goes beyond 65535", param="port")
        if self.runner not in RUNNERS:
            raise ConfigError(f"--runner must be one of {', '.join(RUNNERS)}; got {self.runner!r}", param="runner")

    @property
    def model_name(self) -> str:
        return self.model_path.name

    @property
    def gateway_ports(self) -> range:
        return range(self.port, self.port + self.gateway)

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"


def service_specs(options: StackOptions, nats_url: str, redis_url: str, gates: _GATES) -> list[ChildSpec]:
    """Tokenizers, workers and gateways, in the order in which they are shown."""
    model = f"{options.model_name}={options.model_path}"
    engine = [part for name, value in options.engine_flags.items() for part in (f"--{name.replace('_', '-')}", value)]
    worker = ["--model-path", str(options.model_path), "--model-name", options.model_name,
              "--runner", options.runner, *engine]

    def spec(module: str, service: str, index: int, rank: int, port: int, *flags: str) -> ChildSpec:
        name = f"{service}-{index}"
        argv = (sys.executable, "-m", module, "--service-id", name, "--port", str(port), "--metrics-port", "0",
                "--log-format", "json", "--drain-timeout-s", f"{options.drain_timeout_s:g}", *flags)
        # URLs and keys go by environment, out of sight of other users of the machine.
        own = f"SHOAL_{service.upper()}_"
        env = {**_CHILD_ENV, f"{own}NATS_URL": nats_url, f"{own}REDIS_URL": redis_url}
        if service == "gateway" and options.api_key:
            env[f"{own}API_KEYS"] = options.api_key
        return ChildSpec(name, rank, argv, gates(service, name), env,
                         stop_timeout_s=options.drain_timeout_s + _STOP_SLACK_S)

    return [
        *(spec("tokenizer_svc", "tokenizer", i, 1, 0, "--models", model) for i in range(options.tokenizer)),
        *(spec("decode_svc", "decode", i, 2, 0, *worker) for i in range(options.mixed)),
        *(spec("gateway", "gateway", i, 3, port, "--host", options.host)
          for i, port in enumerate(options.gateway_ports)),
    ]
