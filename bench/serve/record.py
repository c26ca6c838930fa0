"""What is known of one request after the run. All times are seconds since the run began."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended. Only the first is in the percentiles."""

    COMPLETED = "completed"
    REFUSED = "refused"  # answered 429 or 503
    ABORTED = "aborted"  # its deadline passed
    FAILED = "failed"  # any other status, an error event, a broken stream, no connection
    INTERRUPTED = "interrupted"  # the run was ended while it was under way
    NOT_SENT = "not sent"  # the run was ended before its turn, or the turn before it did not complete


@dataclass(slots=True)
class RequestRecord:
    """Filled by the load (due, sent), by the answer's reader (chunks, counts, text), and at the end by the load again.

    `due_s` is when the request should have left: its arrival, or when a slot below `max_concurrency` came free, which
    is `queue_s` later. `sent_s - due_s` is the client's own lag.
    """

    index: int
    input_len: int  # tokens; as the workload says until the server has counted
    asked_output_len: int
    group: str = ""
    outcome: Outcome = Outcome.NOT_SENT
    due_s: float = 0.0
    queue_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)  # of each content chunk
    finish_s: float | None = None
    num_output_tokens: int | None = None  # None: the server sent no usage
    num_cached_tokens: int | None = None
    num_resent: int = 0  # its connection turned out to be closed already
    status: int = 0
    error: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # only where they were asked for
    server_queue_s: float | None = None
    server_ttft_s: float | None = None

    @property
    def first_s(self) -> float | None:
        """The first content chunk; the finish where all tokens had no text."""
        return self.chunk_s[0] if self.chunk_s else self.finish_s

    @property
    def output_len(self) -> int:
        """The server's count, else one token a chunk."""
        return len(self.chunk_s) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft_s(self) -> float:
        return (self.first_s or self.end_s) - self.sent_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def itls_s(self) -> list[float]:
        """Each gap between content chunks; chunks that came in one packet have a gap of 0."""
        return [after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """(last - first content chunk) / (tokens - 1); None for a single token."""
        if self.output_len < 2 or not self.chunk_s:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_len - 1)
