"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stack.model_fetch import MODEL_NAME, default_cache_dir, fetch_smollm2
from tests.servers import RealServer


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real small model; made on first use, which takes about a minute."""
    return fetch_smollm2(default_cache_dir() / MODEL_NAME)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RealServer]:
    server = RealServer("valkey", tmp_path / "valkey").start()
    yield server
    server.remove()


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[RealServer]:
    server = RealServer("nats", tmp_path / "nats").start()
    yield server
    server.remove()
