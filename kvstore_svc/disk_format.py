"""What the SSD tier's file looks like. Little-endian; each record ends in a crc32 of what stands before it.

    [superblock, 4 KiB] [slab 0] [slab 1] ...
    slab: [slab header, 64 bytes] [one slot header per slot] [padding to 4 KiB] [slots, `stride` apart]

A slot header is written last and names the slab's stride, so a header left over from another layout, or one torn in
writing, is no header at all.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final

from common.errors import ConfigError

PAGE: Final = 4096
FORMAT_VERSION: Final = 1
SLAB_HEADER_BYTES: Final = 64
SLOT_HEADER_BYTES: Final = 96

_MAGIC: Final = b"SHOALKV\0"
_SLAB_MAGIC: Final = b"SLAB"
_SLOT_MAGIC: Final = b"SLOT"
_SUPERBLOCK: Final = struct.Struct("<8sIQQ16s")
_SLAB: Final = struct.Struct("<4sQ")
_SLOT: Final = struct.Struct("<4sQQI32s32s")  # 88 bytes


@dataclass(frozen=True, slots=True)
class Superblock:
    """Whose file it is: content under another hash key can never be asked for."""

    num_bytes: int
    slab_bytes: int
    key_digest: bytes  # 16 bytes

    def pack(self) -> bytes:
        return _sealed(_SUPERBLOCK.pack(_MAGIC, FORMAT_VERSION, self.num_bytes, self.slab_bytes, self.key_digest), PAGE)


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """One stored block."""

    stride: int
    num_bytes: int
    checksum: int
    key: bytes  # 32 bytes
    parent: bytes  # 32 bytes

    def pack(self) -> bytes:
        return _sealed(
            _SLOT.pack(_SLOT_MAGIC, self.stride, self.num_bytes, self.checksum, self.key, self.parent),
            SLOT_HEADER_BYTES)


def read_superblock(raw: bytes, path: str) -> Superblock | None:
    """None for a file of ours that has another version or is damaged.

    Raises `ConfigError` for a file that is not ours: it is never overwritten.
    """
    if raw[: len(_MAGIC)] != _MAGIC:
        if raw.strip(b"\0"):
            raise ConfigError(f"ssd_path: {path} is not a file of the KV store and is left alone", param="ssd_path")
        return None
    fields = _unsealed(_SUPERBLOCK, raw)
    if fields is None or fields[1] != FORMAT_VERSION:
        return None
    return Superblock(*fields[2:])


def pack_slab_header(stride: int) -> bytes:
    return _sealed(_SLAB.pack(_SLAB_MAGIC, stride), SLAB_HEADER_BYTES)


def read_slab_stride(raw: bytes) -> int:
    """0 for a slab that has never been used."""
    fields = _unsealed(_SLAB, raw)
    return int(fields[1]) if fields is not None and fields[0] == _SLAB_MAGIC else 0


def read_slot_header(raw: bytes, stride: int) -> SlotHeader | None:
    """None for a free or torn slot."""
    fields = _unsealed(_SLOT, raw)
    if fields is None or fields[0] != _SLOT_MAGIC or fields[1] != stride or fields[2] > stride:
        return None
    return SlotHeader(*fields[1:])


def head_bytes(num_slots: int) -> int:
    """Where a slab's first slot begins."""
    return -(-(SLAB_HEADER_BYTES + num_slots * SLOT_HEADER_BYTES) // PAGE) * PAGE


def num_slots(slab_bytes: int, stride: int) -> int:
    """How many slots of a stride fit into a slab."""
    fits = max(slab_bytes - SLAB_HEADER_BYTES, 0) // (stride + SLOT_HEADER_BYTES)
    while fits and head_bytes(fits) + fits * stride > slab_bytes:
        fits -= 1
    return fits


def _sealed(raw: bytes, size: int) -> bytes:
    return (raw + struct.pack("<I", zlib.crc32(raw))).ljust(size, b"\0")


def _unsealed(layout: struct.Struct, raw: bytes) -> tuple[Any, ...] | None:
    if len(raw) < layout.size + 4:
        return None
    (crc,) = struct.unpack_from("<I", raw, layout.size)
    return layout.unpack_from(raw) if crc == zlib.crc32(raw[: layout.size]) else None
