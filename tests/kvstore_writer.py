"""A store writer that a test stops or kills: `kvstore_writer.py ADDRESS SHM_DIR NAME LEASE_S HASHES PARENT` (in hex).

Begins a put of 4096-byte blocks, writes the first half of the first one, prints `began`, and waits for a line on stdin;
then it writes 0xEE over all of its slots, tries to commit them, and prints how that ended.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from common import rpc
from common.blocks.liveness import Liveness
from common.blocks.segment import Segment
from common.clients.fingerprint import fingerprint_to_proto
from common.errors import ShoalError
from common.service_record import Fingerprint
from proto import kvstore_pb2, kvstore_pb2_grpc

NUM_BYTES = 4096
FINGERPRINT = Fingerprint("m", "r", "float32", 16, 2, 2, 16)


async def main(address: str, shm_dir: str, name: str, lease_s: str, hashes: str, parent: str) -> None:
    held = Liveness.hold(Path(shm_dir), name)
    channel = rpc.open_channel(address)
    stub = kvstore_pb2_grpc.KvStoreStub(channel)
    put = await stub.BeginPut(kvstore_pb2.BeginPutRequest(
        block_hashes=bytes.fromhex(hashes), parent=bytes.fromhex(parent), writer_id=name, lease_s=float(lease_s),
        fingerprint=fingerprint_to_proto(FINGERPRINT), block_bytes=NUM_BYTES))
    segment = Segment.open(Path(shm_dir) / put.segment)
    segment.view(put.slots[0].offset, NUM_BYTES // 2)[:] = bytes([0xEE]) * (NUM_BYTES // 2)
    print("began", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for slot in put.slots:
        segment.view(slot.offset, NUM_BYTES)[:] = bytes([0xEE]) * NUM_BYTES
    try:
        await stub.CommitPut(kvstore_pb2.CommitPutRequest(
            put_id=put.put_id, fence=put.fence, checksums=[0] * len(put.slots)))
        print("committed", flush=True)
    except ShoalError as error:
        print(f"refused: {error.code}", flush=True)
    await channel.close()
    held.release()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
