"""The KV store service: proto ↔ dataclasses, and the one place where its parts are joined."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc.aio
from prometheus_client import REGISTRY

from common import logs, trace
from common.block_hash import HASH_BYTES
from common.blocks.host_id import host_id, open_shm_dir
from common.blocks.liveness import check_name, is_alive
from common.blocks.segment import SUFFIX, Segment, remove_stale
from common.errors import ConfigError, InvalidRequest
from common.service_host import Deps, ServiceHost
from kvstore_svc.block_pool import BlockPool
from kvstore_svc.chain_index import BlockKey, Tier
from kvstore_svc.config import KvStoreConfig
from kvstore_svc.disk_tier import DiskTier
from kvstore_svc.put_ledger import Put, PutLedger
from kvstore_svc.slab_allocator import SlabAllocator
from kvstore_svc.ssd_recovery import recover
from kvstore_svc.store import BlockStore
from kvstore_svc.store_metrics import StoreMetrics
from kvstore_svc.tier_mover import TierMover
from proto import common_pb2, kvstore_pb2, kvstore_pb2_grpc

log = logs.get(__name__)

MAX_CHAIN_BLOCKS: Final = 1 << 16  # of one call
_TIERS: Final = {Tier.DRAM: kvstore_pb2.TIER_HOST, Tier.SSD: kvstore_pb2.TIER_DISK}

Context = grpc.aio.ServicerContext[Any, Any]


def build(config: KvStoreConfig, deps: Deps) -> KvStoreService:
    return KvStoreService(config, deps)


class KvStoreService:
    """One store node."""

    def __init__(self, config: KvStoreConfig, deps: Deps) -> None:
        self._config, self._deps = config, deps
        self._host = ServiceHost(config, deps.registry)
        self._parts: _Parts | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        config = self._config
        shm_dir = _open_folder(config)
        log.info("stale_segments_removed", num=await asyncio.to_thread(remove_stale, shm_dir))
        key = await self._deps.registry.deployment_key()
        self._parts = await asyncio.to_thread(
            _Parts, config, shm_dir, f"{self._host.service_id}-{self._host.incarnation}{SUFFIX}", key)
        self._parts.mover.start()
        REGISTRY.register(self._parts.metrics)
        self._sweeping = asyncio.create_task(self._sweep(self._parts.store))
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(KvStoreServicer(self._parts), self._host.server)
        await self._host.listen()
        ssd_bytes = config.ssd_bytes if config.ssd_path else 0
        await self._host.register(
            capacity={"dram_bytes": config.dram_bytes, "ssd_bytes": ssd_bytes}, host_id=host_id(shm_dir),
            transports=("shm", "grpc"))

    async def drain(self) -> None:
        """What is in DRAM alone goes to SSD, as far as it has room."""
        await self._host.begin_drain()
        if self._parts is not None:
            await self._parts.mover.flush()

    async def stop(self) -> None:
        await self._host.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._parts is not None:
            REGISTRY.unregister(self._parts.metrics)
            await self._parts.mover.stop()
            self._parts.segment.unlink()
            self._parts.segment.close()

    async def _sweep(self, store: BlockStore) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_interval_s)
            try:
                store.sweep()
            except Exception:
                log.exception("sweep_failed")


class _Parts:
    """Everything that exists once the files are open. Blocking to make."""

    def __init__(self, config: KvStoreConfig, shm_dir: Path, segment_name: str, key: bytes) -> None:
        slab_bytes = min(config.slab_bytes, config.dram_bytes // 4)
        disk, ssd = None, None
        if config.ssd_path:
            disk = DiskTier.open(
                Path(config.ssd_path), config.ssd_bytes, min(config.slab_bytes, (config.ssd_bytes - 4096) // 4), key)
            ssd = SlabAllocator(disk.num_slabs, disk.num_slots)
        self.pool = BlockPool(
            SlabAllocator(config.dram_bytes // slab_bytes, lambda stride: slab_bytes // stride), ssd)
        if disk is not None:
            log.info("ssd_tier_recovered", num_blocks=recover(self.pool, list(disk.scan())))
        self.segment_name = segment_name
        self.segment = Segment.create(shm_dir / segment_name, config.dram_bytes)
        self.mover = TierMover(self.pool, self.segment, slab_bytes, disk)
        self.puts = PutLedger(
            int(config.dram_bytes * config.max_put_fraction), lambda writer_id: is_alive(shm_dir, writer_id))
        self.store = BlockStore(
            self.pool, self.mover, self.puts, max_lease_s=config.max_lease_s,
            max_leased_bytes=int(config.dram_bytes * config.max_leased_fraction))
        self.metrics = StoreMetrics(self.pool, self.mover, self.puts, self.store, {
            Tier.DRAM: config.dram_bytes, Tier.SSD: config.ssd_bytes if disk is not None else 0})


def _open_folder(config: KvStoreConfig) -> Path:
    try:
        shm_dir = open_shm_dir(config.shm_dir)
        size = os.statvfs(shm_dir)
    except OSError as error:
        raise ConfigError(f"shm_dir: cannot use {config.shm_dir!r}: {error.strerror}", param="shm_dir") from None
    if config.dram_bytes > size.f_blocks * size.f_frsize:
        raise ConfigError(f"dram_bytes: {config.dram_bytes}, but {shm_dir} can hold "
                          f"{size.f_blocks * size.f_frsize} bytes at most", param="dram_bytes")
    return shm_dir


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    """Translation only; every `ShoalError` becomes a status in the server's interceptor."""

    def __init__(self, parts: _Parts) -> None:
        self._store, self._segment_name = parts.store, parts.segment_name

    async def Lookup(  # noqa: N802
        self, request: kvstore_pb2.LookupRequest, context: Context
    ) -> kvstore_pb2.LookupResponse:
        tiers = self._store.lookup(_keys(request.fingerprint, request.block_hashes))
        if (span := trace.current()).recording:
            num_dram = tiers.count(Tier.DRAM)
            span.put({"shoal.kv.dram_blocks": num_dram, "shoal.kv.ssd_blocks": len(tiers) - num_dram})
        return kvstore_pb2.LookupResponse(tiers=[_TIERS[tier] for tier in tiers])

    async def BeginPut(  # noqa: N802
        self, request: kvstore_pb2.BeginPutRequest, context: Context
    ) -> kvstore_pb2.BeginPutResponse:
        check_name(request.writer_id)
        keys = _keys(request.fingerprint, request.block_hashes)
        (parent,) = _keys(request.fingerprint, request.parent) or [bytes(2 * HASH_BYTES)]
        put = await self._store.begin_put(keys, parent, request.block_bytes, request.writer_id, request.lease_s)
        return kvstore_pb2.BeginPutResponse(
            put_id=put.put_id if put.absent else "", fence=put.fence, slots=self._put_slots(put),
            segment=self._segment_name)

    def _put_slots(self, put: Put) -> list[kvstore_pb2.BlockSlot]:
        return [
            kvstore_pb2.BlockSlot(
                block_hash=slot.key[HASH_BYTES:], present=slot.slot is None, num_bytes=put.num_bytes,
                offset=self._store.offset(slot.slot, put.num_bytes) if slot.slot is not None else 0)
            for slot in put.slots]

    async def CommitPut(  # noqa: N802
        self, request: kvstore_pb2.CommitPutRequest, context: Context
    ) -> kvstore_pb2.CommitPutResponse:
        num_committed = self._store.commit_put(request.put_id, request.fence, request.checksums)
        return kvstore_pb2.CommitPutResponse(num_committed=num_committed)

    async def AbortPut(  # noqa: N802
        self, request: kvstore_pb2.AbortPutRequest, context: Context
    ) -> kvstore_pb2.AbortPutResponse:
        self._store.abort_put(request.put_id, request.fence)
        return kvstore_pb2.AbortPutResponse()

    async def Get(  # noqa: N802
        self, request: kvstore_pb2.GetRequest, context: Context
    ) -> kvstore_pb2.GetResponse:
        lease = await self._store.get(_keys(request.fingerprint, request.block_hashes), request.lease_s)
        if lease is None:
            return kvstore_pb2.GetResponse()
        slots = [
            kvstore_pb2.BlockSlot(
                block_hash=block.key[HASH_BYTES:], present=True, num_bytes=block.num_bytes, checksum=block.checksum,
                offset=self._store.offset(block.slots[Tier.DRAM], block.num_bytes),
                tier=_TIERS[Tier.SSD if in_ssd else Tier.DRAM])
            for block, in_ssd in zip(lease.blocks, lease.in_ssd, strict=True)]
        return kvstore_pb2.GetResponse(
            lease_id=lease.lease_id, segment=self._segment_name, slots=slots, more=lease.more)

    async def Release(  # noqa: N802
        self, request: kvstore_pb2.ReleaseRequest, context: Context
    ) -> kvstore_pb2.ReleaseResponse:
        await self._store.release(request.lease_id, _hashes(request.corrupt_hashes))
        return kvstore_pb2.ReleaseResponse()

    async def Write(  # noqa: N802
        self, request_iterator: AsyncIterator[kvstore_pb2.BlockBytes], context: Context
    ) -> kvstore_pb2.CommitPutResponse:
        checksums: list[int] = []
        put_id, fence = "", 0
        async for block in request_iterator:
            put_id, fence = block.put_id, block.fence
            self._store.write(put_id, fence, len(checksums), block.block_hash, block.payload, block.checksum)
            checksums.append(block.checksum)
        return kvstore_pb2.CommitPutResponse(num_committed=self._store.commit_put(put_id, fence, checksums))

    async def Read(  # noqa: N802
        self, request: kvstore_pb2.ReadRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.BlockBytes]:
        async for block, payload in self._store.read(request.lease_id):
            yield kvstore_pb2.BlockBytes(
                block_hash=block.key[HASH_BYTES:], payload=payload, checksum=block.checksum)

    async def Evict(  # noqa: N802
        self, request: kvstore_pb2.EvictRequest, context: Context
    ) -> kvstore_pb2.EvictResponse:
        return kvstore_pb2.EvictResponse(num_evicted=await self._store.evict(_hashes(request.block_hashes)))


def _hashes(raw: bytes) -> list[bytes]:
    if len(raw) % HASH_BYTES or len(raw) > MAX_CHAIN_BLOCKS * HASH_BYTES:
        raise InvalidRequest(f"block_hashes: must be at most {MAX_CHAIN_BLOCKS} hashes of {HASH_BYTES} bytes, got "
                             f"{len(raw)} bytes", param="block_hashes")
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]


def _keys(fingerprint: common_pb2.Fingerprint, raw: bytes) -> list[BlockKey]:
    """Two models' blocks never meet, whatever their hashes."""
    digest = hashlib.blake2b(fingerprint.SerializeToString(deterministic=True), digest_size=16).digest()
    return [digest + block_hash for block_hash in _hashes(raw)]
