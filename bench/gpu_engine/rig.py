"""An engine of a shape on a GPU, as a decode worker runs it, and requests driven through it to their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from bench.serve.workloads import BenchRequest
from common.block_hash import HashScheme
from common.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.gpu.gpu_runner import GpuRunner
from engine.gpu.loading import GpuSizes, load_gpu_runner
from engine.grammar.state import GrammarState
from engine.model_config import ModelConfig
from engine.outputs import FinishReason, RequestOutput
from engine.request import EngineRequest

MAX_MODEL_LEN = 17_408  # the longest prompt of a workload, its answer, and some
MAX_NUM_SEQS = 512
MAX_NUM_BATCHED_TOKENS = 8192
BLOCK_SIZE = 64
_STALL_S = 60.0


@dataclass(slots=True)
class Served:
    """What one request got: `token_at[i]` is when its token i was there, in seconds of `perf_counter`."""

    due_at: float
    num_wanted: int
    token_at: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.due_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_at, self.token_at[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        return (self.token_at[-1] - self.token_at[0]) / max(1, len(self.token_at) - 1)


class Rig:
    """`num_served` requests have got all their tokens; one that does not raises `RuntimeError`."""

    def __init__(self, model: ModelConfig, device: str, say: Callable[..., object]) -> None:
        sizes = GpuSizes(BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
        started = time.perf_counter()
        self.late: list[str] = []  # kernels that were compiled after the start
        self.runner: GpuRunner = load_gpu_runner(
            model, None, sizes, device, "bfloat16", say=say,
            warn=lambda event, **fields: self.late.append(str(fields.get("kernel", event))))
        self.ready_s = time.perf_counter() - started
        config = EngineConfig(
            block_size=BLOCK_SIZE, num_blocks=self.runner.num_blocks, max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, max_num_waiting=4096)
        scheme = HashScheme(b"bench".ljust(32), "shape", "", "bfloat16", BLOCK_SIZE)
        self.core = EngineCore(config, self.runner, scheme)
        self.num_served = 0
        self._numbers = count()

    def add(self, request: BenchRequest, grammar: GrammarState | None = None) -> str:
        """Temperature 1, exactly `output_len` tokens; `grammar`: at its start."""
        number = next(self._numbers)
        assert not isinstance(request.prompt, str)
        params = SamplingParams(max_tokens=request.output_len, temperature=1.0, ignore_eos=True, seed=number)
        self.core.add(EngineRequest(f"r{number}", request.prompt, params), grammar)
        return f"r{number}"

    def run(self, requests: Sequence[BenchRequest]) -> tuple[float, list[Served]]:
        """All from an empty engine; each is added when it is due. Seconds until the last token, and what each got."""
        first = time.perf_counter()
        todo = sorted(range(len(requests)), key=lambda i: requests[i].arrival)[::-1]
        served = [Served(first + request.arrival, request.output_len) for request in requests]
        live: dict[str, Served] = {}
        progressed_at = first
        while todo or self.core.has_work:
            now = time.perf_counter()
            while todo and served[todo[-1]].due_at <= now:
                index = todo.pop()
                live[self.add(requests[index])] = served[index]
            if not self.core.has_work:
                time.sleep(max(0.0, min(served[todo[-1]].due_at - time.perf_counter(), 0.001)))
                continue
            outputs = self.core.step()
            now = time.perf_counter()
            for output in outputs:
                self._take(output, live, now)
                progressed_at = now
            if now - progressed_at > _STALL_S:
                raise RuntimeError(f"no token for {_STALL_S:g} s, {len(live)} requests are live")
        if live:
            raise RuntimeError(f"{len(live)} requests were dropped")
        return time.perf_counter() - first, served

    def _take(self, output: RequestOutput, live: dict[str, Served], now: float) -> None:
        entry = live[output.request_id]
        entry.token_at += [now] * len(output.new_token_ids)
        if output.finish_reason is None:
            return
        if output.finish_reason is not FinishReason.LENGTH or len(entry.token_at) != entry.num_wanted:
            raise RuntimeError(
                f"{output.request_id} ended by {output.finish_reason} after {len(entry.token_at)} of "
                f"{entry.num_wanted} tokens: {output.error}")
        del live[output.request_id]
        self.num_served += 1

    def fresh(self) -> None:
        """Nothing is cached; raises `LedgerError` if a block has leaked."""
        self.core.check_integrity()
        self.core.reset_prefix_cache()


