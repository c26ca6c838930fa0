"""Counts Triton's compilations, and says of those that come when none should.

States: warming up → ready (`be_ready`). One for a process: Triton has one hook.
"""

from __future__ import annotations

from typing import Any

from triton import knobs

from engine.gpu.step_graphs import Say


class CompileWatch:
    """`num_compiled` kernels, of which `num_late` while a step waited for them."""

    def __init__(self, warn: Say) -> None:
        self.num_compiled = self.num_late = 0
        self._warn, self._is_ready = warn, False
        knobs.runtime.jit_post_compile_hook = self._compiled

    def be_ready(self) -> None:
        self._is_ready = True

    def _compiled(self, *, repr: str = "", **_: Any) -> None:  # noqa: A002
        """Also called for a kernel that comes out of the cache on disk: loading one costs milliseconds too."""
        self.num_compiled += 1
        if self._is_ready:
            self.num_late += 1
            self._warn("kernel_compiled_late", kernel=repr)
