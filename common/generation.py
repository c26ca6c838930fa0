"""The wire-free words between whoever asks for tokens and the worker that makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from common.errors import ShoalError
from common.placement import Placement
from common.sampling_params import SamplingParams
from common.service_record import Fingerprint


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # end-of-sequence, a stop token, or (at the gateway) a stop string
    LENGTH = "length"  # max_tokens, the model's context, or the end of the KV pool
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Generation:
    """One request as a decode worker takes it. `request_id` is ours and unique, never the client's."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]  # of the prompt's full blocks; the worker recomputes and compares
    params: SamplingParams
    adapter: str = ""
    cache_salt: str = ""
    timeout_s: float = 0.0  # remaining time; 0 = none
    trace_context: Mapping[str, str] = field(default_factory=dict)
    placement: Placement | None = None
    output_token_ids: tuple[int, ...] = ()  # drawn by an earlier attempt: replayed, not sent again
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step brought for one request. The last one has a `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: ShoalError | None = None  # exactly when finish_reason is ERROR
    stop_token_id: int | None = None  # the last of token_ids, when it ended the request
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_s: float = 0.0  # submitted → first admitted by the scheduler


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A decode worker that can take a request now, as its callers see it."""

    worker_id: str
    model: str
    fingerprint: Fingerprint
    max_model_len: int
    max_num_seqs: int
    num_running: int = 0  # as last reported
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_in_flight: int = 0  # sent by this process and not ended
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that some worker serves, or has served since this process started."""

    name: str
    max_model_len: int
    created_unix_s: int


class DecodePort(Protocol):
    """Decode workers as their callers see them."""

    def models(self) -> list[ModelFacts]:
        """All known models; one stays known while its workers are away."""

    def workers(self, model: str) -> list[WorkerView]:
        """Workers of the model that are connected and take new requests."""

    async def wait_for_workers(self, model: str, timeout_s: float) -> list[WorkerView]:
        """As `workers`, waiting for the first one; empty after `timeout_s`."""

    def generate(self, worker_id: str, generation: Generation) -> AsyncIterator[TokenDelta]:
        """Deltas until one has a finish reason. Closing the iterator early aborts the request on the worker.

        Raises `Unavailable` when the worker cannot be reached at all and `WorkerLost` when it is gone later.
        A refusal by the worker (`Overloaded`, `InvalidRequest`, …) is raised too.
        """
