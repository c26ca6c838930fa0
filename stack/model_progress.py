"""Model folders for the commands: found, or fetched with progress shown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ModelLoadError
from stack.model_convert import convert_gguf
from stack.model_fetch import MODEL_NAME, Progress, default_cache_dir, fetch_smollm2, resolve_model

_PLAIN_EVERY = 0.1  # without a terminal: one line each tenth


def ensure_model(name_or_path: str) -> Path:
    """The model's folder; the known small model is fetched when it is missing. Raises `ModelLoadError`."""
    try:
        return resolve_model(name_or_path)
    except ModelLoadError:
        if not _is_known(name_or_path):
            raise
    return fetch_model(name_or_path, None)


def fetch_model(name: str, to: Path | None) -> Path:
    """Fetch a known model into `to` (default: the cache); a model that is there stays. Raises `ModelLoadError`."""
    if to is not None and (to / "config.json").is_file():
        return to
    if not _is_known(name):
        raise ModelLoadError(f"model {name!r} is not known (known: {MODEL_NAME}); give a folder to `shoal up --model`",
                             param="model")
    folder = (to or default_cache_dir() / MODEL_NAME).expanduser().absolute()
    if folder.is_dir():
        return folder
    with _shown(MODEL_NAME) as progress:
        return fetch_smollm2(folder, progress)


def convert_model(gguf: Path, out: Path) -> Path:
    """Make the folder `out` of a GGUF file, as `convert_gguf` does. Raises `ModelLoadError`."""
    with _shown(gguf.name) as progress:
        return convert_gguf(gguf.expanduser().absolute(), out.expanduser().absolute(), progress)


def _is_known(name: str) -> bool:
    return name.lower().removeprefix("huggingfacetb/") in {"smollm2", "smollm2-135m", MODEL_NAME.lower()}


@contextmanager
def _shown(name: str) -> Iterator[Progress]:
    """A bar on a terminal, else a line each tenth."""
    if not sys.stderr.isatty():
        yield _plain_lines(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(),
             console=Console(stderr=True)) as bar:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{stage} {name}", total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def _plain_lines(name: str) -> Progress:
    shown: dict[str, float] = {}

    def show(stage: str, done: int, total: int) -> None:
        share = done / total if total else 1.0
        if share >= shown.get(stage, 0.0):
            print(f"{stage} {name}: {share:.0%} of {total / 1e6:.0f} MB", file=sys.stderr, flush=True)
            shown[stage] = share + _PLAIN_EVERY

    return show
