"""The processes of one stack, started together, kept alive, stopped together.

States: idle → starting → up → stopping → stopped; a start that fails goes to stopping by `stop`. Rank 0 (the
servers) must be ready before the rest starts, all at once; stopping goes from the highest rank down, so that the
gateway finishes its streams while what they need still lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from stack.child import Child, ChildSpec, RestartPolicy
from stack.child_log import ChildLog
from stack.console import Console


class Supervisor:
    """`changed` is called after every change of a child's state."""

    def __init__(
        self, specs: Sequence[ChildSpec], log_dir: Path, console: Console,
        changed: Callable[[], None] = lambda: None, policy: RestartPolicy | None = None,
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        policy = policy or RestartPolicy()
        self.children = [Child(s, ChildLog(s.name, log_dir, console), console, changed, policy) for s in specs]
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when all are ready. Raises `Unavailable` for the first that fails; `stop` is still to be called."""
        servers = [child for child in self.children if child.spec.rank == 0]
        others = [child for child in self.children if child.spec.rank > 0]
        for group in (servers, others):
            await _all(self._start(child) for child in group)

    async def _start(self, child: Child) -> None:
        await child.start()
        self._keepers.append(asyncio.create_task(child.keep()))

    async def stop(self) -> None:
        """Drain rank by rank, each child within its own limit; nothing of it runs afterwards."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for rank in sorted({child.spec.rank for child in self.children}, reverse=True):
            await asyncio.gather(*(child.stop() for child in self.children if child.spec.rank == rank))

    def kill(self) -> None:
        """No more patience: SIGKILL to every child."""
        for child in self.children:
            child.kill()


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them together; the first error cancels the others and is raised as itself."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
