"""Executes step plans on one GPU.

Life: loaded → warmed up (decode steps captured as CUDA graphs) → executing, at most two plans launched at once. A
launch only enqueues: plain decode steps are one graph, steps with chunks run kernel by kernel, and the drawn tokens
come down asynchronously. Rows whose draw needs more than a temperature are sampled on the host, which waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.generation import TokenLogprobs
from common.sampling_params import SamplingParams
from engine.gpu.decode_graph import DecodeGraph
from engine.gpu.device_state import DeviceState
from engine.gpu.eager_step import EagerStep
from engine.sampling.batch_sampler import BatchSampler
from engine.sampling.noise import seed_key
from engine.step import UNKNOWN_TOKEN, StepPlan, StepResult

_SLOTS = 4  # of pinned memory: two steps may be in flight


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    sampled: Sequence[int]  # indices of the plan's rows, in the order of the drawn tokens
    tokens: torch.Tensor  # pinned [len(sampled)] int64, there once `done`
    done: torch.cuda.Event
    logprobs: dict[int, TokenLogprobs]


class GpuRunner:
    """A `Runner` over a `DeviceState`, whose rows bound the sequences that are known at once."""

    def __init__(self, state: DeviceState, eos_token_ids: frozenset[int]) -> None:
        self._state, self._eos = state, eos_token_ids
        self._cache = state.decoder.cache
        self._row_of: dict[str, int] = {}
        self._next: dict[str, tuple[int, int]] = {}  # sequence → (position, token) that its row goes on from
        self._sampler = BatchSampler(eos_token_ids)
        self._graphs: dict[int, DecodeGraph] = {}
        max_rows = state.rows.max_rows
        self._results = [torch.zeros(max_rows, dtype=torch.int64).pin_memory() for _ in range(_SLOTS)]
        self._staged = [torch.zeros(max_rows, dtype=torch.int32).pin_memory() for _ in range(_SLOTS)]
        self._turn = 0
        self._launched: deque[_Launched] = deque()

    @property
    def vocab_size(self) -> int:
        return self._state.decoder.sizes.vocab

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def block_bytes(self) -> int:
        return self._cache[0].numel() * self._cache.element_size()

    def block_view(self, block_id: int) -> memoryview:
        """Device memory has no view on the host."""
        raise BufferError(f"block {block_id} is in device memory, which cannot be read in place")

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int]) -> None:
        """Capture a graph for each number of decode rows; a step takes the least that holds its rows."""
        pool = None
        for size in sorted(sizes, reverse=True):  # the largest first: the others fit into its memory
            self._graphs[size] = DecodeGraph(self._state, size, pool)
            pool = self._graphs[size].pool
        torch.cuda.synchronize(self._cache.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self._cache[copy.target].copy_(self._cache[copy.source], non_blocking=True)
        self._join(plan)
        self._stage_decode(plan)
        is_plain = self._is_plain(plan)
        if is_plain and not plan.chunks and len(plan.decode) <= max(self._graphs, default=0):
            self._launch_graph(plan)
        else:
            step = EagerStep(self._state, plan, self._row_of)
            self._state.rows.flush()
            drawn, logprobs = step.run(None if is_plain else self._sampler)
            self._finish(plan, step.sampled, drawn, logprobs)

    def collect(self) -> StepResult:
        launched = self._launched.popleft()
        plan = launched.plan
        launched.done.synchronize()
        tokens: list[int | None] = [None] * plan.num_rows
        drawn = launched.tokens.tolist()
        for index, token in zip(launched.sampled, drawn, strict=True):
            tokens[index] = token
        self._note_next(plan, tokens)
        return StepResult(plan.step_id, tokens, launched.logprobs)

    def forget(self, request_id: str) -> None:
        """Whatever uses the row later comes later in the stream, so it is free at once."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._state.rows.free(row)
            self._sampler.forget(request_id)
            self._next.pop(request_id, None)

    def _join(self, plan: StepPlan) -> None:
        for join in plan.joins:
            if not _is_plain_for(join.params, 0):
                self._sampler.join(join)
            temperature = 0.0 if join.params.is_greedy else join.params.temperature
            self._row_of[join.request_id] = self._state.rows.take(
                seed_key(join.params.seed, join.choice), temperature)
        for row in plan.chunks:  # one that never samples does not join
            if row.request_id not in self._row_of:
                self._row_of[row.request_id] = self._state.rows.take(0, 0.0)

    def _stage_decode(self, plan: StepPlan) -> None:
        decode, rows = plan.decode, self._state.rows
        for request_id, token, start, block_ids, position in zip(
                decode.request_ids, decode.token_ids, decode.starts, decode.block_ids, decode.output_positions,
                strict=True):
            row = self._row_of[request_id]
            rows.set_table(row, block_ids)
            if token != UNKNOWN_TOKEN and self._next.get(request_id) != (start, token):
                rows.place(row, token, start, position)

    def _note_next(self, plan: StepPlan, tokens: Sequence[int | None]) -> None:
        decode, follows = plan.decode, self._next
        for request_id, start, token in zip(decode.request_ids, decode.starts, tokens, strict=False):
            if request_id in self._row_of and token is not None:
                follows[request_id] = (start + 1, token)
        for row, token in zip(plan.chunks, tokens[len(decode):], strict=True):
            if row.request_id in self._row_of and token is not None:
                follows[row.request_id] = (row.start + len(row.token_ids), token)

    def _is_plain(self, plan: StepPlan) -> bool:
        decode = plan.decode
        return plan.masks is None and all(
            _is_plain_for(params, position)
            for params, position in zip(decode.params, decode.output_positions, strict=True)) and all(
            _is_plain_for(row.params, row.output_position) for row in plan.chunks if row.samples)

    def _launch_graph(self, plan: StepPlan) -> None:
        self._state.rows.flush()
        num = len(plan.decode)
        graph = self._graphs[min(size for size in self._graphs if size >= num)]
        staged = self._staged[self._turn % _SLOTS]
        staged[:num] = torch.tensor([self._row_of[name] for name in plan.decode.request_ids], dtype=torch.int32)
        staged[num : graph.size] = -1
        graph.rows.copy_(staged[: graph.size], non_blocking=True)
        graph.replay()
        self._finish(plan, range(num), graph.drawn[:num], {})

    def _finish(
        self, plan: StepPlan, sampled: Sequence[int], drawn: torch.Tensor, logprobs: dict[int, TokenLogprobs]
    ) -> None:
        tokens = self._results[self._turn % _SLOTS][: len(sampled)]
        self._turn += 1
        tokens.copy_(drawn, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._launched.append(_Launched(plan, sampled, tokens, done, logprobs))


def _is_plain_for(params: SamplingParams, output_position: int) -> bool:
    """Whether the draw needs the temperature alone."""
    is_cut = not params.is_greedy and (params.top_k or params.top_p < 1.0 or params.min_p)
    return not (is_cut or params.needs_history or params.logit_bias or params.allowed_token_ids is not None
                or params.grammar or params.logprobs is not None or params.min_tokens > output_position)
