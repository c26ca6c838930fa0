"""Draws on the device whatever can be drawn there: per step, by temperature alone or by the full chain of kernels.

A sequence, from its `join` to `forget`: plain (its temperature is all) | special (the full chain, in steps that have
one) | hosted (its parameters need the host; see `is_hosted`). The full chain follows `engine.sampling`, in its order:
the same tokens up to float32's rounding, and a plain row's token is the same bits in either path.

A captured decode step has drawn and advanced by temperature already when `draw` comes after it (`behind=1`): its
logits are drawn from again, so that grammars' masks are waited for while the forward pass runs, and no second set of
graphs is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.generation import TokenLogprobs
from common.sampling_params import SamplingParams
from engine.gpu.device_rows import DeviceRows
from engine.gpu.device_words import staging
from engine.gpu.sampling_rows import SamplingRows
from engine.step import Join, StepPlan
from kernels.adjust_logits import adjust_logits
from kernels.gumbel_argmax import gumbel_argmax
from kernels.token_counts import record
from kernels.top_logprobs import MAX_TOP, LogprobScratch, top_logprobs
from kernels.truncate_logits import TruncateScratch, truncate_logits

Masks = Mapping[int, NDArray[np.uint32]]
_SLOTS = 4  # of pinned memory: two steps may be in flight


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Of one step, on their way to the host; there once an event recorded after the draw has passed."""

    words: torch.Tensor  # pinned, see `kernels.top_logprobs`
    asked: Sequence[tuple[int, int, int]]  # row of the plan, row of `words`, alternatives

    def ready(self) -> dict[int, TokenLogprobs]:
        """By the plan's row."""
        found = {}
        for index, at, num_top in self.asked:
            ids = self.words[at, 1 : 1 + num_top].tolist()
            scores = self.words[at, MAX_TOP + 1 :].view(torch.float32)[: 1 + num_top].tolist()
            found[index] = TokenLogprobs(scores[0], tuple(ids), tuple(scores[1:]))
        return found


class DeviceSampling:
    """Over the rows of `rows`; `max_histories` sequences at most have penalties here, the others are hosted."""

    def __init__(
        self, rows: DeviceRows, vocab_size: int, end_token_ids: frozenset[int], device: torch.device,
        max_histories: int = 256,
    ) -> None:
        self._rows, self._ends = rows, end_token_ids
        self._more = SamplingRows(rows.max_rows, vocab_size, min(max_histories, rows.max_rows), device)
        self._special: dict[str, tuple[int, SamplingParams]] = {}
        self._hosted: set[str] = set()
        self._masks = torch.zeros(rows.max_rows, self._more.mask_words, dtype=torch.int32, device=device)
        self._staged_masks = [staging(rows.max_rows, self._more.mask_words, dtype=torch.int32, device=device)
                              for _ in range(_SLOTS)]
        self._staged_rows = [staging(rows.max_rows, dtype=torch.int32, device=device) for _ in range(_SLOTS)]
        self._mask_rows = torch.full((rows.max_rows,), -1, dtype=torch.int32, device=device)
        self._truncate = TruncateScratch.make(rows.max_rows, vocab_size, device)
        self._logprobs = LogprobScratch.make(rows.max_rows, vocab_size, device)
        self._results = [staging(rows.max_rows, 2 * (MAX_TOP + 1), dtype=torch.int32, device=device)
                         for _ in range(_SLOTS)]
        self._turn = 0

    def join(self, join: Join, row: int) -> bool:
        """A sequence has got `row`; before its first step. False: it is hosted, so the caller draws its tokens."""
        params = join.params
        if _is_plain(params):
            return True
        if self._needs_host(params):
            self._hosted.add(join.request_id)
            return False
        self._special[join.request_id] = (row, params)
        self._more.set(row, join, self._ends)
        return True

    def forget(self, request_id: str) -> None:
        """Whatever uses the row later comes later in the stream."""
        self._hosted.discard(request_id)
        if (held := self._special.pop(request_id, None)) is not None:
            self._more.clear(held[0])

    def hosted(self, plan: StepPlan) -> list[int]:
        """Rows of the plan that sample and are the host's to draw."""
        if not self._hosted:
            return []
        first = len(plan.decode)
        return [*(i for i, name in enumerate(plan.decode.request_ids) if name in self._hosted),
                *(first + i for i, row in enumerate(plan.chunks) if row.samples and row.request_id in self._hosted)]

    def is_plain(self, plan: StepPlan) -> bool:
        """Whether temperatures alone decide all of the step's draws; the hosted rows are not looked at."""
        if plan.masks is not None:
            return False
        if not self._special:
            return True
        decode = plan.decode
        if not self._special.keys().isdisjoint(decode.request_ids) and any(
                self._is_special_now(name, position)
                for name, position in zip(decode.request_ids, decode.output_positions, strict=True)):
            return False
        return not any(self._is_special_now(row.request_id, row.output_position) for row in plan.chunks if row.samples)

    def draw(
        self, plan: StepPlan, sampled: Sequence[int], logits: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor,
        masks: Masks, *, behind: int,
    ) -> PendingLogprobs | None:
        """The full chain: row i of `logits` [len(sampled) or more, vocab] is row `sampled[i]` of the plan.

        `rows` [as many as logits] int32 are rows of `DeviceRows`, -1 for padding; the ids go to `drawn` int64.
        `behind`: 1 where the rows were advanced by this step already, else 0. Enqueues only.
        """
        asked = [self._special.get(plan.rows[index].request_id) for index in sampled]
        active = [params for held in asked if held is not None for params in (held[1],)]
        self._more.flush()
        mask_rows = self._sent_masks(sampled, masks, len(logits)) if masks else None
        held, more = self._rows, self._more
        scratch = self._truncate
        adjusted = adjust_logits(
            logits, rows, held.output_positions, held.temperatures, more.changes, self._masks, mask_rows, scratch.maxes,
            behind=behind, has_lists=any(params.logit_bias or params.min_tokens for params in active),
            can_cut=bool(masks) or any(
                params.allowed_token_ids is not None or params.min_tokens or params.min_p for params in active))
        cut = [params for params in active if not params.is_greedy]
        is_changed = any(params.logit_bias or params.needs_history for params in active)
        truncate_logits(
            adjusted, rows, held.temperatures, more.top_ks, more.top_ps, scratch,
            by_count=any(params.top_k for params in cut), by_mass=any(params.top_p < 1.0 for params in cut),
            is_half=logits.dtype == torch.bfloat16 and not is_changed)
        gumbel_argmax(
            adjusted, rows, held.keys, held.output_positions, held.temperatures, scratch.slice_scores,
            scratch.slice_ids, drawn, behind=behind)
        if any(params.needs_history for params in active):
            record(more.histories, more.history_of, rows, drawn)
        self._turn += 1
        return self._sent_logprobs(sampled, asked, logits, rows, drawn)

    def _sent_logprobs(
        self, sampled: Sequence[int], asked: Sequence[tuple[int, SamplingParams] | None], logits: torch.Tensor,
        rows: torch.Tensor, drawn: torch.Tensor,
    ) -> PendingLogprobs | None:
        wanted = [(index, at, held[1].logprobs) for at, (index, held) in enumerate(zip(sampled, asked, strict=True))
                  if held is not None and held[1].logprobs is not None]
        if not wanted:
            return None
        found = top_logprobs(logits, rows, self._more.num_logprobs, drawn, self._logprobs)
        words = self._results[self._turn % _SLOTS][: len(found)]
        words.copy_(found, non_blocking=True)
        return PendingLogprobs(words, wanted)

    def _sent_masks(self, sampled: Sequence[int], masks: Masks, num_rows: int) -> torch.Tensor:
        """[num_rows] int32: where each row's mask lies in `_masks`, -1 for none."""
        words, places = self._staged_masks[self._turn % _SLOTS], self._staged_rows[self._turn % _SLOTS]
        places.fill_(-1)
        num = 0
        for at, index in enumerate(sampled):
            if (mask := masks.get(index)) is not None:
                words.numpy()[num] = mask.view(np.int32)
                places[at] = num
                num += 1
        self._masks[:num].copy_(words[:num], non_blocking=True)
        self._mask_rows[:num_rows].copy_(places[:num_rows], non_blocking=True)
        return self._mask_rows[:num_rows]

    def _needs_host(self, params: SamplingParams) -> bool:
        """A grammar may take back outputs, which histories here cannot."""
        has_penalty = params.needs_history
        return bool(params.bad_words) or params.prompt_logprobs is not None or (
            has_penalty and (params.grammar is not None or not self._more.has_free_history))

    def _is_special_now(self, request_id: str, output_position: int) -> bool:
        held = self._special.get(request_id)
        return held is not None and not (
            _is_plain(held[1], but_min_tokens=True) and output_position >= held[1].min_tokens)


def _is_plain(params: SamplingParams, *, but_min_tokens: bool = False) -> bool:
    """Whether a draw without a mask needs the temperature alone."""
    is_cut = not params.is_greedy and (params.top_k or params.top_p < 1.0 or params.min_p)
    return not (is_cut or params.needs_history or params.logit_bias or params.allowed_token_ids is not None
                or params.logprobs is not None or params.prompt_logprobs is not None
                or (params.min_tokens and not but_min_tokens))
