"""`Fingerprint` on the wire."""

from __future__ import annotations

from common.service_record import Fingerprint
from proto import common_pb2


def fingerprint_to_proto(fingerprint: Fingerprint) -> common_pb2.Fingerprint:
    return common_pb2.Fingerprint(
        model=fingerprint.model, revision=fingerprint.revision, dtype=fingerprint.dtype,
        kv_layout=fingerprint.kv_layout, block_size=fingerprint.block_size, hash_scheme=fingerprint.hash_scheme,
        num_layers=fingerprint.num_layers, num_kv_heads=fingerprint.num_kv_heads, head_dim=fingerprint.head_dim)


def fingerprint_from_proto(message: common_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        model=message.model, revision=message.revision, dtype=message.dtype, block_size=message.block_size,
        num_layers=message.num_layers, num_kv_heads=message.num_kv_heads, head_dim=message.head_dim,
        kv_layout=message.kv_layout, hash_scheme=message.hash_scheme)
