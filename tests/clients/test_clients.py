"""Client libraries of others, each in an environment of its own, against a running stack with the real small model.

The model is too small for wit: tools are forced, and only shape and validity are asked for.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.clients.scripts import HERE, HOME, client_python, run_script
from tests.stack import RunningStack

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

LEAST_CHECKS = 4  # stream, whole answer, tool round trip, structured output
PYTHON_CLIENTS = {
    "openai_client": ("openai==3.57.0",),
    "agents_client": ("openai-agents==0.24.0",),
    "langchain_client": ("langchain-openai==1.7.0",),
    "pydantic_ai_client": ("pydantic-ai-slim[openai]==2.68.0",),
    "instructor_client": ("instructor==1.17.0",),
    "llama_index_client": ("llama-index-llms-openai-like==0.8.0",),
}


@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_a_python_client_gets_all_that_it_asks_for(stack: RunningStack, name: str) -> None:
    assert_all_ok(run_script(stack, client_python(name, PYTHON_CLIENTS[name]), HERE / f"{name}.py"))


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm")
def test_the_ai_sdk_gets_all_that_it_asks_for(stack: RunningStack) -> None:
    folder = HOME / "ai_sdk"
    shutil.copytree(HERE / "ai_sdk", folder, dirs_exist_ok=True)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=1800)
    assert_all_ok(run_script(stack, "node", folder / "client.mjs"))


def assert_all_ok(printed: str) -> None:
    """Each check of a script prints its end in a line."""
    ends = [line.split()[0] for line in printed.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert len(ends) >= LEAST_CHECKS, printed
    assert set(ends) == {"ok"}, printed
