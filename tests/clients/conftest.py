"""One stack with the real small model for all clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import RunningStack


@pytest.fixture(scope="session")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(
            tmp_path_factory.mktemp("stack"), model=str(smollm2), runner="torch", mixed=1, dtype="float32") as running:
        yield running
