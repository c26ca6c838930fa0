"""Kernels are imported in the mode that their tests need, whichever come first."""

from __future__ import annotations

import tests.kernel_mode  # noqa: F401
