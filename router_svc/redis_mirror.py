"""The index in Redis, written by every router and loaded by one that starts.

Keys of a worker: `shoal:kv:state:<id>` (hash: incarnation, started, seq, epoch) and `shoal:kv:blocks:<id>` (set of
block hashes); `shoal:kv:workers` names them all. A batch is applied when its incarnation is the stored one and its
seq the next (several batches in one call: the stored seq lies just before or among them), so routers may repeat each
other; a whole replacement is staged under another key and swapped in by one script, fenced by the worker's start
time, so a late router never brings an old life back.

States of a worker's writing: synced → (batches pending) → synced; and → behind, when a call failed, too much was
pending or Redis knows another seq: pending batches are dropped and the index as it stands then replaces all. Only one
background task calls Redis, and a call is never cancelled with a request; a connection whose reply was not read is
closed by the client, never used again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import redis.asyncio as redis
from redis.exceptions import RedisError

from common import logs
from common.block_hash import HASH_BYTES, BlockHash
from common.kv_event import BlockRemoved, BlockStored, KvEvent
from common.metrics import counter, gauge
from common.service_record import ServiceRecord
from router_svc.mirror import MirroredWorker
from router_svc.mirror_scripts import APPLY, FORGET, REPLACE, STAGE

log = logs.get(__name__)

WORKERS_KEY: Final = "shoal:kv:workers"
KEEP_S: Final = 86_400  # keys that nobody writes end by themselves
HASHES_PER_CALL: Final = 2_000
MAX_PENDING_HASHES: Final = 20_000  # of one worker, packed into one call; beyond it the whole is replaced
RETRY_S: Final = 0.5
_FAILURES = (RedisError, OSError, TimeoutError)

CALLS = counter("shoal_router_mirror_calls_total", "calls to Redis by result", ["result"])
CONNECTED = gauge("shoal_router_mirror_connected", "1 while the index is mirrored to Redis")


@dataclass(slots=True)
class _Pending:
    """Of one life of one worker. `first_seq` .. `last_seq` are the batches in `operations`, packed."""

    record: ServiceRecord
    seq: int = 0  # the index stands at it
    behind: bool = False
    gone: bool = False
    first_seq: int = 0
    last_seq: int = 0
    num_hashes: int = 0
    operations: list[bytes] = field(default_factory=list)


class RedisMirror:
    """`Mirror` on Redis or Valkey. `held` reads the index. `start` before use, `stop` once."""

    def __init__(self, client: redis.Redis, held: Callable[[str], Collection[BlockHash]]) -> None:
        self._client, self._held = client, held
        self._pending: dict[str, _Pending] = {}  # bounded by the workers that are listed, and those just gone
        self._known: dict[str, _Pending] = {}  # by worker: its present life
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._name = secrets.token_hex(4)
        self.reachable = True

    def start(self) -> None:
        CONNECTED.set(1)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def write(self, record: ServiceRecord, seq: int, events: Sequence[KvEvent]) -> None:
        pending = self._of(record)
        pending.seq = seq
        if not pending.behind:
            if not pending.operations:
                pending.first_seq = seq
            pending.last_seq = seq
            for event in events:
                pending.operations.extend(_pack(event))
                pending.num_hashes += len(getattr(event, "hashes", ()))
            if pending.num_hashes > MAX_PENDING_HASHES:
                self._fall_behind(pending)
        self._wake.set()

    def replace(self, record: ServiceRecord, seq: int) -> None:
        pending = self._of(record)
        pending.seq = seq
        self._fall_behind(pending)
        self._wake.set()

    def forget(self, record: ServiceRecord) -> None:
        pending = self._of(record)
        pending.gone = True
        self._fall_behind(pending)
        self._wake.set()
        self._known.pop(record.service_id, None)

    async def load(self) -> list[MirroredWorker]:
        """All workers whose blocks could be read in one life. Raises `RedisError`, `OSError` or `TimeoutError`."""
        out = []
        for raw in sorted(await cast(Any, self._client.smembers(WORKERS_KEY))):
            worker = await self._load_one(raw.decode())
            if worker is not None:
                out.append(worker)
        return out

    async def _load_one(self, worker_id: str) -> MirroredWorker | None:
        """Read the seq first: what is written while the set is scanned comes again as an event, and is idempotent."""
        state, blocks = _keys(worker_id)
        before = await cast(Any, self._client.hgetall(state))
        if not before:
            return None
        hashes = {h async for h in self._client.sscan_iter(blocks, count=HASHES_PER_CALL)}
        after = await cast(Any, self._client.hgetall(state))
        if after.get(b"epoch") != before[b"epoch"]:
            return None  # replaced in between: a mixture
        return MirroredWorker(worker_id, before[b"incarnation"].decode(), int(before[b"seq"]), tuple(hashes))

    def _of(self, record: ServiceRecord) -> _Pending:
        known = self._known.get(record.service_id)
        if known is None or known.record.incarnation != record.incarnation:
            known = self._known[record.service_id] = _Pending(record)
        self._pending[f"{record.service_id}/{record.incarnation}"] = known
        return known

    def _fall_behind(self, pending: _Pending) -> None:
        pending.behind = True
        pending.operations.clear()
        pending.num_hashes = 0

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                for key, pending in list(self._pending.items()):
                    del self._pending[key]
                    try:
                        await self._write_one(pending)
                    except BaseException:
                        self._fall_behind(pending)
                        self._pending[key] = pending
                        raise
                self._note(True)
            except _FAILURES as error:
                self._note(False)
                log.debug("mirror_unreachable", error=repr(error))
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _write_one(self, pending: _Pending) -> None:
        if pending.gone:
            await self._call(FORGET, pending, pending.record.incarnation)
        elif pending.behind:
            await self._replace(pending)
        elif pending.operations:
            operations, pending.operations, pending.num_hashes = b"".join(pending.operations), [], 0
            answer = await self._call(
                APPLY, pending, pending.record.incarnation, pending.first_seq, pending.last_seq, KEEP_S, operations)
            if answer == b"gap":
                await self._replace(pending)

    async def _replace(self, pending: _Pending) -> None:
        """The index as it stands now, at `pending.seq`; both are read before the first wait."""
        self._fall_behind(pending)
        hashes, seq, record = list(self._held(pending.record.service_id)), pending.seq, pending.record
        pending.behind = False  # batches from here on are pending again, and follow `seq`
        stage = f"shoal:kv:stage:{record.service_id}:{self._name}"
        await self._client.delete(stage)
        for start in range(0, len(hashes), HASHES_PER_CALL):
            packed = b"".join(hashes[start : start + HASHES_PER_CALL])
            await cast(Any, self._client.eval(STAGE, 1, stage, packed))
        await self._call(REPLACE, pending, record.incarnation, repr(record.started_at_unix_s), seq, KEEP_S, stage,
                         record.service_id)

    async def _call(self, script: str, pending: _Pending, *arguments: object) -> bytes:
        state, blocks = _keys(pending.record.service_id)
        values = [value if isinstance(value, bytes) else str(value) for value in arguments]
        answer = await cast(Any, self._client.eval(script, 3, state, blocks, WORKERS_KEY, *values))
        CALLS.labels(answer.decode()).inc()
        return cast(bytes, answer)

    def _note(self, reachable: bool) -> None:
        if reachable != self.reachable:
            log.warning("mirror_connected" if reachable else "mirror_disconnected")
        self.reachable = reachable
        CONNECTED.set(reachable)


def _keys(worker_id: str) -> tuple[str, str]:
    return f"shoal:kv:state:{worker_id}", f"shoal:kv:blocks:{worker_id}"


def _pack(event: KvEvent) -> list[bytes]:
    """Kind, number of hashes as 4 bytes big-endian, hashes; in pieces that one call of Redis takes well."""
    if not isinstance(event, BlockStored | BlockRemoved):
        return [b"C" + (0).to_bytes(4, "big")]
    kind = b"S" if isinstance(event, BlockStored) else b"R"
    hashes = event.hashes
    assert all(len(h) == HASH_BYTES for h in hashes)
    pieces = [hashes[i : i + HASHES_PER_CALL] for i in range(0, len(hashes), HASHES_PER_CALL)]
    return [kind + len(piece).to_bytes(4, "big") + b"".join(piece) for piece in pieces]
