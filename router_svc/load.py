"""What a worker says of its load, and what this router knows beyond the last report."""

from __future__ import annotations

from dataclasses import dataclass

from common.service_record import Fingerprint


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's own figures; a rate or time of 0 means not measured yet."""

    worker_id: str
    incarnation: str
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not computed yet, of waiting and running requests
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or evictable
    num_awaiting_blocks: int = 0  # reserved for transfers under way
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A live worker as a decision sees it: its record, its last report, and what was placed on it since.

    `cached_tokens` is of the query at hand: the prefix of its prompt that the worker holds.
    """

    worker_id: str
    incarnation: str
    address: str
    role: str  # prefill, decode, mixed
    fingerprint: Fingerprint
    max_num_seqs: int
    max_model_len: int
    report: LoadReport
    report_age_s: float | None  # None: never reported
    max_num_batched_tokens: int = 512
    answers: bool = True  # False: silent, and asked for its load in vain
    num_placed: int = 0  # requests placed by this router that the report cannot know yet
    num_placed_tokens: int = 0  # their prompt tokens to compute there
    cached_tokens: int = 0

    @property
    def num_requests(self) -> int:
        return self.report.num_running + self.report.num_waiting + self.num_placed

    @property
    def queue_tokens(self) -> int:
        """Prompt tokens that are computed before a new request's, if all go in order."""
        return self.report.num_waiting_tokens + self.num_placed_tokens
