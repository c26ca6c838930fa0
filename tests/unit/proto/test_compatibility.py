"""Later changes are additive only: what is on the wire today keeps its name, number and type."""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor

import proto
from proto import (
    common_pb2,
    decode_pb2,
    events_pb2,
    kvstore_pb2,
    prefill_pb2,
    router_pb2,
    tokenizer_pb2,
    worker_pb2,
)

BASELINE = Path(__file__).with_name("baseline.json")
FILES = (common_pb2, decode_pb2, events_pb2, kvstore_pb2, prefill_pb2, router_pb2, tokenizer_pb2, worker_pb2)


def contract(file: FileDescriptor) -> dict[str, str]:
    """Each field, enum value and method with what must not change."""
    out = {}
    for message in file.message_types_by_name.values():
        for field in message.fields:
            kind = field.message_type.full_name if field.message_type else str(field.type)
            out[f"{message.full_name}.{field.name}"] = f"{field.number} {kind} repeated={field.is_repeated}"
    for enum in file.enum_types_by_name.values():
        out |= {f"{enum.full_name}.{v.name}": str(v.number) for v in enum.values}
    for service in file.services_by_name.values():
        for method in service.methods:
            out[method.full_name] = (f"{method.input_type.full_name} {method.output_type.full_name} "
                                     f"{method.client_streaming} {method.server_streaming}")
    return out


def test_every_part_of_the_baseline_is_still_there_unchanged() -> None:
    now = {k: v for module in FILES for k, v in contract(module.DESCRIPTOR).items()}
    baseline = json.loads(BASELINE.read_text())
    assert {k: now.get(k) for k in baseline} == baseline


def test_the_baseline_knows_every_part() -> None:
    """A new field joins the baseline with the change that adds it (run this file as a program)."""
    now = {k for module in FILES for k in contract(module.DESCRIPTOR)}
    assert now - json.loads(BASELINE.read_text()).keys() == set()


def test_the_package_named_proto_is_ours() -> None:
    assert Path(proto.__file__).parent.joinpath("decode.proto").exists()


if __name__ == "__main__":
    known = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    known = {k: v for module in FILES for k, v in contract(module.DESCRIPTOR).items()} | known
    BASELINE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
