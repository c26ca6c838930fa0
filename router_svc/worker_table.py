"""Who can be given work, and how busy each is: registrations, load reports, and this router's own placements.

A worker's life here: listed (a record with a fingerprint) → reporting (a load report of that incarnation came) ⇄ silent
(no report for `stale_s`: the last one says nothing of its queue, the router's own placements stand in) → gone. A silent
worker that does not answer either, when asked, is passed over until it reports again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.directory import Directory
from common.service_record import ServiceRecord
from router_svc.load import LoadReport, WorkerState
from router_svc.placed_ledger import PlacedLedger

DECODE, PREFILL = "decode", "prefill"  # services


class WorkerTable:
    """`clock` is monotonic seconds."""

    def __init__(self, directory: Directory, placed: PlacedLedger, clock: Callable[[], float], stale_s: float) -> None:
        self._directory, self.placed, self._clock, self._stale_s = directory, placed, clock, stale_s
        self._reports: dict[str, tuple[float, LoadReport]] = {}  # by worker, with the time of arrival
        self._unanswered: dict[str, str] = {}  # worker → its incarnation that did not answer

    def on_report(self, report: LoadReport) -> None:
        """Reports of an incarnation that is not listed are of an old life, or too early: ignored."""
        record = self.record(report.worker_id)
        if record is not None and record.incarnation == report.incarnation:
            now = self._clock()
            self._reports[report.worker_id] = (now, report)
            self._unanswered.pop(report.worker_id, None)
            self.placed.reported(report.worker_id, now)

    def on_no_answer(self, worker_id: str, incarnation: str) -> None:
        self._unanswered[worker_id] = incarnation

    def forget(self, worker_id: str) -> None:
        self._unanswered.pop(worker_id, None)
        self._reports.pop(worker_id, None)
        self.placed.forget(worker_id)

    def record(self, worker_id: str) -> ServiceRecord | None:
        return self._directory.get(DECODE, worker_id) or self._directory.get(PREFILL, worker_id)

    def caches(self) -> dict[str, ServiceRecord]:
        """All listed workers, in any state: whoever has a KV cache."""
        records = [*self._directory.all(DECODE), *self._directory.all(PREFILL)]
        return {record.service_id: record for record in records if record.fingerprint is not None}

    def silent(self) -> list[ServiceRecord]:
        """Listed workers to ask for their load: half the time before the last report goes stale has passed."""
        now = self._clock()
        ages = [(record, self._report(record, now)[1]) for record in self.caches().values()]
        return [record for record, age in ages if age is None or age > self._stale_s / 2]

    def block_size(self, model: str) -> int | None:
        """Of the model's blocks; None when no worker of it is listed."""
        for record in (*self._directory.all(DECODE), *self._directory.all(PREFILL)):
            if record.fingerprint is not None and model in record.models:
                return record.fingerprint.block_size
        return None

    def states(self, service: str, model: str, cached_tokens: Mapping[str, int]) -> list[WorkerState]:
        """Workers of the service that take new requests of the model, in a stable order."""
        return [self._state(record, cached_tokens.get(record.service_id, 0))
                for record in self._directory.records(service, model) if record.fingerprint is not None]

    def _state(self, record: ServiceRecord, cached_tokens: int) -> WorkerState:
        assert record.fingerprint is not None
        now = self._clock()
        report, age = self._report(record, now)
        num_placed, num_placed_tokens = self.placed.count(record.service_id, now)
        return WorkerState(
            worker_id=record.service_id, incarnation=record.incarnation, address=record.address,
            role=role_of(record), fingerprint=record.fingerprint,
            max_num_seqs=record.capacity.get("max_num_seqs", 1), max_model_len=record.capacity.get("max_model_len", 0),
            report=report, report_age_s=age,
            max_num_batched_tokens=record.capacity.get("max_num_batched_tokens", 512), num_placed=num_placed,
            num_placed_tokens=num_placed_tokens, cached_tokens=cached_tokens,
            answers=self._unanswered.get(record.service_id) != record.incarnation)

    def _report(self, record: ServiceRecord, now: float) -> tuple[LoadReport, float | None]:
        """The last report of this incarnation and its age. An old one keeps only what does not change fast."""
        num_blocks = record.capacity.get("num_blocks", 0)
        blank = LoadReport(record.service_id, record.incarnation, num_blocks=num_blocks, num_free_blocks=num_blocks)
        at, report = self._reports.get(record.service_id, (0.0, blank))
        if report is blank or report.incarnation != record.incarnation:
            return blank, None
        if now - at > self._stale_s:
            rates = LoadReport(
                record.service_id, record.incarnation, num_blocks=report.num_blocks,
                num_free_blocks=report.num_blocks, step_s=report.step_s,
                prefill_tokens_per_s=report.prefill_tokens_per_s, transfer_bytes_per_s=report.transfer_bytes_per_s)
            return rates, now - at
        return report, now - at


def role_of(record: ServiceRecord) -> str:
    """prefill, decode or mixed."""
    return record.role or record.service
