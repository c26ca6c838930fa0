"""How far the loading of a model is, shown to whoever waits at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

Told = Callable[[int, int], None]  # (bytes read, bytes in all)


@contextmanager
def load_bar(model: str, console: Console | None = None) -> Iterator[Told | None]:
    """To be told of (bytes read, bytes in all). Where stderr (or `console`) is no terminal it is None and nothing is
    shown: there the log line at the end tells it.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(model, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
