"""How fast bytes moved lately. What is old says little of now, so it fades and is then unknown.

States: unknown ──add──▶ known ──`window_s` without an `add`──▶ unknown
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class RecentRate:
    """A mean in which a copy of `window_s` ago counts 1/e."""

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._clock = window_s, clock
        self._num_bytes = self._seconds = 0.0
        self._added_at = -math.inf

    def add(self, num_bytes: int, seconds: float) -> None:
        now = self._clock()
        kept = math.exp((self._added_at - now) / self._window_s)
        self._num_bytes = self._num_bytes * kept + num_bytes
        self._seconds = self._seconds * kept + seconds
        self._added_at = now

    @property
    def bytes_per_s(self) -> float:
        """0 while unknown."""
        is_old = self._clock() - self._added_at > self._window_s
        return 0.0 if is_old or not self._seconds else self._num_bytes / self._seconds
