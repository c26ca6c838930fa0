"""Tensors of a model folder: one `model.safetensors`, or shards named by `model.safetensors.index.json`.

The files are memory-mapped, so a tensor's bytes are read when it is copied to its place; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.errors import ModelLoadError

Progress = Callable[[int, int], None]  # (bytes taken, bytes in all)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class WeightFolder:
    """Open → taken from → closed, as a context manager. Every failure is a `ModelLoadError` of one line."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        self._progress = progress
        self._stack = ExitStack()
        self._taken: set[str] = set()
        self._taken_bytes = 0
        files = _files(folder)
        try:
            self._owner = {name: file for path in files for file, names in [self._open(path)] for name in names}
        except BaseException:
            self._stack.close()
            raise
        self._total_bytes = sum(path.stat().st_size for path in files)

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stack.close()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it is stored (float32, float16 or bfloat16); it must have exactly this shape."""
        if name not in self._owner:
            raise ModelLoadError(f"weights: tensor {name} is missing", param="model")
        try:
            tensor: torch.Tensor = self._owner[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"weights: tensor {name} cannot be read: {error}", param="model") from error
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"weights: tensor {name} has shape {list(tensor.shape)}, the config asks for {list(shape)}",
                param="model")
        if tensor.dtype not in _FLOATS:
            raise ModelLoadError(
                f"weights: tensor {name} has dtype {tensor.dtype}; only float32, float16, bfloat16 are supported",
                param="model")
        self._taken.add(name)
        self._taken_bytes += tensor.numel() * tensor.element_size()
        if self._progress is not None:
            self._progress(self._taken_bytes, self._total_bytes)
        return tensor

    def refuse_untaken(self, beginnings: tuple[str, ...], ends: tuple[str, ...]) -> None:
        """Raise for a stored tensor that nobody took, but one whose name has one of these beginnings or ends."""
        for name in sorted(self._owner.keys() - self._taken):
            if not name.startswith(beginnings) and not name.endswith(ends):
                raise ModelLoadError(f"weights: tensor {name} is not part of this architecture", param="model")

    def _open(self, path: Path) -> tuple[Any, list[str]]:
        try:
            file = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"weights: {path} cannot be opened: {error}", param="model") from error
        return file, list(file.keys())


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise ModelLoadError(f"weights: {folder} has neither {SINGLE} nor {INDEX}", param="model")
        return [folder / SINGLE]
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"weights: {index} is not a shard index: {error!r}", param="model") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelLoadError(f"weights: {index} names a shard outside its folder: {shard!r}", param="model")
        if not (folder / shard).exists():
            raise ModelLoadError(f"weights: shard {folder / shard} is missing", param="model")
    return [folder / shard for shard in sorted(shards)]
