"""The stack of compose.yaml in a real Docker engine, for tests: its own project, port and model folder.

Life: built → up (all healthy) → scaled, restarted, … → stopped (containers are there, with their exit codes) → down.
Settings, such as the images of a machine without a registry, come from the environment and from `.env`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stack.ports import free_port
from stack.scrape import Sample, samples

ROOT: Final = Path(__file__).resolve().parents[2]
METRICS_PORT: Final = 9400
SERVICES: Final = ("tokenizer", "router", "kvstore", "prefill", "decode", "gateway")
_COMMAND_TIMEOUT_S: Final = 900.0
_POLL_S: Final = 0.25
_SMALL: Final = {  # a machine of two cores has several workers here
    "SHOAL_KV_CACHE_BYTES": str(256 << 20), "SHOAL_KVSTORE_DRAM_BYTES": str(256 << 20),
    "SHOAL_KVSTORE_SSD_BYTES": str(256 << 20), "SHOAL_SHM_SIZE": "1g", "SHOAL_HEALTH_TIMEOUT": "60s",
}


class ComposeStack:
    """`model` is a folder; `model_root` is made, with a copy of it that the services' user can read."""

    def __init__(self, model: Path, model_root: Path, image: str = "shoal:compose-test") -> None:
        self.project = f"shoal-test-{secrets.token_hex(3)}"
        self.model, self.model_folder, self.image = model.name, model, image
        self.url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
        self.seconds: dict[str, float] = {}
        _stage(model, model_root)
        self._env = {**os.environ, **_SMALL, "SHOAL_IMAGE": image, "SHOAL_MODEL": model.name,
                     "SHOAL_MODELS": str(model_root), "SHOAL_HTTP_PORT": str(port)}
        self._compose = [*_compose_client(), "-p", self.project, "-f", str(ROOT / "compose.yaml")]

    def build(self) -> None:
        self._timed("build", "build", "model-init")  # all services have this image

    def up(self, scale: Mapping[str, int], timeout_s: float) -> None:
        """Returns when all are healthy."""
        began = time.monotonic()
        flags = [part for name, count in scale.items() for part in ("--scale", f"{name}={count}")]
        self.compose("up", "--detach", "--no-build", "--no-recreate", *flags)
        self.wait_healthy(timeout_s)
        self.seconds[f"up {' '.join(f'{n}={c}' for n, c in scale.items())}".strip()] = time.monotonic() - began

    def stop(self) -> None:
        self._timed("stop", "stop")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "60")

    def compose(self, *args: str) -> str:
        return _run([*self._compose, *args], self._env)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60")

    def containers(self, service: str = "") -> list[str]:
        """Ids, of stopped ones too."""
        filters = [f"label=com.docker.compose.project={self.project}"]
        filters += [f"label=com.docker.compose.service={service}"] if service else []
        return docker("ps", "-aq", "--no-trunc", *(part for f in filters for part in ("--filter", f))).split()

    def restart(self, container: str, timeout_s: float) -> None:
        """Stop with SIGTERM, which must end in exit code 0, start again, wait for its health."""
        self.stop_container(container)
        docker("start", container)
        self.wait_healthy(timeout_s, [container])

    def stop_container(self, container: str) -> None:
        docker("stop", "--time", "60", container)
        code = inspect(container)["State"]["ExitCode"]
        assert code == 0, f"exit code {code}: {last_words(container)}"

    def wait_healthy(self, timeout_s: float, containers: Sequence[str] = ()) -> None:
        """Of all but the one-shot. Raises `AssertionError` with the last words of one that is not."""
        deadline = time.monotonic() + timeout_s
        for container in containers or [c for c in self.containers() if c not in self.containers("model-init")]:
            while (state := inspect(container)["State"]).get("Health", {}).get("Status") != "healthy":
                assert time.monotonic() < deadline, f"not healthy after {timeout_s} s: {last_words(container)}"
                assert state["Status"] == "running", f"{state}: {last_words(container)}"
                assert not inspect(container)["RestartCount"], f"it ended by itself: {last_words(container)}"
                time.sleep(_POLL_S)

    def metrics_of_each(self, service: str) -> list[list[Sample]]:
        """One list for each running container of the service."""
        seen = [inspect(container) for container in self.containers(service)]
        networks = [next(iter(s["NetworkSettings"]["Networks"].values())) for s in seen if s["State"]["Running"]]
        return [samples(f"{network['IPAddress']}:{METRICS_PORT}") for network in networks]

    def metrics(self, service: str) -> list[Sample]:
        return [sample for found in self.metrics_of_each(service) for sample in found]

    def total(self, service: str, metric: str, **labels: str) -> float:
        return sum(s.value for s in self.metrics(service)
                   if s.name == metric and labels.items() <= dict(s.labels).items())

    def _timed(self, what: str, *args: str) -> None:
        began = time.monotonic()
        self.compose(*args)
        self.seconds[what] = time.monotonic() - began


def docker(*args: str) -> str:
    return _run(["docker", *args], os.environ)


def inspect(container: str) -> Any:
    return json.loads(docker("inspect", container))[0]


def name_of(container: str) -> str:
    return str(inspect(container)["Name"]).lstrip("/")


def last_words(container: str) -> str:
    return f"{name_of(container)}\n{_run(['docker', 'logs', '--tail', '40', container], os.environ, both=True)}"


def image_bytes(image: str) -> int:
    return int(json.loads(docker("image", "inspect", image))[0]["Size"])


def _run(command: Sequence[str], env: Mapping[str, str], both: bool = False) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + (done.stderr if both else "")


def _compose_client() -> list[str]:
    """`docker compose`, or the older docker-compose."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60).returncode == 0:
        return ["docker", "compose"]
    assert shutil.which("docker-compose"), "needs `docker compose` or docker-compose, and a Docker engine"
    return ["docker-compose"]


def _stage(model: Path, root: Path) -> None:
    """Readable for all; links where they are possible, as a model is large."""
    target = root / model.name
    target.mkdir(parents=True)
    for path in model.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copyfile(path, target / path.name)
        (target / path.name).chmod(0o644)
    for folder in (root, target):
        folder.chmod(0o755)
