from proto import kvstore_pb2 as _kvstore_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvEventBatch(_message.Message):
    __slots__ = ("worker_id", "incarnation", "seq", "events", "model")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    seq: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    model: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., seq: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., model: _Optional[str] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: BlocksCleared
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[BlocksCleared, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("block_hashes", "parent", "tier")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    parent: bytes
    tier: _kvstore_pb2.Tier
    def __init__(self, block_hashes: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., tier: _Optional[_Union[_kvstore_pb2.Tier, str]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("block_hashes", "tier")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    tier: _kvstore_pb2.Tier
    def __init__(self, block_hashes: _Optional[bytes] = ..., tier: _Optional[_Union[_kvstore_pb2.Tier, str]] = ...) -> None: ...

class BlocksCleared(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: _kvstore_pb2.Tier
    def __init__(self, tier: _Optional[_Union[_kvstore_pb2.Tier, str]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "incarnation", "model", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_waiting_tokens", "num_preemptions", "step_s", "prefill_tokens_per_s", "num_leaked_blocks", "draining", "sent_at_unix_ms", "num_awaiting_transfer_blocks", "role", "transfer_bytes_per_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LEAKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_AWAITING_TRANSFER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    model: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_waiting_tokens: int
    num_preemptions: int
    step_s: float
    prefill_tokens_per_s: float
    num_leaked_blocks: int
    draining: bool
    sent_at_unix_ms: int
    num_awaiting_transfer_blocks: int
    role: str
    transfer_bytes_per_s: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., step_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., num_leaked_blocks: _Optional[int] = ..., draining: bool = ..., sent_at_unix_ms: _Optional[int] = ..., num_awaiting_transfer_blocks: _Optional[int] = ..., role: _Optional[str] = ..., transfer_bytes_per_s: _Optional[float] = ...) -> None: ...
