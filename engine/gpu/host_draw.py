"""Draws that need more than a temperature, and scores of prompts: by the sampler on the host, from the logits.

Keeps what that sampler keeps: of each sequence from its join to `forget`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.generation import TokenLogprobs
from common.sampling_params import SamplingParams
from engine.gpu.decoder import GpuDecoder
from engine.sampling.batch_sampler import BatchSampler
from engine.sampling.token_logprobs import token_logprobs
from engine.step import UNKNOWN_TOKEN, Join, PlannedRow, StepPlan

_SCORED_LOGITS = 1 << 24  # logits of a prompt that are there at once: 64 MiB


def is_plain(params: SamplingParams) -> bool:
    """Whether a draw needs the temperature alone, once `min_tokens` are drawn."""
    is_cut = not params.is_greedy and (params.top_k or params.top_p < 1.0 or params.min_p)
    return not (is_cut or params.needs_history or params.logit_bias or params.allowed_token_ids is not None
                or params.grammar or params.logprobs is not None)


class HostDraw:
    def __init__(self, decoder: GpuDecoder, eos_token_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._sampler = BatchSampler(eos_token_ids)

    def join(self, join: Join) -> None:
        self._sampler.join(join)

    def forget(self, sequence_id: str) -> None:
        self._sampler.forget(sequence_id)

    def draw(
        self, plan: StepPlan, sampled: Sequence[int], logits: torch.Tensor, masks: Mapping[int, NDArray[np.uint32]]
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """`logits` [len(sampled), vocab] of the plan's rows `sampled`, `masks` of the plan. Waits for the logits.

        Returns the tokens in the same order, and logprobs by the plan's row.
        """
        for row in plan.rows:
            self._sampler.learn(_without_unknown(row))
        host = logits.float().cpu().numpy()
        tokens, scores = self._sampler.draw(
            [plan.rows[index] for index in sampled], host, [masks.get(index) for index in sampled])
        return tokens, {index: score for index, score in zip(sampled, scores, strict=True) if score is not None}

    def score_prompts(
        self, plan: StepPlan, x: torch.Tensor, residual: torch.Tensor
    ) -> dict[int, Sequence[TokenLogprobs]]:
        """`x`, `residual` of all the plan's flat tokens → for the rows with `scores_prompt`, as a result has them."""
        scores: dict[int, Sequence[TokenLogprobs]] = {}
        first = len(plan.decode)
        for index, row in enumerate(plan.chunks, first):
            end = first + len(row.token_ids)
            if row.scores_prompt:
                scores[index] = self._scores(row, x[first:end], residual[first:end])
            first = end
        return scores

    def _scores(self, row: PlannedRow, x: torch.Tensor, residual: torch.Tensor) -> list[TokenLogprobs]:
        """In slices, so that a long prompt's logits are never all there."""
        targets = self._sampler.prompt_of(row.request_id)[row.start + 1 : row.start + 1 + len(row.token_ids)]
        num_top, step = row.params.prompt_logprobs or 0, max(1, _SCORED_LOGITS // self._decoder.sizes.vocab)
        scores: list[TokenLogprobs] = []
        for first in range(0, len(targets), step):
            part = targets[first : first + step]
            where = slice(first, first + len(part))
            logits = self._decoder.logits(x[where].contiguous(), residual[where].clone()).float().cpu().numpy()
            scores += (token_logprobs(logits[i], target, num_top) for i, target in enumerate(part))
        return scores


def _without_unknown(row: PlannedRow) -> PlannedRow:
    """A token that the sampler drew itself is nothing new to it."""
    if row.token_ids[0] != UNKNOWN_TOKEN:
        return row
    return row._replace(token_ids=row.token_ids[1:], start=row.start + 1)
