"""Which ids a sequence has seen, for penalties: twice the number among its outputs, plus 1 if it is in the prompt."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def reference(token_ids: torch.Tensor, num_prompt_tokens: int, vocab_size: int) -> torch.Tensor:
    """[vocab_size] int32 of prompt and outputs."""
    outputs = torch.bincount(token_ids[num_prompt_tokens:].long(), minlength=vocab_size)
    prompt = torch.bincount(token_ids[:num_prompt_tokens].long(), minlength=vocab_size)
    return (2 * outputs + (prompt > 0)).to(torch.int32)


@triton.jit(do_not_specialize=["history", "num_prompt_tokens", "num_tokens"])
def _learn_kernel(
    histories_ptr,  # [num_histories, vocab] int32
    token_ids_ptr,  # [num_tokens] int32
    vocab, history, num_prompt_tokens, num_tokens, SIZE: tl.constexpr,
):
    history_ptr = histories_ptr + tl.cast(history, tl.int64) * vocab
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    token_id = tl.load(token_ids_ptr + i, mask=i < num_tokens, other=0)
    tl.atomic_or(history_ptr + token_id, 1, mask=i < num_prompt_tokens)
    tl.atomic_add(history_ptr + token_id, 2, mask=(i >= num_prompt_tokens) & (i < num_tokens))


@triton.jit(do_not_specialize=["num_rows"])
def _record_kernel(
    histories_ptr,  # [num_histories, vocab] int32
    history_of_ptr,  # [max_rows] int32: 1 + the row's history, 0: none
    rows_ptr,  # [num_rows] int32; -1: padding
    drawn_ptr,  # [num_rows] int64
    vocab, num_rows, SIZE: tl.constexpr,
):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    state = tl.load(rows_ptr + i, mask=i < num_rows, other=-1)
    history = tl.load(history_of_ptr + state, mask=state >= 0, other=0) - 1
    drawn = tl.load(drawn_ptr + i, mask=i < num_rows, other=0)
    counts = history >= 0
    at = histories_ptr + history.to(tl.int64) * vocab + drawn
    word = tl.load(at, mask=counts, other=0)
    tl.store(at, word + 2, mask=counts)


def learn(histories: torch.Tensor, history: int, token_ids: torch.Tensor, num_prompt_tokens: int) -> None:
    """Adds `token_ids` [num_tokens] int32 to one of `histories` [num_histories, vocab] int32."""
    assert histories.is_contiguous() and histories.dtype == token_ids.dtype == torch.int32
    if len(token_ids):
        _learn_kernel[(triton.cdiv(len(token_ids), 1024),)](
            histories, token_ids, histories.shape[1], history, num_prompt_tokens, len(token_ids), SIZE=1024,
            num_warps=4)


def record(histories: torch.Tensor, history_of: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor) -> None:
    """`drawn[i]` is one more output of the sequence at `rows[i]`, no two of which are equal; -1 is no row."""
    assert histories.is_contiguous() and drawn.dtype == torch.int64
    _record_kernel[(triton.cdiv(len(rows), 128),)](
        histories, history_of, rows, drawn, histories.shape[1], len(rows), SIZE=128, num_warps=4)
