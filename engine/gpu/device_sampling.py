"""Draws on the device that need more than a temperature: from the logits of a step that has drawn without.

A sequence, from its `join` to `forget`: plain (its temperature is all) | special (the chain of kernels below) | hosted
(its parameters need the host). The chain follows `engine.sampling`, in its order: the same tokens up to float32's
rounding; a row that asks for nothing gets the bits that it gets without the chain.

Every step draws by temperature and advances its rows by itself; `draw` comes after it and replaces the tokens. So
there is one graph of a step for all, and grammars' masks are waited for while its forward pass runs.
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
from kernels.gumbel_argmax import SLICE, gumbel_argmax
from kernels.token_counts import learn, record
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


@dataclass(frozen=True, slots=True)
class _Chain:
    """What some row of a step needs; see the kernels' arguments of these names."""

    has_masks: bool = False
    has_lists: bool = False
    can_cut: bool = False
    by_count: bool = False
    by_mass: bool = False
    moves: bool = False  # logits that are not the model's, so of more than 16 bits

    @staticmethod
    def of(wishes: Sequence[SamplingParams], *, has_masks: bool) -> _Chain:
        cut = [params for params in wishes if not params.is_greedy]
        return _Chain(
            has_masks, any(params.logit_bias or params.min_tokens for params in wishes),
            has_masks or any(params.allowed_token_ids is not None or params.min_tokens for params in wishes)
            or any(params.min_p for params in cut),
            any(params.top_k for params in cut), any(params.top_p < 1.0 for params in cut),
            any(params.logit_bias or params.needs_history for params in wishes))


class DeviceSampling:
    """For steps of at most `max_num_seqs` drawing rows; at most `max_histories` sequences have penalties here."""

    def __init__(
        self, rows: DeviceRows, vocab_size: int, end_token_ids: frozenset[int], max_num_seqs: int,
        device: torch.device, max_histories: int = 256, slice_size: int = SLICE,
    ) -> None:
        self._rows, self._ends, self._slice_size = rows, end_token_ids, slice_size
        self._more = SamplingRows(rows.max_rows, vocab_size, min(max_histories, max_num_seqs), device)
        self._special: dict[str, tuple[int, SamplingParams]] = {}
        self._hosted: set[str] = set()
        mask_shape = max_num_seqs, self._more.mask_words
        self._masks = torch.zeros(mask_shape, dtype=torch.int32, device=device)
        self._mask_rows = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self._staged_masks = [staging(*mask_shape, dtype=torch.int32, device=device) for _ in range(_SLOTS)]
        self._staged_rows = [staging(max_num_seqs, dtype=torch.int32, device=device) for _ in range(_SLOTS)]
        self._adjusted = torch.zeros(max_num_seqs, vocab_size, dtype=torch.float32, device=device)
        self._scratch = TruncateScratch.make(max_num_seqs, vocab_size, device, slice_size)
        self._logprobs = LogprobScratch.make(max_num_seqs, vocab_size, device, slice_size)
        self._results = [staging(*self._logprobs.found.shape, dtype=torch.int32, device=device)
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
        """Before its row is given to another; whatever uses the row then comes later in the stream."""
        self._hosted.discard(request_id)
        if (held := self._special.pop(request_id, None)) is not None:
            self._more.clear(held[0])

    def hosted(self, plan: StepPlan, sampled: Sequence[int]) -> list[int]:
        """Places in `sampled` of the rows that are the host's to draw."""
        if not self._hosted:
            return []
        return [at for at, index in enumerate(sampled) if _name(plan, index) in self._hosted]

    def draw(
        self, plan: StepPlan, sampled: Sequence[int], logits: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor,
        masks: Masks,
    ) -> PendingLogprobs | None:
        """Draw again for rows of the device that this step has advanced. Enqueues only; hosted rows draw anything.

        Row i of `logits` [len(sampled), vocab] is row `sampled[i]` of the plan and `rows[i]` of `DeviceRows`, whose id
        goes to `drawn[i]` int64. Last tokens are the caller's to replace.
        """
        asked = [self._special.get(_name(plan, index)) for index in sampled]
        chain = _Chain.of([held[1] for held in asked if held is not None], has_masks=bool(masks))
        self._more.flush()
        self._turn += 1
        mask_rows = self._sent_masks(sampled, masks) if masks else None
        self._run(chain, logits, rows, drawn, mask_rows)
        return self._sent_logprobs(sampled, asked, logits, rows, drawn)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile all that a draw from logits of `dtype` may launch."""
        device = self._masks.device
        logits = torch.zeros(1, self._adjusted.shape[1], dtype=dtype, device=device)
        rows = torch.full((1,), -1, dtype=torch.int32, device=device)
        drawn = torch.zeros(1, dtype=torch.int64, device=device)
        for flag in (False, True):
            self._run(_Chain(flag, True, True, True, True, flag), logits, rows, drawn,
                      self._mask_rows[:1] if flag else None)
        learn(self._more.histories, 0, torch.zeros_like(rows), 1)  # a history is cleared when it is taken
        top_logprobs(logits, rows, self._more.num_logprobs, drawn, self._logprobs, self._slice_size)

    def _run(
        self, chain: _Chain, logits: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor,
        mask_rows: torch.Tensor | None,
    ) -> None:
        held, more, scratch = self._rows, self._more, self._scratch
        adjusted = self._adjusted[: len(logits)]
        adjust_logits(
            logits, rows, held.output_positions, held.temperatures, more.changes, self._masks, mask_rows,
            scratch.maxes, adjusted, behind=1, has_lists=chain.has_lists, can_cut=chain.can_cut,
            slice_size=self._slice_size)
        truncate_logits(
            adjusted, rows, held.temperatures, more.top_ks, more.top_ps, scratch, by_count=chain.by_count,
            by_mass=chain.by_mass, is_half=logits.dtype == torch.bfloat16 and not chain.moves,
            slice_size=self._slice_size)
        gumbel_argmax(
            adjusted, rows, held.keys, held.output_positions, held.temperatures, scratch.slice_scores,
            scratch.slice_ids, drawn, behind=1, slice_size=self._slice_size)
        if chain.moves:
            record(more.histories, more.history_of, rows, drawn)

    def _sent_logprobs(
        self, sampled: Sequence[int], asked: Sequence[tuple[int, SamplingParams] | None], logits: torch.Tensor,
        rows: torch.Tensor, drawn: torch.Tensor,
    ) -> PendingLogprobs | None:
        wanted = [(index, at, held[1].logprobs) for at, (index, held) in enumerate(zip(sampled, asked, strict=True))
                  if held is not None and held[1].logprobs is not None]
        if not wanted:
            return None
        found = top_logprobs(logits, rows, self._more.num_logprobs, drawn, self._logprobs, self._slice_size)
        words = self._results[self._turn % _SLOTS][: len(found)]
        words.copy_(found, non_blocking=True)
        return PendingLogprobs(words, wanted)

    def _sent_masks(self, sampled: Sequence[int], masks: Masks) -> torch.Tensor:
        """[len(sampled)] int32: where each row's mask lies in `_masks`, -1 for none."""
        words, places = self._staged_masks[self._turn % _SLOTS], self._staged_rows[self._turn % _SLOTS].numpy()
        masked = [at for at, index in enumerate(sampled) if index in masks]
        places[: len(sampled)] = -1
        places[masked] = np.arange(len(masked))
        for place, at in enumerate(masked):
            words.numpy()[place] = masks[sampled[at]].view(np.int32)
        self._masks[: len(masked)].copy_(words[: len(masked)], non_blocking=True)
        mask_rows = self._mask_rows[: len(sampled)]
        mask_rows.copy_(self._staged_rows[self._turn % _SLOTS][: len(sampled)], non_blocking=True)
        return mask_rows

    def _needs_host(self, params: SamplingParams) -> bool:
        """A grammar may take back outputs, which histories here cannot."""
        has_penalty = params.needs_history
        return bool(params.bad_words) or (
            has_penalty and (params.grammar is not None or not self._more.has_free_history))


def _name(plan: StepPlan, index: int) -> str:
    num_decode = len(plan.decode)
    return plan.decode.request_ids[index] if index < num_decode else plan.chunks[index - num_decode].request_id


def _is_plain(params: SamplingParams) -> bool:
    """Whether a draw without a mask needs the temperature alone."""
    is_cut = not params.is_greedy and (params.top_k or params.top_p < 1.0 or params.min_p)
    return not (is_cut or params.needs_history or params.logit_bias or params.allowed_token_ids is not None
                or params.logprobs is not None or params.min_tokens)
