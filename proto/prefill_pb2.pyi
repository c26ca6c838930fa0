from proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrantRequest(_message.Message):
    __slots__ = ("transfer_id", "num_prompt_tokens", "send_from", "timeout_s", "fingerprint", "model")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEND_FROM_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    num_prompt_tokens: int
    send_from: int
    timeout_s: float
    fingerprint: _common_pb2.Fingerprint
    model: str
    def __init__(self, transfer_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., send_from: _Optional[int] = ..., timeout_s: _Optional[float] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class GrantResponse(_message.Message):
    __slots__ = ("granted", "lease_s", "queued_requests", "queued_tokens", "refusal", "incarnation")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    lease_s: float
    queued_requests: int
    queued_tokens: int
    refusal: _common_pb2.ErrorDetail
    incarnation: str
    def __init__(self, granted: bool = ..., lease_s: _Optional[float] = ..., queued_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., refusal: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "prompt_token_ids", "block_hashes", "send_from", "ticket", "lease_s", "timeout_s", "adapter", "cache_salt", "trace_context", "model")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SEND_FROM_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: bytes
    send_from: int
    ticket: TransferTicket
    lease_s: float
    timeout_s: float
    adapter: str
    cache_salt: str
    trace_context: _containers.ScalarMap[str, str]
    model: str
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[bytes] = ..., send_from: _Optional[int] = ..., ticket: _Optional[_Union[TransferTicket, _Mapping]] = ..., lease_s: _Optional[float] = ..., timeout_s: _Optional[float] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., trace_context: _Optional[_Mapping[str, str]] = ..., model: _Optional[str] = ...) -> None: ...

class TransferTicket(_message.Message):
    __slots__ = ("transport", "receiver_worker_id", "receiver_incarnation", "address", "segment", "offsets", "block_bytes", "opaque", "num_blocks")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    receiver_worker_id: str
    receiver_incarnation: str
    address: str
    segment: str
    offsets: _containers.RepeatedScalarFieldContainer[int]
    block_bytes: int
    opaque: bytes
    num_blocks: int
    def __init__(self, transport: _Optional[str] = ..., receiver_worker_id: _Optional[str] = ..., receiver_incarnation: _Optional[str] = ..., address: _Optional[str] = ..., segment: _Optional[str] = ..., offsets: _Optional[_Iterable[int]] = ..., block_bytes: _Optional[int] = ..., opaque: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("transfer_id", "epoch", "landed", "done", "failed", "progress")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    landed: ChunkLanded
    done: PrefillDone
    failed: _common_pb2.ErrorDetail
    progress: PrefillProgress
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., landed: _Optional[_Union[ChunkLanded, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., progress: _Optional[_Union[PrefillProgress, _Mapping]] = ...) -> None: ...

class ChunkLanded(_message.Message):
    __slots__ = ("first_block", "num_blocks", "num_valid", "checksum", "num_tokens_computed")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_VALID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    num_blocks: int
    num_valid: int
    checksum: int
    num_tokens_computed: int
    def __init__(self, first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_valid: _Optional[int] = ..., checksum: _Optional[int] = ..., num_tokens_computed: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("num_tokens_sent", "cached_by_tier", "num_tokens_computed", "bytes_sent", "queue_s", "compute_s", "transfer_s", "num_tokens_cached")
    NUM_TOKENS_SENT_FIELD_NUMBER: _ClassVar[int]
    CACHED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    num_tokens_sent: int
    cached_by_tier: _common_pb2.CachedTokens
    num_tokens_computed: int
    bytes_sent: int
    queue_s: float
    compute_s: float
    transfer_s: float
    num_tokens_cached: int
    def __init__(self, num_tokens_sent: _Optional[int] = ..., cached_by_tier: _Optional[_Union[_common_pb2.CachedTokens, _Mapping]] = ..., num_tokens_computed: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., num_tokens_cached: _Optional[int] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("num_tokens_computed", "queue_position")
    NUM_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    num_tokens_computed: int
    queue_position: int
    def __init__(self, num_tokens_computed: _Optional[int] = ..., queue_position: _Optional[int] = ...) -> None: ...

class AbortTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    reason: str
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortTransferResponse(_message.Message):
    __slots__ = ("quiesced",)
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    quiesced: bool
    def __init__(self, quiesced: bool = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("transfer_id", "epoch", "first_block", "num_blocks", "num_valid", "offset", "payload", "checksum")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_VALID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    first_block: int
    num_blocks: int
    num_valid: int
    offset: int
    payload: bytes
    checksum: int
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_valid: _Optional[int] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class KvChunkAck(_message.Message):
    __slots__ = ("num_blocks", "num_bytes", "error")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_bytes: int
    error: _common_pb2.ErrorDetail
    def __init__(self, num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
