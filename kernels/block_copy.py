"""Whole KV blocks in one launch: within the pool, and between it and a contiguous staging buffer.

A block is one run of bytes in the block-major pool, so that all three are copies of rows. `num_programs` bounds how
much of the device a copy takes beside a forward pass: each program walks over many tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

TILE = 4096  # 32-bit words
_ALL = 1024  # programs where nothing else runs


@triton.jit(do_not_specialize=["num_tiles"])
def _kernel(
    source_ptr, target_ptr,  # [., words] int32
    source_ids_ptr, target_ids_ptr,  # [num_blocks] int32
    words, tiles_per_block, num_tiles, SOURCE_IDS: tl.constexpr, TARGET_IDS: tl.constexpr, TILE: tl.constexpr,
):
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        index = tile // tiles_per_block
        at = (tile % tiles_per_block) * TILE + tl.arange(0, TILE)
        if SOURCE_IDS:
            source = tl.load(source_ids_ptr + index)
        else:
            source = index
        if TARGET_IDS:
            target = tl.load(target_ids_ptr + index)
        else:
            target = index
        value = tl.load(source_ptr + tl.cast(source, tl.int64) * words + at, mask=at < words)
        tl.store(target_ptr + tl.cast(target, tl.int64) * words + at, value, mask=at < words)


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_programs: int = _ALL) -> None:
    """`pool[targets[i]] = pool[sources[i]]`; `sources`, `targets` [num] int32, no target among either's others."""
    words = _words(pool)
    _launch(words, words, sources, targets, len(sources), num_programs)


def gather_blocks(
    pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, num_programs: int = _ALL
) -> None:
    """`staging[i] = pool[block_ids[i]]`; `staging` [at least num, ...] is contiguous, of the pool's dtype and block."""
    _launch(_words(pool), _words(staging), block_ids, None, len(block_ids), num_programs)


def scatter_blocks(
    staging: torch.Tensor, block_ids: torch.Tensor, pool: torch.Tensor, num_programs: int = _ALL
) -> None:
    """`pool[block_ids[i]] = staging[i]`; the ids differ from each other."""
    _launch(_words(staging), _words(pool), None, block_ids, len(block_ids), num_programs)


def independent(copies: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    """Copies (source, target), one after another, in runs within which their order does not matter."""
    runs: list[Sequence[tuple[int, int]]] = []
    first, read, written = 0, set[int](), set[int]()
    for index, (source, target) in enumerate(copies):
        if source in written or target in written or target in read:
            runs.append(copies[first:index])
            first, read, written = index, set(), set()
        read.add(source)
        written.add(target)
    return [*runs, copies[first:]] if len(copies) > first else runs


def _words(blocks: torch.Tensor) -> torch.Tensor:
    assert blocks.is_contiguous() and blocks[0].numel() * blocks.element_size() % 4 == 0
    return blocks.view(len(blocks), -1).view(torch.int32)


def _launch(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor | None, target_ids: torch.Tensor | None,
    num: int, num_programs: int,
) -> None:
    words = source.shape[1]
    assert words == target.shape[1], "a block of one is not a block of the other"
    if not num:
        return
    tiles = triton.cdiv(words, TILE)
    some = source_ids if source_ids is not None else target_ids
    assert some is not None and some.dtype == torch.int32
    _kernel[(min(num_programs, num * tiles),)](
        source, target, some if source_ids is None else source_ids, some if target_ids is None else target_ids, words,
        tiles, num * tiles, SOURCE_IDS=source_ids is not None, TARGET_IDS=target_ids is not None, TILE=TILE,
        num_warps=4)
