"""Python's garbage collector in a process that runs an engine."""

from __future__ import annotations

import gc
from typing import Final

_THRESHOLDS: Final = (50_000, 20, 20)  # of the three generations; Python's are 700, 10, 10


def spare_collector() -> None:
    """Keep Python's garbage collector out of the steps.

    What is loaded by now lives as long as the process, and a step makes thousands of objects that die with it by
    reference count: at the default thresholds these would have the collector walk over everything again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
