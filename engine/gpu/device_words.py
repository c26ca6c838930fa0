"""An array of 32-bit words on the device whose few changes of a step go up together.

Life: made → any number of (`put`s, then one `flush`). What was put is there for all work that is enqueued after the
flush.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.scatter_words import scatter_words

_SLOTS = 4  # staging buffers, so that a flush seldom waits for an older one


def staging(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros on the host that copies to and from `device` can use without waiting."""
    held = torch.zeros(*shape, dtype=dtype)
    return held.pin_memory() if device.type == "cuda" else held


class DeviceWords:
    """`words` [size] int32, zeros at first; at most `capacity` changes go up in one launch."""

    def __init__(self, size: int, capacity: int, device: torch.device) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        self._device, self._capacity = device, capacity
        self._indices: list[int] = []
        self._values: list[int] = []
        self._staging = [staging(2 * capacity, dtype=torch.int32, device=device) for _ in range(_SLOTS)]
        self._sent: list[torch.cuda.Event | None] = [None] * _SLOTS
        self._landing = torch.zeros(2 * capacity, dtype=torch.int32, device=device)
        self._turn = 0

    def put(self, index: int, value: int) -> None:
        """`value`: the 32 bits, as a whole number from 0."""
        if len(self._indices) == self._capacity:
            self.flush()
        self._indices.append(index)
        self._values.append(value)

    def put_float(self, index: int, value: float) -> None:
        self.put(index, int(np.float32(value).view(np.uint32)))

    def flush(self) -> None:
        """Send what has changed, in stream order; of two values for one index the later stays."""
        changes = dict(zip(self._indices, self._values, strict=True))
        self._indices.clear()
        self._values.clear()
        num = len(changes)
        if not num:
            return
        slot = self._turn % _SLOTS
        self._turn += 1
        if (sent := self._sent[slot]) is not None:
            sent.synchronize()
        staged = self._staging[slot]
        staged[:num] = torch.from_numpy(np.fromiter(changes.keys(), np.int32, num))
        staged[num : 2 * num] = torch.from_numpy(np.fromiter(changes.values(), np.uint32, num).view(np.int32))
        landed = self._landing[: 2 * num]  # one run of bytes: a copy of rows apart would not be asynchronous
        landed.copy_(staged[: 2 * num], non_blocking=True)
        scatter_words(self.words, landed.view(2, num), num)
        if self._device.type == "cuda":
            self._sent[slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent[slot].record()  # type: ignore[union-attr]
