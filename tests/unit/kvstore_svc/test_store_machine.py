"""Random lives of a node: whatever happens, each slot has one owner and each byte handed out is right."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.errors import NotFound
from kvstore_svc.chain_index import BlockKey, Tier
from kvstore_svc.lease_ledger import Lease
from kvstore_svc.put_ledger import Put
from tests.unit.kvstore_svc.builders import ROOT, Rig, chain

TRUNK = chain("t", 3)
CHAINS = [TRUNK + chain(name, 5) for name in "abcd"]  # four branches of one trunk
chains = st.builds(lambda branch, length: CHAINS[branch][:length], st.integers(0, 3), st.integers(1, 8))
writers = st.sampled_from(["one", "two", "remote"])


class StoreMachine(RuleBasedStateMachine):
    puts, leases = Bundle("puts"), Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-machine-"))
        self.runner = asyncio.Runner()
        self.rig = Rig(self.folder, dram_blocks=12, ssd_blocks=14)
        self.rig.alive |= {"one", "two"}
        self.flipped: set[BlockKey] = set()
        self.orphans: set[BlockKey] = set()
        self.puts_of_this_life: set[str] = set()

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    @rule(target=puts, keys=chains, writer=writers)
    def begin(self, keys: list[BlockKey], writer: str) -> Put:
        put: Put = self.run(self.rig.begin(keys, ROOT, writer))
        self.puts_of_this_life.add(put.put_id)
        return put

    @rule(put=consumes(puts), part=st.floats(0, 1))
    def commit(self, put: Put, part: float) -> None:
        """In time or late; a late writer that lives may write into its slots to the last moment."""
        store, absent = self.rig.store, put.absent
        if put.put_id not in self.puts_of_this_life or not absent:
            with pytest.raises(NotFound):
                store.commit_put(put.put_id, put.fence, [])
            return
        late = put.expires_at < time.monotonic()
        checksums = self.rig.fill(put)[: round(part * len(absent))]
        if late:
            with pytest.raises(NotFound):
                store.commit_put(put.put_id, put.fence, checksums)
        else:
            assert store.commit_put(put.put_id, put.fence, checksums) <= len(checksums)

    @rule(put=consumes(puts))
    def abort(self, put: Put) -> None:
        self.rig.store.abort_put(put.put_id, put.fence)

    @rule(put=puts)
    def let_a_put_expire(self, put: Put) -> None:
        put.expires_at = 0.0
        self.rig.store.sweep()

    @rule(writer=writers)
    def kill_a_writer(self, writer: str) -> None:
        self.rig.alive.discard(writer)
        self.rig.store.sweep()

    @rule(target=leases, keys=chains)
    def get(self, keys: list[BlockKey]) -> Lease | None:
        lease: Lease | None = self.run(self.rig.store.get(keys, 60.0))
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            wrong = [block.key[16:] for block in lease.blocks if block.key in self.flipped]
            self.run(self.rig.store.release(lease.lease_id, wrong))
            self.flipped -= {block.key for block in lease.blocks if block.condemned}
            self.note_orphans()

    @rule(keys=chains)
    def demote(self, keys: list[BlockKey]) -> None:
        block = self.rig.pool.index.get(keys[-1])
        if block is not None:
            self.run(self.rig.mover.demote(block))

    @rule(keys=chains)
    def flip_a_byte_in_dram(self, keys: list[BlockKey]) -> None:
        if self.rig.in_tier(keys[-1:], Tier.DRAM) == [True] and keys[-1] not in self.flipped:
            self.rig.flip_dram(keys[-1])
            self.flipped.add(keys[-1])

    @rule(keys=st.none() | chains)
    def evict(self, keys: list[BlockKey] | None) -> None:
        self.run(self.rig.store.evict([key[16:] for key in keys or []]))

    @rule()
    def restart(self) -> None:
        self.run(self.rig.close())
        self.rig = Rig(self.folder, dram_blocks=12, ssd_blocks=14)
        self.rig.alive |= {"one", "two"}
        self.puts_of_this_life.clear()
        self.note_orphans()

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.rig.pool.check()

    @invariant()
    def parents_outlive_children(self) -> None:
        index = self.rig.pool.index
        self.orphans = {key for key in self.orphans if index.get(key) is not None}
        for block in index:
            assert block.parent == ROOT or index.get(block.parent) is not None or block.key in self.orphans

    @invariant()
    def every_byte_is_right_or_known_to_be_wrong(self) -> None:
        for block in self.rig.pool.index:
            if Tier.DRAM in block.slots and block.key not in self.flipped:
                assert bytes(self.rig.store.view(block)) == (block.key * 128)[: block.num_bytes]

    def note_orphans(self) -> None:
        """Only wrong bytes and a restart without DRAM may take a parent from its child."""
        index = self.rig.pool.index
        self.orphans |= {block.key for block in index if block.parent != ROOT and index.get(block.parent) is None}

    def teardown(self) -> None:
        self.run(self.rig.close())
        self.runner.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
test_a_store_survives_any_life = StoreMachine.TestCase
