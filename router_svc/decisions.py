"""The record of each decision: every candidate with its price, the choice, and later what really happened.

A record's life: kept at the decision → its outcome added, when the gateway has told it → dropped, oldest first,
beyond `max_records`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from common.placement import RequestOutcome
from router_svc.pricing import Priced

MAX_KEPT_CANDIDATES = 16  # of one decision: the chosen one and the soonest others


@dataclass(frozen=True, slots=True)
class Decision:
    """One attempt of one request. `chosen` indexes `candidates`; None: refused."""

    decision_id: str
    request_id: str
    model: str
    attempt: int
    num_prompt_tokens: int
    candidates: tuple[Priced, ...]
    chosen: int | None
    degraded: tuple[str, ...] = ()
    outcome: RequestOutcome | None = None

    @property
    def choice(self) -> Priced | None:
        return None if self.chosen is None else self.candidates[self.chosen]


class DecisionLog:
    def __init__(self, max_records: int) -> None:
        self._max_records = max_records
        self._by_id: OrderedDict[str, Decision] = OrderedDict()
        self._last_of_request: dict[str, str] = {}  # request id → decision id

    def __len__(self) -> int:
        return len(self._by_id)

    def record(self, decision: Decision) -> None:
        self._by_id[decision.decision_id] = decision
        self._last_of_request[decision.request_id] = decision.decision_id
        while len(self._by_id) > self._max_records:
            old_id, old = self._by_id.popitem(last=False)
            if self._last_of_request.get(old.request_id) == old_id:
                del self._last_of_request[old.request_id]

    def add_outcome(self, outcome: RequestOutcome) -> Decision | None:
        """The decision it belongs to, with the outcome; None when another router made it, or it is long past."""
        known = self._by_id.get(outcome.decision_id)
        if known is None:
            return None
        self._by_id[outcome.decision_id] = with_outcome = dataclasses.replace(known, outcome=outcome)
        return with_outcome

    def find(self, request_id: str) -> Decision | None:
        """The last decision on the request."""
        return self._by_id.get(self._last_of_request.get(request_id, ""))


def shortened(candidates: Sequence[Priced], chosen: int | None) -> tuple[tuple[Priced, ...], int | None]:
    """At most `MAX_KEPT_CANDIDATES`: the chosen one and the soonest others, in their order."""
    if len(candidates) <= MAX_KEPT_CANDIDATES:
        return tuple(candidates), chosen
    order = sorted(range(len(candidates)), key=lambda i: (i != chosen, candidates[i].predicted_ttft_s))
    kept = sorted(order[:MAX_KEPT_CANDIDATES])
    return tuple(candidates[i] for i in kept), None if chosen is None else kept.index(chosen)
