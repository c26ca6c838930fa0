"""Which requests count, and which of them met the configured limits.

A request counts when it was ours to serve: it ended well, or failed through us (status 5xx, or an error in its stream).
What the client did wrong or gave up does not. Of streams the first content and the mean time per output token are
judged; an answer in one piece has neither and is judged by its success alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.metrics import counter, gauge

JUDGED = counter("shoal_gateway_slo_requests_total", "generations that count for the objective", ["model"])
GOOD = counter("shoal_gateway_slo_good_total", "those that met every limit", ["model"])
MISSED = counter("shoal_gateway_slo_missed_total", "those that missed a limit, by the limit", ["model", "limit"])
LIMIT_S = gauge("shoal_gateway_slo_limit_seconds", "the configured limit; 0: none", ["limit"])

TTFT, TPOT, FAILURE = "ttft", "tpot", "failure"


@dataclass(frozen=True, slots=True)
class SloLimits:
    """In seconds; 0: not judged."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def publish(self) -> None:
        LIMIT_S.labels(TTFT).set(self.ttft_s)
        LIMIT_S.labels(TPOT).set(self.tpot_s)

    def missed(self, ttft_s: float | None, tpot_s: float | None, failed: bool) -> list[str]:
        """The limits that were missed."""
        found = [FAILURE] if failed else []
        if self.ttft_s and ttft_s is not None and ttft_s > self.ttft_s:
            found.append(TTFT)
        if self.tpot_s and tpot_s is not None and tpot_s > self.tpot_s:
            found.append(TPOT)
        return found

    def judge(self, model: str, ttft_s: float | None, tpot_s: float | None, *, failed: bool) -> None:
        """Count one generation that is ours to answer for."""
        missed = self.missed(ttft_s, tpot_s, failed)
        JUDGED.labels(model).inc()
        GOOD.labels(model).inc(not missed)  # also by 0, so that a rate sees every series from the first request on
        for limit in (TTFT, TPOT, FAILURE):
            MISSED.labels(model, limit).inc(limit in missed)
