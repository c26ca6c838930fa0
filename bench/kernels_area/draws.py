"""Sampling: by temperature alone, and each part of the full chain, beside torch's ways of the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.figures import Figure
from bench.kernels_area.graph_time import Act, Ceilings, moved
from kernels.gumbel_argmax import gumbel_argmax, num_slices
from kernels.top_logprobs import MAX_TOP, LogprobScratch, top_logprobs
from kernels.truncate_logits import TruncateScratch, truncate_logits

_SETS = 4


def measure(vocab: int, num_rows: int, ceilings: Ceilings, device: torch.device) -> Iterator[Figure]:
    logits = torch.randn(_SETS, num_rows, vocab, device=device).bfloat16()
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    keys = torch.randint(-(2**62), 2**62, (num_rows,), device=device)
    ones = torch.ones(num_rows, device=device)
    slices = num_slices(vocab)
    scores = torch.empty(num_rows, slices, device=device)
    ids = torch.empty(num_rows, slices, dtype=torch.int32, device=device)
    drawn = torch.zeros(num_rows, dtype=torch.int64, device=device)
    num_bytes = num_rows * vocab * 2
    theirs: list[Act] = [partial(_multinomial, x) for x in logits]
    for race in (False, True):
        ours = [partial(gumbel_argmax, x, rows, keys, rows, ones, scores, ids, drawn, race=race) for x in logits]
        yield from moved(f"draw by temperature{' (race)' if race else ''}, {num_rows} rows", num_bytes, ours, ceilings,
                         "softmax, multinomial", theirs)
    scratch = LogprobScratch.make(num_rows, vocab, device)
    wanted = torch.full((num_rows,), MAX_TOP + 1, dtype=torch.int32, device=device)
    yield from moved(
        f"logprobs and {MAX_TOP} likeliest, {num_rows} rows", num_bytes,
        [partial(top_logprobs, x, rows, wanted, drawn, scratch) for x in logits], ceilings, "log_softmax, topk",
        [partial(_topk, x) for x in logits])
    yield from _truncation(logits, rows, ones, ceilings)


def _truncation(
    logits: torch.Tensor, rows: torch.Tensor, ones: torch.Tensor, ceilings: Ceilings
) -> Iterator[Figure]:
    """In place, so that from the second round on it cuts what is cut: as much work."""
    num_rows, vocab = logits.shape[1:]
    scratch = TruncateScratch.make(num_rows, vocab, logits.device)
    wide = logits.float()
    scratch.maxes.fill_(float(wide.max()))
    top_ks, top_ps = torch.full_like(rows, 50), ones * 0.9
    theirs: list[Act] = [partial(_sort, x) for x in wide]
    for name, by_count in (("top_k 50", True), ("top_p 0.9", False)):
        for is_half in (True, False):
            ours = [partial(truncate_logits, x, rows, ones, top_ks, top_ps, scratch, by_count=by_count,
                            by_mass=not by_count, is_half=is_half) for x in wide]
            yield from moved(f"{name}, {16 if is_half else 32} bits, {num_rows} rows", num_rows * vocab * 4, ours,
                             ceilings, "sort, cumsum", theirs)


def _multinomial(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(torch.softmax(logits.float(), -1), 1)


def _topk(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1).topk(MAX_TOP).values


def _sort(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.sort(logits, descending=True).values, -1).cumsum(-1)
