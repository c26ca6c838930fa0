"""`shoal model convert`: one GGUF file into a Hugging Face folder that `shoal up --model` takes."""

from __future__ import annotations

import sys
from pathlib import Path

from common.errors import ModelLoadError
from engine.model_config import ModelConfig
from stack.model_fetch import Progress
from stack.model_staging import CONVERT_DEADLINE_S, build_once, bytes_under, require_converter, run_child

_FLOAT_BYTES = 4
_MAGIC = b"GGUF"


def convert_gguf(gguf: Path, dest: Path, progress: Progress) -> Path:
    """Make `dest` and return it; `progress` hears of the stage "convert". Raises `ModelLoadError`, then without a
    trace of `dest`: for a file that is none, one that transformers cannot read, and an architecture or a field that
    the engine does not compute.
    """
    if dest.exists():
        raise ModelLoadError(f"{dest} is there already: give a new folder", param="out")
    try:
        with gguf.open("rb") as file:
            is_gguf = file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise ModelLoadError(f"cannot read {gguf}: {error.strerror or error}", param="file") from error
    if not is_gguf:
        raise ModelLoadError(f"{gguf} is not a GGUF file", param="file")
    require_converter("converting a GGUF file")

    def build(staging: Path) -> Path:
        temporary, folder = staging / "tmp", staging / "model"
        temporary.mkdir()
        folder.mkdir()
        total = _float32_bytes(gguf)
        script = Path(__file__).with_name("gguf_convert.py")
        run_child([sys.executable, "-P", str(script), str(gguf), str(folder)], f"converting {gguf.name}", temporary,
                  CONVERT_DEADLINE_S, lambda: progress("convert", min(bytes_under(folder), total), total))
        progress("convert", total, total)
        ModelConfig.from_folder(folder)
        return folder

    return build_once(dest, build)


def _float32_bytes(gguf: Path) -> int:
    """What the tensors take when they are written as float32."""
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(gguf).tensors
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ModelLoadError(f"{gguf} cannot be read: {error}", param="file") from error
    return max(1, _FLOAT_BYTES * sum(int(tensor.n_elements) for tensor in tensors))
