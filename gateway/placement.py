"""Which worker takes a request: a pure function of what is known of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.generation import WorkerView


def pick(workers: Sequence[WorkerView], exclude: Collection[str] = ()) -> WorkerView | None:
    """The worker with the least load for its capacity; ties go to more free blocks, then to the smaller id.

    None when all are excluded.
    """
    candidates = [w for w in workers if w.worker_id not in exclude]
    return min(candidates, key=_rank, default=None)


def _rank(worker: WorkerView) -> tuple[float, int, str]:
    return load(worker), -worker.num_free_blocks, worker.worker_id


def load(worker: WorkerView) -> float:
    """Requests per seat. What this process has in flight is known now; the report, a little old, tells of the others.

    The two overlap, for each worker alike, so their sum ranks workers right and reacts at once to what is sent.
    """
    return (worker.num_in_flight + worker.num_running + worker.num_waiting) / max(1, worker.max_num_seqs)
