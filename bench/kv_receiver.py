"""The decode side of a measured hand-off, a process of its own: `kv_receiver.py SHM_DIR PREFILL_ADDRESS NUM_BLOCKS`.

It says `ready`, then for each line on stdin, the name of a transport, runs one hand-off with the real receiver and
landing areas and answers with the seconds from asking for a slot to the last block in place, and a checksum of all.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import uvloop

from bench.bulk_engine import BLOCK_BYTES, FINGERPRINT, BulkEngine, prompt
from common import rpc
from common.blocks.checksum import checksum
from common.blocks.landing import Landings
from common.clients.channels import ChannelPool
from common.clients.prefill import PrefillClient
from common.sampling_params import SamplingParams
from decode_svc.service import KvTransferServicer
from engine.kv_transfer.receiver import Receiver, Route
from engine.request import EngineRequest
from proto import prefill_pb2_grpc

_TIMEOUT_S = 30.0


async def _hand_off(bulk: BulkEngine, receiver: Receiver, route: Route, num_blocks: int) -> str:
    """`SECONDS CHECKSUM`, or why it failed."""
    request = EngineRequest("r", prompt(num_blocks), SamplingParams(max_tokens=1))
    reserved = await bulk.engine.reserve(request)
    try:
        started = time.perf_counter()
        received = await receiver.receive(route, request, reserved.block_ids, 0, _TIMEOUT_S)
        seconds = time.perf_counter() - started
    finally:
        await bulk.engine.release("r")
    if received.num_tokens != len(request.prompt_token_ids) - 1:
        return f"failed after {received.num_tokens} tokens"
    sums = [checksum(bulk.engine.block_view(block_id)) for block_id in reserved.block_ids[:num_blocks]]
    return f"{seconds!r} {sum(sums)}"


async def main(shm_dir: str, address: str, num_blocks: int) -> None:
    bulk = BulkEngine(num_blocks + 2, seed=None, caches=False)
    bulk.engine.start()
    channels = ChannelPool()
    landings = Landings(Path(shm_dir), "decode-0", "", BLOCK_BYTES)
    server = rpc.new_server()
    prefill_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(landings), server)
    landings.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    receiver = Receiver(bulk.engine, PrefillClient(channels), landings.open, FINGERPRINT, stall_s=_TIMEOUT_S)
    print("ready", flush=True)
    while transport := (await asyncio.to_thread(sys.stdin.readline)).strip():
        print(await _hand_off(bulk, receiver, Route("prefill-0", address, transport), num_blocks), flush=True)
    await server.stop(grace=0.5)
    await channels.close()
    await bulk.engine.stop()
    landings.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
