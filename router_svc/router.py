"""A decision, top to bottom.

match the prompt's blocks → the workers' states → price every candidate → choose → note what was placed → record

Nothing here waits: a decision is one turn of the event loop over what is known by then. Without Redis the index in
memory goes on; without the bus the index cannot be trusted, and placement goes by load alone. Both are named in the
decision's `degraded`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from common.errors import Overloaded, ShoalError, Unavailable
from common.metrics import TTFT_BUCKETS, counter, histogram, preset
from common.placement import Placement, RequestOutcome, RouteQuery
from router_svc.curves import MeasuredCurves, Rates
from router_svc.decisions import Decision, DecisionLog, shortened
from router_svc.index import PrefixIndex
from router_svc.load import LoadReport
from router_svc.overlay import SpeculativeOverlay
from router_svc.pricing import Asked, Priced, PricingRules, choose, price
from router_svc.worker_table import DECODE, PREFILL, WorkerTable, role_of

NATS_DOWN, REDIS_DOWN = "nats down", "redis down"

DECISIONS = counter("shoal_router_decisions_total", "placements by source, and refusals", ["source"])
DEGRADED = preset(counter(
    "shoal_router_degraded_decisions_total", "decisions made without a part of the facts", ["why"]),
    (NATS_DOWN, REDIS_DOWN))
REFUSED = preset(counter(
    "shoal_router_refused_total", "requests that were not placed, by reason", ["reason"]),
    ("no worker", "no candidate", "deadline"))
DECISION_S = histogram(
    "shoal_router_decision_seconds", "time of one decision",
    (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1))
PREDICTED_S = histogram(
    "shoal_router_predicted_ttft_seconds", "time to first token as predicted, of requests whose end is known",
    TTFT_BUCKETS, ["source"])
ACTUAL_S = histogram(
    "shoal_router_actual_ttft_seconds", "time to first token of the same requests", TTFT_BUCKETS, ["source"])
ERROR_S = histogram(
    "shoal_router_ttft_error_seconds", "distance between the two, without its sign", TTFT_BUCKETS, ["source"])
TTFT_RATIO = histogram(
    "shoal_router_ttft_ratio", "actual over predicted time to first token",
    (.1, .2, .33, .5, .67, .8, 1, 1.25, 1.5, 2, 3, 5, 10), ["source"])


class Router:
    """`degraded` says which facts are missing now; `clock` is monotonic seconds."""

    def __init__(
        self, index: PrefixIndex, overlay: SpeculativeOverlay, table: WorkerTable, curves: MeasuredCurves,
        decisions: DecisionLog, rules: PricingRules, degraded: Callable[[], tuple[str, ...]],
        clock: Callable[[], float],
    ) -> None:
        self._index, self._overlay, self._table, self._curves = index, overlay, table, curves
        self._decisions, self._rules, self._degraded, self._clock = decisions, rules, degraded, clock

    def route(self, query: RouteQuery) -> Placement:
        """Raises `Unavailable` (no worker is left) or `Overloaded` (too late for its deadline)."""
        started = time.perf_counter()
        degraded = self._degraded()
        asked = Asked(query.num_prompt_tokens, query.max_tokens, query.affinity_key or query.request_id,
                      frozenset(query.exclude))
        cached = {} if NATS_DOWN in degraded else self._cached_tokens(query)
        candidates = price(
            asked, self._table.states(DECODE, query.model, cached), self._table.states(PREFILL, query.model, cached),
            self._curves.curves(query.model), self._rules)
        chosen = choose(candidates, asked.seed, self._rules)
        late = chosen is not None and 0 < query.timeout_s < candidates[chosen].predicted_ttft_s
        decision = self._record(query, candidates, None if late else chosen, degraded)
        DECISION_S.observe(time.perf_counter() - started)
        if chosen is None:
            REFUSED.labels("no candidate" if candidates else "no worker").inc()
            raise self._no_candidate(query, candidates)
        if late:
            REFUSED.labels("deadline").inc()
            raise _too_late(query, candidates[chosen])
        return self._place(query, decision, candidates[chosen])

    def explain(self, request_id: str) -> Decision | None:
        return self._decisions.find(request_id)

    def on_report(self, report: LoadReport, model: str) -> None:
        self._table.on_report(report)
        record = self._table.record(report.worker_id)
        if record is not None and model in record.models:
            self._curves.observe(model, role_of(record), Rates(
                report.prefill_tokens_per_s, report.step_s, report.transfer_bytes_per_s))

    def on_outcome(self, outcome: RequestOutcome) -> None:
        """Of any router's decision; only an own one has a record to complete."""
        self._table.placed.ended(outcome.request_id, outcome.decode_worker_id, outcome.prefill_worker_id)
        decision = self._decisions.add_outcome(outcome)
        if decision is None or decision.choice is None:
            return
        choice = decision.choice
        self._table.placed.ended(outcome.request_id, choice.decode.worker_id,
                                 choice.prefill.worker_id if choice.prefill else "")
        if not outcome.error_code and outcome.ttft_s > 0 and outcome.attempts <= 1:
            predicted_s = choice.predicted_ttft_s
            PREDICTED_S.labels(choice.source).observe(predicted_s)
            ACTUAL_S.labels(choice.source).observe(outcome.ttft_s)
            ERROR_S.labels(choice.source).observe(abs(outcome.ttft_s - predicted_s))
            TTFT_RATIO.labels(choice.source).observe(outcome.ttft_s / max(1e-6, predicted_s))
            self._curves.observe_request(decision.model, outcome.e2e_s)

    def on_worker_ended(self, worker_id: str) -> None:
        """A life of the worker is over; what was expected of it is not."""
        self._overlay.drop(worker_id)
        self._table.forget(worker_id)

    def _cached_tokens(self, query: RouteQuery) -> dict[str, int]:
        block_size = self._table.block_size(query.model)
        if block_size is None:
            return {}
        self._overlay.expire(self._clock())
        depths = self._index.match(query.block_hashes, self._overlay.workers)
        return {worker_id: depth * block_size for worker_id, depth in depths.items()}

    def _place(self, query: RouteQuery, decision: Decision, choice: Priced) -> Placement:
        now = self._clock()
        decode, prefill = choice.decode, choice.prefill
        uncached = query.num_prompt_tokens - choice.cached_tokens
        self._overlay.place(decode.worker_id, query.block_hashes, now)
        self._table.placed.place(decode.worker_id, query.request_id, 1 if prefill else uncached, now)
        if prefill is not None:
            self._overlay.place(prefill.worker_id, query.block_hashes, now)
            tokens = max(0, query.num_prompt_tokens - 1 - prefill.cached_tokens)
            self._table.placed.place(prefill.worker_id, query.request_id, tokens, now)
        return Placement(
            decode_worker_id=decode.worker_id, decode_incarnation=decode.incarnation,
            prefill_worker_id=prefill.worker_id if prefill else "",
            prefill_incarnation=prefill.incarnation if prefill else "",
            prefill_address=prefill.address if prefill else "", predicted_cached_tokens=choice.cached_tokens,
            predicted_ttft_s=choice.predicted_ttft_s, decision_id=decision.decision_id)

    def _record(
        self, query: RouteQuery, candidates: list[Priced], chosen: int | None, degraded: tuple[str, ...]
    ) -> Decision:
        kept, kept_index = shortened(candidates, chosen)
        decision = Decision(
            decision_id=secrets.token_hex(8), request_id=query.request_id, model=query.model, attempt=query.attempt,
            num_prompt_tokens=query.num_prompt_tokens, candidates=kept, chosen=kept_index, degraded=degraded)
        self._decisions.record(decision)
        DECISIONS.labels("refused" if chosen is None else candidates[chosen].source).inc()
        for why in degraded:
            DEGRADED.labels(why).inc()
        return decision

    def _no_candidate(self, query: RouteQuery, candidates: list[Priced]) -> ShoalError:
        if not candidates and self._table.block_size(query.model) is None:
            return Unavailable(f"no worker of model {query.model!r} is registered", retry_after_s=1.0)
        why = "; ".join(f"{c.decode.worker_id}: {c.rejected_because}" for c in candidates[:8])
        return Unavailable(f"no decode worker can take the request ({why or 'none is ready'})", retry_after_s=1.0)


def _too_late(query: RouteQuery, best: Priced) -> Overloaded:
    return Overloaded(
        f"the first token is predicted after {best.predicted_ttft_s:.1f} s, {query.timeout_s:.1f} s are left",
        retry_after_s=round(max(1.0, best.predicted_ttft_s - query.timeout_s), 1))
