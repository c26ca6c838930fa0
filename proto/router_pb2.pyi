from proto import common_pb2 as _common_pb2
from proto import decode_pb2 as _decode_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteRequest(_message.Message):
    __slots__ = ("request_id", "model", "block_hashes", "num_prompt_tokens", "max_tokens", "adapter", "cache_salt", "affinity_key", "service_class", "priority", "timeout_s", "exclude_worker_ids", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_KEY_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    block_hashes: bytes
    num_prompt_tokens: int
    max_tokens: int
    adapter: str
    cache_salt: str
    affinity_key: str
    service_class: str
    priority: int
    timeout_s: float
    exclude_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., affinity_key: _Optional[str] = ..., service_class: _Optional[str] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., exclude_worker_ids: _Optional[_Iterable[str]] = ..., attempt: _Optional[int] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("placement", "refusal", "decision_id")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    placement: _decode_pb2.Placement
    refusal: _common_pb2.ErrorDetail
    decision_id: str
    def __init__(self, placement: _Optional[_Union[_decode_pb2.Placement, _Mapping]] = ..., refusal: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., decision_id: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "decision_id", "candidates", "chosen", "outcome", "degraded", "refused")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decision_id: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    chosen: int
    outcome: RequestOutcome
    degraded: _containers.RepeatedScalarFieldContainer[str]
    refused: bool
    def __init__(self, request_id: _Optional[str] = ..., decision_id: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., chosen: _Optional[int] = ..., outcome: _Optional[_Union[RequestOutcome, _Mapping]] = ..., degraded: _Optional[_Iterable[str]] = ..., refused: bool = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("decode_worker_id", "prefill_worker_id", "source", "cached_tokens", "queue_s", "prefill_s", "transfer_s", "predicted_ttft_s", "predicted_itl_s", "rejected_because")
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_ITL_S_FIELD_NUMBER: _ClassVar[int]
    REJECTED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    decode_worker_id: str
    prefill_worker_id: str
    source: str
    cached_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    predicted_ttft_s: float
    predicted_itl_s: float
    rejected_because: str
    def __init__(self, decode_worker_id: _Optional[str] = ..., prefill_worker_id: _Optional[str] = ..., source: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., predicted_ttft_s: _Optional[float] = ..., predicted_itl_s: _Optional[float] = ..., rejected_because: _Optional[str] = ...) -> None: ...

class RequestOutcome(_message.Message):
    __slots__ = ("request_id", "decision_id", "model", "decode_worker_id", "prefill_worker_id", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "ttft_s", "mean_itl_s", "max_itl_s", "e2e_s", "finish_reason", "error_code", "attempts", "cached_by_tier", "queue_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_ITL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_ITL_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decision_id: str
    model: str
    decode_worker_id: str
    prefill_worker_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float
    mean_itl_s: float
    max_itl_s: float
    e2e_s: float
    finish_reason: _common_pb2.FinishReason
    error_code: str
    attempts: int
    cached_by_tier: _common_pb2.CachedTokens
    queue_s: float
    def __init__(self, request_id: _Optional[str] = ..., decision_id: _Optional[str] = ..., model: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., prefill_worker_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., mean_itl_s: _Optional[float] = ..., max_itl_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error_code: _Optional[str] = ..., attempts: _Optional[int] = ..., cached_by_tier: _Optional[_Union[_common_pb2.CachedTokens, _Mapping]] = ..., queue_s: _Optional[float] = ...) -> None: ...
