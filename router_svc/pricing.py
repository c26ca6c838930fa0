"""What each way of serving a request would cost, in seconds to its first token. Pure functions.

A candidate is a decode worker, alone ("local": it computes what it lacks) or with a prefill worker ("remote-prefill":
that one computes the prompt but its last token and pushes what the decode worker lacks). Its predicted TTFT is

    queue: prompt tokens ahead / measured prefill rate, and a wait for a seat or for blocks where there is none
  + prefill: own tokens not cached there / measured prefill rate
  + transfer: hop + bytes that the decode worker lacks / measured rate, as far as the prefill does not hide them
  + one step of the decode worker, which runs the last prompt token

The lowest wins; within `tie_ratio` (or `tie_s`) of it the least loaded, where the work that the request itself brings
is part of the load: of two workers that are as soon, one that only waits for a shared prefix beats one that computes
it a second time. A worker of role decode keeps its steps for
tokens: beyond `local_prefill_tokens` it computes a prompt itself only where no hand-off is possible, or the soonest
hand-off takes `patience` times as long. The price in seconds from hits, queues and transfers follows Mooncake's
conductor and Dynamo's router; the form is ours.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from router_svc.curves import CostCurves, kv_bytes_per_token
from router_svc.load import WorkerState

MAX_PREFILL_CHOICES = 2  # per decode worker, those that compute the prompt soonest


@dataclass(frozen=True, slots=True)
class PricingRules:
    """What is preferred beyond the bare price."""

    local_prefill_tokens: int = 128  # an uncached suffix up to this is never worth a hop
    patience: float = 4.0
    tie_ratio: float = 0.1
    tie_s: float = 0.005
    itl_limit_s: float = 0.0  # candidates that would make running requests wait longer come last; 0: no limit


@dataclass(frozen=True, slots=True)
class Priced:
    """One candidate. Not taken when `rejected_because` says why."""

    decode: WorkerState
    prefill: WorkerState | None
    cached_tokens: int  # that need neither computing nor moving: of the decode worker
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    predicted_ttft_s: float = 0.0
    predicted_itl_s: float = 0.0
    load: float = 0.0  # of the decode worker's seats, plus the prefill that this brings, in requests' times
    rejected_because: str = ""

    @property
    def source(self) -> str:
        return "local" if self.prefill is None else "remote-prefill"

    def num_uncached(self, asked: Asked) -> int:
        """Prompt tokens that the decode worker lacks; at least the last one."""
        return asked.num_prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """What pricing needs to know of a request."""

    num_prompt_tokens: int
    max_tokens: int
    seed: str  # breaks exact ties: a request's, or its affinity key so that its kind stays together
    exclude: frozenset[str] = frozenset()


def price(
    asked: Asked, decodes: Sequence[WorkerState], prefills: Sequence[WorkerState], curves: CostCurves,
    rules: PricingRules,
) -> list[Priced]:
    """All candidates, the impossible ones included, in the workers' order."""
    out: list[Priced] = []
    able = _able(asked, prefills, curves)
    for decode in decodes:
        local, remote = _local(asked, decode, curves), []
        if not local.rejected_because and local.num_uncached(asked) > rules.local_prefill_tokens:
            remote = _remotes(asked, decode, able, curves)
            soonest = min((r.predicted_ttft_s for r in remote), default=float("inf"))
            if decode.role == "decode" and soonest <= rules.patience * local.predicted_ttft_s:
                local = replace(local, rejected_because=f"role decode computes at most {rules.local_prefill_tokens} "
                                                        "tokens itself while a hand-off is possible")
        out += [_within_itl(candidate, rules) for candidate in (local, *remote)]
    return out


def choose(candidates: Sequence[Priced], seed: str, rules: PricingRules) -> int | None:
    """The index of the one to take; None when all are rejected."""
    for tolerated in ("", _ITL, _SILENT):  # better late than never
        allowed = [i for i, c in enumerate(candidates) if c.rejected_because == tolerated]
        if allowed:
            break
    else:
        return None
    best = min(candidates[i].predicted_ttft_s for i in allowed)
    near = [i for i in allowed if candidates[i].predicted_ttft_s <= best + max(rules.tie_s, best * rules.tie_ratio)]
    return min(near, key=lambda i: _rank(candidates[i], seed))


_ITL = "above the limit between tokens"
_SILENT = "neither reports nor answers"


def _local(asked: Asked, decode: WorkerState, curves: CostCurves) -> Priced:
    rate, step_s = curves.prefill_rate(decode), curves.step(decode)
    cached = min(decode.cached_tokens, asked.num_prompt_tokens - 1)
    uncached = asked.num_prompt_tokens - cached
    queue_s = decode.queue_tokens / rate + _room_wait_s(asked, decode, curves)
    prefill_s = uncached / rate
    chunk_s = min(uncached, decode.max_num_batched_tokens) / rate  # joins a step of the running requests
    return Priced(
        decode, None, cached, queue_s=queue_s, prefill_s=prefill_s, predicted_ttft_s=queue_s + prefill_s + step_s,
        predicted_itl_s=step_s + (chunk_s if decode.report.num_running else 0.0),
        load=_load(decode, prefill_s, curves),
        rejected_because=_impossible(asked, decode))


def _able(asked: Asked, prefills: Sequence[WorkerState], curves: CostCurves) -> list[WorkerState]:
    """Prefill workers that can compute the prompt, the soonest first."""
    able = [p for p in prefills if p.worker_id not in asked.exclude and not p.report.draining and p.answers
            and not _too_large(asked.num_prompt_tokens - 1, p)]
    return sorted(able, key=lambda p: _compute_s(asked, p, curves))


def _remotes(asked: Asked, decode: WorkerState, able: Sequence[WorkerState], curves: CostCurves) -> list[Priced]:
    fitting = (p for p in able if p.fingerprint == decode.fingerprint)
    return [_remote(asked, decode, prefill, curves) for prefill in islice(fitting, MAX_PREFILL_CHOICES)]


def _remote(asked: Asked, decode: WorkerState, prefill: WorkerState, curves: CostCurves) -> Priced:
    rate, step_s = curves.prefill_rate(prefill), curves.step(decode)
    cached = min(decode.cached_tokens, asked.num_prompt_tokens - 1)
    queue_s = prefill.queue_tokens / rate + _room_wait_s(asked, decode, curves)
    prefill_s = max(0, asked.num_prompt_tokens - 1 - prefill.cached_tokens) / rate
    moving_bytes = (asked.num_prompt_tokens - cached) * kv_bytes_per_token(decode.fingerprint)
    moving_s = moving_bytes / curves.transfer_rate(decode)
    hidden_s = min(prefill_s, moving_s) / 2  # chunks move while later ones are computed; the last one cannot
    transfer_s = curves.hop_s + moving_s - hidden_s
    return Priced(
        decode, prefill, cached, queue_s=queue_s, prefill_s=prefill_s, transfer_s=transfer_s,
        predicted_ttft_s=queue_s + prefill_s + transfer_s + step_s, predicted_itl_s=step_s,
        load=_load(decode, prefill_s, curves))


def _load(decode: WorkerState, prefill_s: float, curves: CostCurves) -> float:
    return decode.num_requests / decode.max_num_seqs + prefill_s / curves.request_s


def _compute_s(asked: Asked, prefill: WorkerState, curves: CostCurves) -> float:
    tokens = prefill.queue_tokens + max(0, asked.num_prompt_tokens - 1 - prefill.cached_tokens)
    return tokens / curves.prefill_rate(prefill)


def _room_wait_s(asked: Asked, decode: WorkerState, curves: CostCurves) -> float:
    """Until the decode worker has a seat and blocks: what is missing leaves at the pace at which requests end."""
    excess = max(0, decode.num_requests + 1 - decode.max_num_seqs)
    seats_s = excess * curves.request_s / decode.max_num_seqs
    uncached = asked.num_prompt_tokens - min(decode.cached_tokens, asked.num_prompt_tokens)
    known = decode.report.num_blocks  # 0: not reported
    missing = _num_blocks(uncached, decode) - decode.report.num_free_blocks if known else 0
    blocks_s = max(0, missing) * curves.request_s / max(1, known)
    return max(seats_s, blocks_s)


def _impossible(asked: Asked, decode: WorkerState) -> str:
    if decode.worker_id in asked.exclude:
        return "this request has failed there"
    if decode.report.draining:
        return "draining"
    if decode.role == "prefill":
        return "role prefill makes no tokens"
    if decode.max_model_len and asked.num_prompt_tokens >= decode.max_model_len:
        return f"the prompt does not fit its context of {decode.max_model_len} tokens"
    if _too_large(asked.num_prompt_tokens + 1, decode):
        return f"the prompt does not fit its {decode.report.num_blocks} blocks"
    return "" if decode.answers else _SILENT


def _too_large(num_tokens: int, worker: WorkerState) -> bool:
    return 0 < worker.report.num_blocks < _num_blocks(num_tokens, worker)


def _num_blocks(num_tokens: int, worker: WorkerState) -> int:
    return -(-num_tokens // worker.fingerprint.block_size)


def _within_itl(candidate: Priced, rules: PricingRules) -> Priced:
    if not rules.itl_limit_s or candidate.rejected_because or candidate.predicted_itl_s <= rules.itl_limit_s:
        return candidate
    return replace(candidate, rejected_because=_ITL)


def _rank(candidate: Priced, seed: str) -> tuple[float, float, int]:
    computing = candidate.prefill or candidate.decode
    lot = f"{seed}/{candidate.decode.worker_id}/{computing.worker_id}"
    return candidate.load, computing.queue_tokens, zlib.crc32(lot.encode())
