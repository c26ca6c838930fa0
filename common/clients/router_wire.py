"""Placement, query and outcome as the router's messages; both directions, for callers and for the service."""

from __future__ import annotations

from typing import Final

from common.block_hash import HASH_BYTES
from common.errors import InvalidRequest
from common.generation import FinishReason
from common.placement import Placement, RequestOutcome, RouteQuery
from proto import common_pb2, decode_pb2, router_pb2

OUTCOME_SUBJECT: Final = "shoal.outcome"

_FINISH: Final = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP, FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT, FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_NAME: Final = {value: str(reason) for reason, value in _FINISH.items()}


def query_to_proto(query: RouteQuery) -> router_pb2.RouteRequest:
    return router_pb2.RouteRequest(
        request_id=query.request_id, model=query.model, block_hashes=b"".join(query.block_hashes),
        num_prompt_tokens=query.num_prompt_tokens, max_tokens=query.max_tokens, cache_salt=query.cache_salt,
        affinity_key=query.affinity_key, timeout_s=query.timeout_s, exclude_worker_ids=query.exclude,
        attempt=query.attempt)


def query_from(request: router_pb2.RouteRequest) -> RouteQuery:
    """Raises `InvalidRequest` naming the field."""
    packed = request.block_hashes
    if len(packed) % HASH_BYTES:
        raise InvalidRequest(
            f"block_hashes: {len(packed)} bytes is not a multiple of {HASH_BYTES}", param="block_hashes")
    if not request.request_id:
        raise InvalidRequest("request_id: must not be empty", param="request_id")
    if request.num_prompt_tokens < 1:
        raise InvalidRequest("num_prompt_tokens: must be at least 1, got 0", param="num_prompt_tokens")
    return RouteQuery(
        request_id=request.request_id, model=request.model,
        block_hashes=tuple(packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)),
        num_prompt_tokens=request.num_prompt_tokens, max_tokens=request.max_tokens, cache_salt=request.cache_salt,
        affinity_key=request.affinity_key, timeout_s=request.timeout_s, exclude=tuple(request.exclude_worker_ids),
        attempt=request.attempt)


def placement_to_proto(placement: Placement) -> decode_pb2.Placement:
    return decode_pb2.Placement(
        decode_worker_id=placement.decode_worker_id, decode_incarnation=placement.decode_incarnation,
        prefill_worker_id=placement.prefill_worker_id, prefill_incarnation=placement.prefill_incarnation,
        prefill_address=placement.prefill_address, predicted_cached_tokens=placement.predicted_cached_tokens,
        predicted_ttft_s=placement.predicted_ttft_s, decision_id=placement.decision_id)


def placement_from(placement: decode_pb2.Placement) -> Placement:
    return Placement(
        decode_worker_id=placement.decode_worker_id, decode_incarnation=placement.decode_incarnation,
        prefill_worker_id=placement.prefill_worker_id, prefill_incarnation=placement.prefill_incarnation,
        prefill_address=placement.prefill_address, predicted_cached_tokens=placement.predicted_cached_tokens,
        predicted_ttft_s=placement.predicted_ttft_s, decision_id=placement.decision_id)


def outcome_to_proto(outcome: RequestOutcome) -> router_pb2.RequestOutcome:
    finish = _FINISH[FinishReason(outcome.finish_reason)] if outcome.finish_reason else None
    return router_pb2.RequestOutcome(
        request_id=outcome.request_id, decision_id=outcome.decision_id, model=outcome.model,
        decode_worker_id=outcome.decode_worker_id, prefill_worker_id=outcome.prefill_worker_id,
        num_prompt_tokens=outcome.num_prompt_tokens, num_cached_tokens=outcome.num_cached_tokens,
        num_output_tokens=outcome.num_output_tokens, ttft_s=outcome.ttft_s, mean_itl_s=outcome.mean_itl_s,
        max_itl_s=outcome.max_itl_s, e2e_s=outcome.e2e_s, finish_reason=finish, error_code=outcome.error_code,
        attempts=outcome.attempts, queue_s=outcome.queue_s)


def outcome_from(outcome: router_pb2.RequestOutcome) -> RequestOutcome:
    return RequestOutcome(
        request_id=outcome.request_id, model=outcome.model, decision_id=outcome.decision_id,
        decode_worker_id=outcome.decode_worker_id, prefill_worker_id=outcome.prefill_worker_id,
        num_prompt_tokens=outcome.num_prompt_tokens, num_cached_tokens=outcome.num_cached_tokens,
        num_output_tokens=outcome.num_output_tokens, ttft_s=outcome.ttft_s, mean_itl_s=outcome.mean_itl_s,
        max_itl_s=outcome.max_itl_s, e2e_s=outcome.e2e_s, finish_reason=_FINISH_NAME.get(outcome.finish_reason, ""),
        error_code=outcome.error_code, attempts=outcome.attempts, queue_s=outcome.queue_s)
