"""Chooses between the interpreter and the GPU before any kernel is imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests.kernel_mode  # noqa: F401


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter is NumPy's: it warns where a GPU is silent, of overflow that is meant and of -inf - -inf.

    And it takes run-time bounds from arrays of one element, which NumPy will refuse one day.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"))
