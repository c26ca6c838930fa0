"""What things cost, as measured: what a worker reports of itself, else what was last seen, else what is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from common.service_record import Fingerprint
from router_svc.load import WorkerState

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_WEIGHT = 0.2  # of the newest value in a moving mean


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the workers of one role; 0 is unknown."""

    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    transfer_bytes_per_s: float = 0.0

    def moved_towards(self, newest: Rates) -> Rates:
        """With what is known of the newest figures taken into the means."""
        return Rates(
            _mean(self.prefill_tokens_per_s, newest.prefill_tokens_per_s), _mean(self.step_s, newest.step_s),
            _mean(self.transfer_bytes_per_s, newest.transfer_bytes_per_s))


@dataclass(frozen=True, slots=True)
class CostCurves:
    """Stand-ins for what a worker has not measured itself yet; frozen, so that a decision can be computed again.

    A worker that has measured nothing is taken for one like the others of its role: a step of a decode worker is much
    shorter than one of a prefill worker. The figures here hold for a role of which none has measured anything.
    """

    prefill_tokens_per_s: float = 2000.0
    step_s: float = 0.02
    transfer_bytes_per_s: float = 1e9
    hop_s: float = 0.005  # grant, reservation and acknowledgement of a hand-off
    request_s: float = 2.0  # a request's time on its decode worker; how soon a seat gets free
    of_role: Mapping[str, Rates] = field(default_factory=dict)

    def prefill_rate(self, worker: WorkerState) -> float:
        """Prompt tokens per second."""
        return (worker.report.prefill_tokens_per_s or self._seen(worker).prefill_tokens_per_s
                or self.prefill_tokens_per_s)

    def step(self, worker: WorkerState) -> float:
        """Seconds of an engine step."""
        return worker.report.step_s or self._seen(worker).step_s or self.step_s

    def transfer_rate(self, worker: WorkerState) -> float:
        """KV bytes per second into the worker."""
        return (worker.report.transfer_bytes_per_s or self._seen(worker).transfer_bytes_per_s
                or self.transfer_bytes_per_s)

    def _seen(self, worker: WorkerState) -> Rates:
        return self.of_role.get(worker.role, _UNKNOWN)


_UNKNOWN = Rates()


def kv_bytes_per_token(fingerprint: Fingerprint) -> int:
    dtype_bytes = _DTYPE_BYTES.get(fingerprint.dtype, 4)
    return 2 * fingerprint.num_layers * fingerprint.num_kv_heads * fingerprint.head_dim * dtype_bytes


class MeasuredCurves:
    """Moving means over the workers of each model and role, for those that have measured nothing yet."""

    def __init__(self, start: CostCurves) -> None:
        self._start = start
        self._rates: dict[str, dict[str, Rates]] = {}  # model → role → means
        self._request_s: dict[str, float] = {}

    def curves(self, model: str) -> CostCurves:
        return replace(self._start, request_s=self._request_s.get(model, self._start.request_s),
                       of_role=dict(self._rates.get(model, {})))

    def observe(self, model: str, role: str, newest: Rates) -> None:
        """`model` is one that a worker serves, never a client's word."""
        rates = self._rates.setdefault(model, {})
        rates[role] = rates.get(role, _UNKNOWN).moved_towards(newest)

    def observe_request(self, model: str, seconds: float) -> None:
        self._request_s[model] = _mean(self._request_s.get(model, 0.0), seconds)


def _mean(before: float, newest: float) -> float:
    if newest <= 0:
        return before
    return before + _WEIGHT * (newest - before) if before else newest
