"""The wire-free words between whoever asks for tokens and the worker that makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

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


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before any penalty, temperature or mask."""

    logprob: float  # of the token that stands at this position
    top_token_ids: tuple[int, ...] = ()  # the likeliest, best first; ties by id
    top_logprobs: tuple[float, ...] = ()


class RequestTiming(NamedTuple):
    """Where an engine spent a request's time, as far as it has come. Seconds and counts."""

    queue_s: float = 0.0  # submitted -> first admitted
    prefill_s: float = 0.0  # first admitted -> first drawn token; 0 before
    decode_s: float = 0.0  # first drawn token -> now
    num_chunks: int = 0  # steps that computed tokens of it without drawing, and the one that drew the first
    num_steps: int = 0  # all steps it took part in
    num_preemptions: int = 0


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
    output_token_ids: tuple[int, ...] = ()  # drawn by an earlier attempt: replayed, not sent again; only with n = 1
    attempt: int = 0
    choice: int = 0  # index of the only choice that runs; of n > 1 choices all run, from 0
    priority: int = 0  # lower runs first


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one engine step brought for one choice of a request. The last one of a choice has a `finish_reason`.

    An error ends all choices at once.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: ShoalError | None = None  # exactly when finish_reason is ERROR
    stop_token_id: int | None = None  # the last of token_ids, when it ended the request
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_s: float = 0.0  # submitted → first admitted by the scheduler
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, where asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # one for each prompt token, None for the first; once
    timing: RequestTiming | None = None  # with a choice's first token and with its last


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
    connection: int = 0  # of this process to that life of it, counted up at each reconnect


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
        """Deltas until each choice has one with a finish reason. Closing the iterator early aborts the request there.

        Raises `Unavailable` when the worker cannot be reached at all and `WorkerLost` when it is gone later.
        A refusal by the worker (`Overloaded`, `InvalidRequest`, …) is raised too.
        """
