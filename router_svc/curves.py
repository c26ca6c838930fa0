"""What things cost, as measured: what a worker reports of itself, else what was last seen, else what is configured."""

from __future__ import annotations

from dataclasses import dataclass

from common.service_record import Fingerprint
from router_svc.load import WorkerState

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_WEIGHT = 0.2  # of the newest value in a moving mean


@dataclass(frozen=True, slots=True)
class CostCurves:
    """Stand-ins for what a worker has not measured itself yet; frozen, so that a decision can be computed again."""

    prefill_tokens_per_s: float = 2000.0
    step_s: float = 0.02
    transfer_bytes_per_s: float = 1e9
    hop_s: float = 0.005  # grant, reservation and acknowledgement of a hand-off
    request_s: float = 2.0  # a request's time on its decode worker; how soon a seat gets free

    def prefill_rate(self, worker: WorkerState) -> float:
        """Prompt tokens per second."""
        return worker.report.prefill_tokens_per_s or self.prefill_tokens_per_s

    def step(self, worker: WorkerState) -> float:
        """Seconds of an engine step."""
        return worker.report.step_s or self.step_s

    def transfer_rate(self, worker: WorkerState) -> float:
        """KV bytes per second into the worker."""
        return worker.report.transfer_bytes_per_s or self.transfer_bytes_per_s


def kv_bytes_per_token(fingerprint: Fingerprint) -> int:
    dtype_bytes = _DTYPE_BYTES.get(fingerprint.dtype, 4)
    return 2 * fingerprint.num_layers * fingerprint.num_kv_heads * fingerprint.head_dim * dtype_bytes


class MeasuredCurves:
    """Moving means over all workers of a model, for those that have measured nothing yet."""

    def __init__(self, start: CostCurves) -> None:
        self._start = start
        self._of_model: dict[str, dict[str, float]] = {}

    def curves(self, model: str) -> CostCurves:
        seen = self._of_model.get(model, {})
        return CostCurves(
            prefill_tokens_per_s=seen.get("prefill", self._start.prefill_tokens_per_s),
            step_s=seen.get("step", self._start.step_s),
            transfer_bytes_per_s=seen.get("transfer", self._start.transfer_bytes_per_s),
            hop_s=self._start.hop_s, request_s=seen.get("request", self._start.request_s))

    def observe(
        self, model: str, *, prefill_tokens_per_s: float = 0.0, step_s: float = 0.0, transfer_bytes_per_s: float = 0.0,
        request_s: float = 0.0,
    ) -> None:
        """Figures of 0 are unknown. `model` is one that a worker serves, never a client's word."""
        figures = {"prefill": prefill_tokens_per_s, "step": step_s, "transfer": transfer_bytes_per_s,
                   "request": request_s}
        seen = self._of_model.setdefault(model, {})
        for name, value in figures.items():
            if value > 0:
                seen[name] = seen[name] + _WEIGHT * (value - seen[name]) if name in seen else value
