"""Executes step plans on one GPU.

Life: loaded → warmed up (steps captured as CUDA graphs, kernels compiled) → executing, at most two plans launched at
once. A launch only enqueues: decode steps and short extends are one graph, larger steps run kernel by kernel, and the
drawn tokens come down asynchronously. Every launch draws by temperature alone. Where a row's draw needs more,
`DeviceSampling` draws again from the logits: at once, or where there are grammars, whose masks are being worked out,
before the next step is launched or when this one is collected. Rows that only the host can draw for make that wait,
and rows with prompt scores make a launch wait.

Buffers in pinned memory go round: a step is collected before the second one after it is launched, so two of each would
do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from common.errors import InternalError
from common.generation import TokenLogprobs
from engine.gpu.decode_columns import DecodeColumns
from engine.gpu.decode_graph import least_holding
from engine.gpu.device_sampling import DeviceSampling, PendingLogprobs
from engine.gpu.device_state import DeviceState
from engine.gpu.extend_graph import least_fitting
from engine.gpu.flat_inputs import FlatLayout, FlatParts, FlatPlan, sampled_rows
from engine.gpu.flat_step import drawing_logits, forward
from engine.gpu.host_draw import HostDraw, is_plain
from engine.gpu.step_graphs import Say, StepGraphs
from engine.gpu.whole_prompt import measured_s
from engine.sampling.noise import seed_key
from engine.step import BlockCopy, StepPlan, StepResult
from kernels.block_copy import copy_blocks, independent

_SLOTS = 4  # of pinned memory
_LEAST_TEMPERATURE = 1e-30  # logits divided by it are finite
Prompts = Mapping[int, Sequence[TokenLogprobs]]


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    sampled: Sequence[int]  # indices of the plan's rows, in the order of the drawn tokens
    tokens: torch.Tensor | None = None  # pinned [len(sampled)] int64, there once `done`
    done: torch.cuda.Event | None = None
    undrawn: tuple[torch.Tensor, ...] | None = None  # logits, device rows and ids of what is drawn again
    pending: PendingLogprobs | None = None  # there once `done`
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Prompts = field(default_factory=dict)


class GpuRunner:
    """A `Runner` over a `DeviceState`, for plans of at most `max_num_batched_tokens` in `max_num_seqs` rows.

    A row of the device is taken when a sequence joins and free again with `forget`; one that never draws (it has not
    joined) has a row for the length of a launch.
    """

    def __init__(
        self, state: DeviceState, eos_token_ids: frozenset[int], max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._state, self._eos = state, eos_token_ids
        self._cache, self._device = state.decoder.cache, state.decoder.cache.device
        sizes = state.decoder.sizes
        self._group = sizes.num_heads // sizes.num_kv_heads
        self._row_of: dict[str, int] = {}
        self._passing: list[int] = []  # rows of sequences that have not joined, of the plan in hand
        self._columns = DecodeColumns(is_plain)
        self._host = HostDraw(state.decoder, eos_token_ids)
        self._sampling = DeviceSampling(state.rows, sizes.vocab, eos_token_ids, max_num_seqs, self._device)
        self.graphs = StepGraphs(max_num_seqs, max_num_batched_tokens)
        self.num_graph_steps = self.num_eager_steps = 0
        self.whole_prompt_tokens = 0  # a prompt of so many, alone in a step, is attended by torch's kernel; 0: none is
        self._launched: deque[_Launched] = deque()
        max_rows = state.rows.max_rows
        num_words = FlatLayout.padded(max_num_batched_tokens, max_rows, self._group).num_words
        self._words = torch.zeros(num_words, dtype=torch.int32, device=self._device)
        self._staged_words = [torch.zeros(num_words, dtype=torch.int32).pin_memory() for _ in range(_SLOTS)]
        self._staged_rows = [torch.zeros(max_rows, dtype=torch.int32).pin_memory() for _ in range(_SLOTS)]
        self._results = [torch.zeros(max_rows, dtype=torch.int64).pin_memory() for _ in range(_SLOTS)]
        self._turn = 0

    @property
    def vocab_size(self) -> int:
        return self._state.decoder.sizes.vocab

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def num_blocks(self) -> int:
        return len(self._cache)

    @property
    def block_bytes(self) -> int:
        return self._cache[0].numel() * self._cache.element_size()

    def block_view(self, block_id: int) -> memoryview:
        """Device memory has no view on the host."""
        raise BufferError(f"block {block_id} is in device memory, which cannot be read in place")

    def capture(self, say: Say, limit: int | None = None) -> None:
        """Capture the graphs (the next `limit`, the largest first); without them all steps run kernel by kernel."""
        self.graphs.capture(self._state, self._words, say, limit)
        if limit is None:
            self._sampling.warm_up(self._cache.dtype)
            copy_blocks(self._cache, *torch.zeros(2, 4, dtype=torch.int32, device=self._device)[:, :1])

    def choose_attention(self, num_tokens: int, say: Say) -> None:
        """Whether torch's kernel or ours is faster for a step that is one prompt of so many tokens, and no other."""
        theirs_s, ours_s = measured_s(self._state, num_tokens)
        is_theirs = theirs_s < ours_s
        self.whole_prompt_tokens = num_tokens if is_theirs else 0
        say("whole_prompt_attention", kernel="torch" if is_theirs else "own", num_tokens=num_tokens,
            torch_us=round(theirs_s * 1e6), own_us=round(ours_s * 1e6))

    def launch(self, plan: StepPlan) -> None:
        try:
            self._launch(plan)
        except RuntimeError as error:
            raise self._failed(error) from error

    def collect(self) -> StepResult:
        try:
            return self._collect()
        except RuntimeError as error:
            raise self._failed(error) from error

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """[rows that draw, vocab] float32: runs the plan as a step, and gives what its draws were made from."""
        self._launch(plan, keep_logits=True)
        undrawn = self._launched[-1].undrawn
        logits = undrawn[0].float().clone() if undrawn else torch.empty(0, self.vocab_size)
        self._collect()
        return logits

    def forget(self, request_id: str) -> None:
        """Whatever uses the row later comes later in the stream, so it is free at once."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._state.rows.free(row)
            self._host.forget(request_id)
            self._sampling.forget(request_id)
            self._columns.invalidate()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, *, keep_logits: bool = False) -> None:
        torch.cuda.set_device(self._device)
        self._finish_draw()
        self._copy(plan.copies)
        self._join(plan)
        rows = self._state.rows
        plain = self._columns.take(plan.decode, self._row_of, rows) and plan.masks is None and not keep_logits
        chunk_rows = [self._chunk_row(row.request_id) for row in plan.chunks]
        for row, at in zip(plan.chunks, chunk_rows, strict=True):
            rows.set_table(at, row.block_ids)
            if row.samples:  # `advance` then makes it one more of each
                rows.place(at, row.start + len(row.token_ids) - 1, row.output_position)
                plain = plain and is_plain(row.params) and row.params.min_tokens <= row.output_position
            plain = plain and not row.scores_prompt
        rows.flush()
        self._turn += 1
        if plan.chunks:
            self._launch_flat(plan, chunk_rows, plain)
        else:
            self._launch_decode(plan, plain)
        while self._passing:
            rows.free(self._passing.pop())
        if plan.masks is None and not keep_logits and not self._sampling.hosted(plan, self._launched[-1].sampled):
            self._finish_draw()

    def _launch_decode(self, plan: StepPlan, plain: bool) -> None:
        num, rows = len(plan.decode), self._columns.rows
        graph = least_holding(self.graphs.decode, num)
        if graph is None:
            self._launch_flat(plan, [], plain)
            return
        self.num_graph_steps += 1
        graph.load(rows, self._staged_rows[self._turn % _SLOTS])
        graph.replay()
        if plain:
            self._bring_down(plan, range(num), graph.drawn)
        else:
            self._draw_later(plan, range(num), graph.logits, graph.rows, graph.drawn)

    def _launch_flat(self, plan: StepPlan, chunk_rows: Sequence[int], plain: bool) -> None:
        flat = FlatPlan(self._columns.rows, plan.chunks, chunk_rows, self._state.block_size, self._group)
        tiles, num_decode = flat.tiles(), len(plan.decode)
        sampled = sampled_rows(num_decode, plan.chunks)
        is_scored = any(row.scores_prompt for row in plan.chunks)
        graph = None if is_scored else least_fitting(
            self.graphs.extend, flat.num_tokens, flat.num_rows, num_decode)
        layout = graph.layout if graph else FlatLayout(flat.num_tokens, flat.num_rows, len(tiles))
        staged = self._staged_words[self._turn % _SLOTS]
        flat.fill(layout.split(staged.numpy()), tiles)
        size = layout.num_words
        self._words[:size].copy_(staged[:size], non_blocking=True)
        scores: Prompts = {}
        if graph is not None:
            self.num_graph_steps += 1
            graph.replay()
            logits, drawing, drawn = graph.logits, graph.parts.drawing, graph.drawn
        else:
            self.num_eager_steps += 1
            parts = layout.split(self._words)
            x, residual = forward(self._state, parts, num_decode, is_whole_prompt=self._is_whole_prompt(plan))
            scores = self._host.score_prompts(plan, x, residual) if is_scored else scores
            logits, drawing, drawn = self._draw(parts, x, residual, len(sampled))
        if plain or not sampled:
            self._bring_down(plan, sampled, drawn, scores)
        else:
            self._draw_later(plan, sampled, logits, drawing, drawn, scores)

    def _is_whole_prompt(self, plan: StepPlan) -> bool:
        return (not plan.decode and len(plan.chunks) == 1 and plan.chunks[0].start == 0
                and len(plan.chunks[0].token_ids) == self.whole_prompt_tokens)

    def _draw(
        self, parts: FlatParts, x: torch.Tensor, residual: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By temperature alone: logits, the device's rows, ids."""
        drawing, drawn = parts.drawing[:num_rows], torch.empty(num_rows, dtype=torch.int64, device=self._device)
        if not num_rows:
            return x[:0], drawing, drawn
        logits = drawing_logits(self._state, parts, x, residual, num_rows)
        self._state.draw(logits, drawing, drawn)
        self._state.advance(drawing, drawn)
        return logits, drawing, drawn

    def _draw_later(
        self, plan: StepPlan, sampled: Sequence[int], logits: torch.Tensor, drawing: torch.Tensor,
        drawn: torch.Tensor, scores: Prompts | None = None,
    ) -> None:
        """All three are read before the next launch changes them."""
        num = len(sampled)
        self._launched.append(_Launched(
            plan, sampled, undrawn=(logits[:num], drawing[:num], drawn[:num]), prompt_logprobs=scores or {}))

    def _bring_down(
        self, plan: StepPlan, sampled: Sequence[int], drawn: torch.Tensor, scores: Prompts | None = None
    ) -> None:
        """The first of `drawn` are those of `sampled`."""
        self._launched.append(_Launched(plan, sampled, prompt_logprobs=scores or {}))
        self._bring(self._launched[-1], drawn[: len(sampled)])

    def _bring(self, launched: _Launched, drawn: torch.Tensor) -> None:
        launched.tokens = self._results[self._turn % _SLOTS][: len(drawn)]
        launched.tokens.copy_(drawn, non_blocking=True)
        launched.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.done.record()

    @torch.inference_mode()
    def _collect(self) -> StepResult:
        launched = self._launched[0]
        if launched.undrawn is not None:
            self._finish_draw()
        self._launched.popleft()
        assert launched.tokens is not None
        assert launched.done is not None
        launched.done.synchronize()
        drawn = launched.tokens.tolist()
        if drawn and min(drawn) < 0:
            raise InternalError("the model's logits are not finite")
        if launched.pending is not None:
            launched.logprobs.update(launched.pending.ready())
        plan = launched.plan
        tokens: list[int | None] = list(drawn)
        if plan.chunks:
            tokens = [None] * plan.num_rows
            for index, token in zip(launched.sampled, drawn, strict=True):
                tokens[index] = token
        return StepResult(plan.step_id, tokens, launched.logprobs, launched.prompt_logprobs)

    def _finish_draw(self) -> None:
        """Draw again for the newest step, if that is still to be done."""
        launched = self._launched[-1] if self._launched else None
        if launched is None or launched.undrawn is None:
            return
        (logits, drawing, drawn), launched.undrawn = launched.undrawn, None
        plan, sampled = launched.plan, launched.sampled
        masks = plan.masks.wait() if plan.masks is not None else {}
        launched.pending = self._sampling.draw(plan, sampled, logits, drawing, drawn, masks)
        if places := self._sampling.hosted(plan, sampled):
            ids, launched.logprobs = self._host.draw(plan, [sampled[at] for at in places], logits[places], masks)
            drawn[places] = torch.tensor(ids, device=self._device)
        self._state.advance(drawing, drawn, by=0)
        self._bring(launched, drawn)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        for run in independent(copies):
            ids = torch.zeros(2, -(-len(run) // 4) * 4, dtype=torch.int32)
            ids[:, : len(run)] = torch.tensor(run, dtype=torch.int32).t()
            sent = ids.pin_memory().to(self._device, non_blocking=True)
            copy_blocks(self._cache, sent[0, : len(run)], sent[1, : len(run)])

    def _join(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self.forget(join.request_id)
            params = join.params
            temperature = 0.0 if params.is_greedy else max(params.temperature, _LEAST_TEMPERATURE)
            row = self._state.rows.take(seed_key(params.seed, join.choice), temperature)
            self._row_of[join.request_id] = row
            if not self._sampling.join(join, row) or params.prompt_logprobs is not None:
                self._host.join(join)
            self._columns.invalidate()

    def _chunk_row(self, request_id: str) -> int:
        row = self._row_of.get(request_id)
        if row is None:
            row = self._state.rows.take(0, 0.0)
            self._passing.append(row)
        return row

    def _failed(self, error: RuntimeError) -> InternalError:
        """CUDA tells of a fault with the next call of any kind, and there is nothing to be done on that device."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return InternalError(f"{self._device} ({torch.cuda.get_device_name(self._device)}) failed: {lines[0]}")
