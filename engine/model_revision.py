"""Which weights a folder holds, cheaply: two folders with one revision compute the same KV.

A digest of config.json and, per safetensors file, its size, its header (names, shapes, offsets) and a sample of
its tensor bytes. Reading every byte of an 8B model would cost minutes at each start.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from common.errors import ModelLoadError

_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 8


def model_revision(folder: Path) -> str:
    """16 hex digits. Raises `ModelLoadError` when config.json or the weights cannot be read."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        digest.update((folder / "config.json").read_bytes())
        for file in sorted(folder.glob("*.safetensors")):
            _add_weights(digest, file)
    except (OSError, struct.error) as error:
        raise ModelLoadError(f"model folder {folder}: {error}") from None
    return digest.hexdigest()


def _add_weights(digest: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as raw:
        (header_bytes,) = struct.unpack("<Q", raw.read(8))
        digest.update(raw.read(min(header_bytes, size)))
        for i in range(_NUM_SAMPLES):
            raw.seek(max(0, (size - _SAMPLE_BYTES) * i // max(1, _NUM_SAMPLES - 1)))
            digest.update(raw.read(_SAMPLE_BYTES))
