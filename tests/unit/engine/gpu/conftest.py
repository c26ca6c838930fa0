"""The GPU runner where there is no GPU: Triton's interpreter computes, and Python plays CUDA's runtime."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.kernel_mode
from engine.gpu.decode_graph import DecodeGraph
from engine.gpu.extend_graph import ExtendGraph


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Graph:
    def pool(self) -> None: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter is NumPy's, which warns where a GPU is silent."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, events and graphs of a CPU: all is done at once, and a replay does the step again."""
    if tests.kernel_mode.ON_GPU:
        return
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name, stand_in in (("Event", _Event), ("CUDAGraph", _Graph), ("synchronize", lambda *_: None),
                           ("set_device", lambda *_: None), ("graph", lambda *_, **__: contextlib.nullcontext())):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for kind in (DecodeGraph, ExtendGraph):
        monkeypatch.setattr(kind, "__init__", _remembering(kind.__init__))
        monkeypatch.setattr(kind, "replay", lambda self: self._step(self.state))


def _remembering(init: Any) -> Any:
    def remember(self: Any, state: Any, *arguments: Any, **named: Any) -> None:
        self.state = state
        init(self, state, *arguments, **named)

    return remember
