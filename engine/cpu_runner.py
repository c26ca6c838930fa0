"""Executes step plans with torch on the CPU.

Life: loaded (weights and KV cache allocated) → executing, one plan at a time → dropped with the process. Between
plans it holds the KV bytes in a request's blocks, and of each sequence its last draw and what the sampler keeps: from
its join to `forget`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from common.errors import InternalError
from common.generation import TokenLogprobs
from engine.cpu_attention import CpuAttention
from engine.kv_cache import KvCache
from engine.models.decoder import DecoderModel
from engine.ragged_batch import RaggedBatch, build_batch
from engine.sampling.batch_sampler import BatchSampler
from engine.sampling.token_logprobs import token_logprobs
from engine.step import UNKNOWN_TOKEN, BlockCopy, PlannedRow, StepPlan, StepResult

_SCORED_LOGITS = 1 << 22  # logits of a prompt that are there at once: 16 MiB


class TorchRunner:
    """A `Runner`. A token id outside the vocabulary or a block outside the pool raises `IndexError`."""

    def __init__(self, model: DecoderModel, cache: KvCache) -> None:
        self.model_config = model.config
        self.cache = cache
        self._model = model
        self._launched: deque[StepPlan] = deque()
        self._forgetting: deque[tuple[int, str]] = deque()  # (step after whose result to forget, request)
        self._sampler = BatchSampler(model.config.eos_token_ids)
        self._last_drawn: dict[str, int] = {}

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.model_config.eos_token_ids

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def block_bytes(self) -> int:
        return self.cache.block_bytes

    def block_view(self, block_id: int) -> memoryview:
        return self.cache.block_view(block_id)

    def launch(self, plan: StepPlan) -> None:
        """The work is done in `collect`: there is no other processor to give it to."""
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        result = self._execute(plan)
        while self._forgetting and self._forgetting[0][0] == plan.step_id:
            self._drop(self._forgetting.popleft()[1])
        return result

    def forget(self, request_id: str) -> None:
        if self._launched:
            self._forgetting.append((self._launched[-1].step_id, request_id))
        else:
            self._drop(request_id)

    @property
    def num_sequences(self) -> int:
        """Of which something is kept."""
        return max(len(self._sampler), len(self._last_drawn))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> tuple[list[int], torch.Tensor]:
        """Compute the plan's KV; the indices of the rows that sample and their logits [rows, vocab] float32."""
        if not plan.num_rows:
            return [], torch.empty(0, self.vocab_size)
        batch = build_batch(plan, self.cache.block_size)
        return [index for index, _ in batch.sampled], self._last_logits(batch, self._forward(batch))

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        """Compute every row's KV and draw a token for each row that samples."""
        self._copy_blocks(plan.copies)
        for join in plan.joins:
            self._sampler.join(join)
        if not plan.num_rows:
            return StepResult(plan.step_id, [])
        plan = self._with_known_tokens(plan)
        for row in plan.rows:
            self._sampler.learn(row)
        batch = build_batch(plan, self.cache.block_size)
        hidden = self._forward(batch)
        prompt_logprobs = {index: self._prompt_logprobs(plan.rows[index], hidden[first:])
                           for index, first in batch.scored}
        tokens, logprobs = self._draw(plan, batch, hidden)
        return StepResult(plan.step_id, tokens, logprobs, prompt_logprobs)

    def _draw(
        self, plan: StepPlan, batch: RaggedBatch, hidden: torch.Tensor
    ) -> tuple[list[int | None], dict[int, TokenLogprobs]]:
        drawn: list[int | None] = [None] * plan.num_rows
        logits = self._last_logits(batch, hidden).numpy()
        indices = [index for index, _ in batch.sampled]
        masks = plan.masks.wait() if plan.masks is not None else {}
        rows = [plan.rows[index] for index in indices]
        tokens, scores = self._sampler.draw(rows, logits, [masks.get(index) for index in indices])
        for index, row, token in zip(indices, rows, tokens, strict=True):
            drawn[index] = self._last_drawn[row.request_id] = token
        return drawn, {index: score for index, score in zip(indices, scores, strict=True) if score is not None}

    def _forward(self, batch: RaggedBatch) -> torch.Tensor:
        attention = CpuAttention(self.cache, batch.rows, torch.from_numpy(batch.slot_mapping))
        return self._model.forward(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), attention)

    def _last_logits(self, batch: RaggedBatch, hidden: torch.Tensor) -> torch.Tensor:
        last = torch.tensor([flat for _, flat in batch.sampled], dtype=torch.int64)
        return self._model.logits(hidden[last])

    def _prompt_logprobs(self, row: PlannedRow, hidden: torch.Tensor) -> Sequence[TokenLogprobs]:
        """`hidden` begins with the row's. In slices, so that a long prompt's logits are never all there."""
        targets = self._sampler.prompt_of(row.request_id)[row.start + 1 : row.start + 1 + len(row.token_ids)]
        num_top = row.params.prompt_logprobs or 0
        step = max(1, _SCORED_LOGITS // self.vocab_size)
        scores: list[TokenLogprobs] = []
        for first in range(0, len(targets), step):
            part = targets[first : first + step]
            logits = self._model.logits(hidden[first : first + len(part)]).numpy()
            scores += (token_logprobs(logits[i], target, num_top) for i, target in enumerate(part))
        return scores

    def _with_known_tokens(self, plan: StepPlan) -> StepPlan:
        """The plan with each `UNKNOWN_TOKEN` replaced by the token that was drawn."""
        decode = plan.decode
        if UNKNOWN_TOKEN in decode.token_ids:
            columns = zip(decode.request_ids, decode.token_ids, strict=True)
            decode = replace(decode, token_ids=[self._known(name, token) for name, token in columns])
        chunks = [row if row.token_ids[0] != UNKNOWN_TOKEN else row._replace(
            token_ids=[self._known(row.request_id, UNKNOWN_TOKEN), *row.token_ids[1:]]) for row in plan.chunks]
        return replace(plan, decode=decode, chunks=chunks)

    def _known(self, request_id: str, token_id: int) -> int:
        if token_id != UNKNOWN_TOKEN:
            return token_id
        if request_id not in self._last_drawn:
            raise InternalError(f"the plan starts from the token drawn for {request_id}, but none was drawn")
        return self._last_drawn[request_id]

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for source, target in copies:
            np.copyto(np.frombuffer(self.block_view(target), np.uint8),
                      np.frombuffer(self.block_view(source), np.uint8))

    def _drop(self, request_id: str) -> None:
        self._sampler.forget(request_id)
        self._last_drawn.pop(request_id, None)
