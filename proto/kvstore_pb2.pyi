from proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier

class LookupRequest(_message.Message):
    __slots__ = ("block_hashes", "fingerprint")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    fingerprint: _common_pb2.Fingerprint
    def __init__(self, block_hashes: _Optional[bytes] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class BeginPutRequest(_message.Message):
    __slots__ = ("block_hashes", "parent", "fingerprint", "writer_id", "writer_incarnation", "lease_s", "block_bytes")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    parent: bytes
    fingerprint: _common_pb2.Fingerprint
    writer_id: str
    writer_incarnation: str
    lease_s: float
    block_bytes: int
    def __init__(self, block_hashes: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., writer_id: _Optional[str] = ..., writer_incarnation: _Optional[str] = ..., lease_s: _Optional[float] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class BeginPutResponse(_message.Message):
    __slots__ = ("put_id", "fence", "slots", "segment")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    put_id: str
    fence: int
    slots: _containers.RepeatedCompositeFieldContainer[BlockSlot]
    segment: str
    def __init__(self, put_id: _Optional[str] = ..., fence: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[BlockSlot, _Mapping]]] = ..., segment: _Optional[str] = ...) -> None: ...

class BlockSlot(_message.Message):
    __slots__ = ("block_hash", "present", "offset", "num_bytes", "checksum", "tier")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    present: bool
    offset: int
    num_bytes: int
    checksum: int
    tier: Tier
    def __init__(self, block_hash: _Optional[bytes] = ..., present: bool = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class CommitPutRequest(_message.Message):
    __slots__ = ("put_id", "fence", "checksums")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    put_id: str
    fence: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, put_id: _Optional[str] = ..., fence: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitPutResponse(_message.Message):
    __slots__ = ("num_committed", "error")
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    num_committed: int
    error: _common_pb2.ErrorDetail
    def __init__(self, num_committed: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class AbortPutRequest(_message.Message):
    __slots__ = ("put_id", "fence")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    put_id: str
    fence: int
    def __init__(self, put_id: _Optional[str] = ..., fence: _Optional[int] = ...) -> None: ...

class AbortPutResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("block_hashes", "fingerprint", "lease_s", "reader_id")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    fingerprint: _common_pb2.Fingerprint
    lease_s: float
    reader_id: str
    def __init__(self, block_hashes: _Optional[bytes] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., lease_s: _Optional[float] = ..., reader_id: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("lease_id", "segment", "slots", "more")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    segment: str
    slots: _containers.RepeatedCompositeFieldContainer[BlockSlot]
    more: bool
    def __init__(self, lease_id: _Optional[str] = ..., segment: _Optional[str] = ..., slots: _Optional[_Iterable[_Union[BlockSlot, _Mapping]]] = ..., more: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "corrupt_hashes")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_HASHES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    corrupt_hashes: bytes
    def __init__(self, lease_id: _Optional[str] = ..., corrupt_hashes: _Optional[bytes] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class BlockBytes(_message.Message):
    __slots__ = ("put_id", "fence", "block_hash", "payload", "checksum")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    put_id: str
    fence: int
    block_hash: bytes
    payload: bytes
    checksum: int
    def __init__(self, put_id: _Optional[str] = ..., fence: _Optional[int] = ..., block_hash: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    def __init__(self, block_hashes: _Optional[bytes] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("num_evicted",)
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    num_evicted: int
    def __init__(self, num_evicted: _Optional[int] = ...) -> None: ...
