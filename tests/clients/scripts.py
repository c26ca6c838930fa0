"""Runs a client's script in its own environment against a stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from bench.client_environment import ClientEnvironment
from stack.model_fetch import default_cache_dir
from tests.stack import RunningStack

HERE: Final = Path(__file__).parent
HOME: Final = default_cache_dir() / "clients"
_SCRIPT_S: Final = 900.0


def client_python(name: str, packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment that has them; made on first use."""
    environment = ClientEnvironment(HOME / name, packages)
    if not environment.is_made:
        environment.make()
    return environment.program("python")


def run_script(stack: RunningStack, *command: str | Path, arguments: tuple[str, ...] = ()) -> str:
    """What it printed. It gets the URL, the model and the arguments, and nothing of our own environment's Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(
        [*map(str, command), f"{stack.url}/v1", stack.model, *arguments], env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_SCRIPT_S)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-8000:]
    return ended.stdout
