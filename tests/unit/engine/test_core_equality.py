"""Whatever runs, ends, is preempted, forked, cached, transferred: every token is that of an engine without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.block_hash import BlockHash
from common.errors import DeadlineExceeded, Overloaded
from common.kv_event import BlockRemoved, BlocksCleared, BlockStored
from engine.arena_swap import ArenaSwap
from engine.core import EngineCore, Reservation
from engine.outputs import FinishReason
from engine.request import EngineRequest, RequestStatus
from tests.unit.engine.builders import Engine, ask, hashes, oracle
from tests.unit.engine.fake_grammar import FakeGrammar

BLOCK_SIZE = 4
NUM_BLOCKS = 12
POOL_TOKENS = NUM_BLOCKS * BLOCK_SIZE
MAX_WAITING = 20

pick_any = st.integers(0, 10**6)
token_lists = st.lists(st.sampled_from([3, 4]), min_size=1, max_size=24)
salts = st.sampled_from(["", "", "s"])
rarely = st.integers(0, 3).map(lambda number: number == 0)
priorities = st.sampled_from([0, 0, 0, 1])
choice_counts = st.sampled_from([1, 1, 2, 3, 6])
sound_grammars = st.builds(FakeGrammar, st.integers(0, 99), st.integers(1, 30))
failing_grammars = st.builds(
    FakeGrammar, st.integers(0, 99), st.integers(1, 30), st.just(()), max_accepted=st.integers(0, 12))
sound_or_none = st.one_of(st.none(), st.none(), sound_grammars)
grammars = st.one_of(st.none(), st.none(), st.none(), sound_grammars, failing_grammars)
deadlines = st.one_of(st.none(), st.none(), st.integers(1, 9))  # from now on


@dataclass
class Transfer:
    """KV on its way into the engine."""

    asked: EngineRequest
    reservation: Reservation
    num_landed: int

    @property
    def token_ids(self) -> list[int]:
        return [*self.asked.prompt_token_ids, *self.asked.output_token_ids]


class SlowSwap(ArenaSwap):
    """An arena whose fetches end when the test says so."""

    def __init__(self, core: EngineCore, max_bytes: int) -> None:
        super().__init__(core, max_bytes)
        self.fetches: list[tuple[str, Sequence[BlockHash], Sequence[int], int]] = []

    def fetch(self, request_id: str, hashes: Sequence[BlockHash], block_ids: Sequence[int], num_present: int) -> None:
        self.fetches.append((request_id, hashes, block_ids, num_present))

    def end_fetch(self, index: int) -> None:
        super().fetch(*self.fetches.pop(index))


class EngineMachine(RuleBasedStateMachine):
    """A pool of 12 small blocks and prompts over two ids, so that prefixes are shared and room is short."""

    @initialize(overlaps=st.booleans(), caches=st.sampled_from([True, True, False]), swap=st.sampled_from("-ab"),
                headroom=st.sampled_from([0.0, 0.2]))
    def begin(self, overlaps: bool, caches: bool, swap: str, headroom: float) -> None:
        self.now = 0.0
        self.engine = Engine(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=10,
            max_num_waiting=MAX_WAITING, max_kv_events=1000, max_awaiting_fraction=0.5, poisons=True,
            clock=lambda: self.now,
            enable_overlap=overlaps, enable_prefix_caching=caches, headroom_fraction=headroom)
        core = self.engine.core
        self.slow: SlowSwap | None = SlowSwap(core, 8 * core.block_bytes) if swap == "b" else None
        if self.slow or swap == "a":
            core.use_swap(self.slow or ArenaSwap(core, 8 * core.block_bytes))
        self.grammars: dict[str, FakeGrammar | None] = {}
        self.num_asked = 0
        self.transfers: dict[str, Transfer] = {}
        self.released: set[str] = set()
        self.failed: set[str] = set()
        self.pins: list[tuple[list[int], list[list[int]]]] = []  # blocks, and the tokens in them when they were pinned
        self.mirror: set[bytes] = set()

    @property
    def live(self) -> list[str]:
        return [name for name in self.engine.asked if self.engine.core._roster.choices(name)]

    @rule(tokens=token_lists, max_tokens=st.integers(1, 30), salt=salts, prefill_only=rarely, n=choice_counts,
          priority=priorities, grammar=grammars, deadline=deadlines)
    def submit(
        self, tokens: list[int], max_tokens: int, salt: str, prefill_only: bool, n: int, priority: int,
        grammar: FakeGrammar | None, deadline: int | None,
    ) -> None:
        self.add(self.make(
            tokens, max_tokens, salt, prefill_only=prefill_only, n=n, priority=priority, deadline=deadline), grammar)

    @precondition(lambda self: self.engine.last)
    @rule(pick=pick_any)
    def go_on_with_an_answer(self, pick: int) -> None:
        """The next turn of a chat: prompt and answer of an earlier request are the new prompt's start."""
        name = sorted(self.engine.last)[pick % len(self.engine.last)]
        asked = self.engine.asked[name.split("#")[0]]
        tokens = [*asked.prompt_token_ids, *self.engine.tokens[name]]
        self.add(self.make(tokens[: POOL_TOKENS - 4], 6, asked.cache_salt))

    @rule(tokens=token_lists, num_drawn=st.integers(1, 12), num_more=st.integers(1, 12), salt=salts,
          choice=st.integers(0, 2), grammar=sound_or_none)
    def resume(
        self, tokens: list[int], num_drawn: int, num_more: int, salt: str, choice: int, grammar: FakeGrammar | None,
    ) -> None:
        drawn = oracle(tokens, num_drawn, choice, grammar)
        self.add(self.make(
            tokens, num_drawn + num_more, salt, output_token_ids=drawn, choice=choice), grammar)

    @rule(tokens=token_lists, max_tokens=st.integers(2, 30), salt=salts, resumes=rarely, prefill_only=rarely,
          n=choice_counts, grammar=grammars, deadline=deadlines)
    def reserve(
        self, tokens: list[int], max_tokens: int, salt: str, resumes: bool, prefill_only: bool, n: int,
        grammar: FakeGrammar | None, deadline: int | None,
    ) -> None:
        grammar = None if prefill_only else grammar
        drawn = oracle(tokens, max_tokens // 2, 0, grammar) if resumes else []
        asked = self.make(
            tokens, max_tokens, salt, output_token_ids=drawn, prefill_only=prefill_only, n=1 if resumes else n,
            deadline=deadline)
        num_free = self.engine.core.stats().num_free_blocks
        try:
            reservation = self.engine.core.reserve(asked, grammar and grammar.fork())
        except Overloaded:
            assert self.engine.core.stats().num_free_blocks == num_free
            assert asked.request_id not in self.engine.core
            return
        self.accept(asked, grammar)
        self.transfers[asked.request_id] = Transfer(asked, reservation, reservation.num_cached_tokens)

    @precondition(lambda self: self.transfers)
    @rule(pick=pick_any, num_tokens=st.integers(0, POOL_TOKENS))
    def land(self, pick: int, num_tokens: int) -> None:
        transfer = self.transfers[sorted(self.transfers)[pick % len(self.transfers)]]
        end = min(num_tokens, len(transfer.token_ids) - 1)
        self.engine.write(transfer.reservation.block_ids, transfer.token_ids[:end], transfer.num_landed)
        self.engine.core.land(transfer.asked.request_id, end)
        transfer.num_landed = max(transfer.num_landed, end)

    @precondition(lambda self: self.transfers)
    @rule(pick=pick_any)
    def start(self, pick: int) -> None:
        request_id = sorted(self.transfers)[pick % len(self.transfers)]
        del self.transfers[request_id]
        self.engine.core.start(request_id)

    @precondition(lambda self: self.slow and self.slow.fetches)
    @rule(pick=pick_any)
    def end_fetch(self, pick: int) -> None:
        assert self.slow is not None
        self.slow.end_fetch(pick % len(self.slow.fetches))

    @precondition(lambda self: self.live)
    @rule(pick=pick_any)
    def release(self, pick: int) -> None:
        request_id = self.live[pick % len(self.live)]
        self.transfers.pop(request_id, None)
        self.released.add(request_id)
        self.engine.core.release(request_id)
        self.engine.poison()

    @precondition(lambda self: self.engine.asked)
    @rule(pick=pick_any, first=st.integers(0, 2), num=st.integers(1, 4))
    def pin(self, pick: int, first: int, num: int) -> None:
        asked = self.engine.asked[sorted(self.engine.asked)[pick % len(self.engine.asked)]]
        tokens = [*asked.prompt_token_ids, *self.engine.tokens[asked.request_id]]
        chain = hashes(tokens, BLOCK_SIZE, asked.cache_salt)[first : first + num]
        pinned = self.engine.core.pin(chain)
        assert set(pinned) == {block_hash for block_hash in chain if block_hash in self.mirror}
        block_ids = list(pinned.values())
        self.pins.append((block_ids, [self.engine.read([block_id], BLOCK_SIZE) for block_id in block_ids]))

    @precondition(lambda self: self.pins)
    @rule(pick=pick_any)
    def unpin(self, pick: int) -> None:
        block_ids, content = self.pins.pop(pick % len(self.pins))
        assert [self.engine.read([block_id], BLOCK_SIZE) for block_id in block_ids] == content
        self.engine.core.unpin(block_ids)

    def make(
        self, tokens: list[int], max_tokens: int, salt: str, deadline: int | None = None, **fields: Any
    ) -> EngineRequest:
        self.num_asked += 1
        return ask(
            f"r{self.num_asked:04}", tokens, max_tokens, cache_salt=salt,
            deadline=None if deadline is None else self.now + deadline,
            block_hashes=hashes(tokens, BLOCK_SIZE, salt), **fields)

    def add(self, asked: EngineRequest, grammar: FakeGrammar | None = None) -> None:
        num_waiting = len(self.engine.core._roster.waiting)
        if num_waiting < MAX_WAITING and len(asked.prompt_token_ids) + len(asked.output_token_ids) < POOL_TOKENS:
            self.engine.core.add(asked, grammar and grammar.fork())
            self.accept(asked, grammar)

    def accept(self, asked: EngineRequest, grammar: FakeGrammar | None = None) -> None:
        self.grammars[asked.request_id] = grammar
        self.engine.expect(asked)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for output in self.engine.step():
                assert output.request_id not in self.released | self.failed
                if output.error is not None:
                    self.failed.add(output.request_id)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.live)
    @rule(pick=pick_any)
    def abort(self, pick: int) -> None:
        request_id = self.live[pick % len(self.live)]
        output = self.engine.core.abort(request_id)
        assert (output is None) == (request_id in self.transfers)
        if output is not None:
            self.engine.record(output)
        self.engine.poison()

    @rule()
    def clear_cache(self) -> None:
        self.engine.core.reset_prefix_cache()

    @invariant()
    def ledger_is_exact(self) -> None:
        core = self.engine.core
        core.check_integrity()
        stats = core.stats()
        assert stats.num_leaked_blocks == 0
        loading = {fetch[0]: fetch[2] for fetch in self.slow.fetches} if self.slow else {}
        orphans = {request.sequence_id for request in core._roster.transfers.orphans}
        assert stats.num_awaiting == len(self.transfers) + len(loading) - len(orphans)
        awaiting = {block_id for transfer in self.transfers.values() for block_id in transfer.reservation.block_ids}
        if not loading:
            assert stats.num_awaiting_blocks == len(awaiting)
        assert stats.num_awaiting_blocks <= NUM_BLOCKS // 2 or (self.transfers, len(loading)) == ({}, 1)
        assert stats.num_pinned_blocks == len({block_id for block_ids, _ in self.pins for block_id in block_ids})

    @invariant()
    def no_sequence_has_more_blocks_than_it_is_about_to_fill(self) -> None:
        for request in self.engine.core._roster.live():
            assert (len(request.block_ids) - 1) * BLOCK_SIZE <= request.num_tokens + 1

    @invariant()
    def public_blocks_hold_their_tokens_already(self) -> None:
        for request in self.engine.core._roster.live():
            num_public = request.num_public_blocks * BLOCK_SIZE
            assert self.engine.read(request.block_ids, num_public) == request.token_ids[:num_public].tolist()

    @invariant()
    def awaiting_requests_keep_their_blocks(self) -> None:
        for request_id, transfer in self.transfers.items():
            assert self.engine.core.block_ids(request_id) == transfer.reservation.block_ids
            assert self.engine.read(transfer.reservation.block_ids, transfer.num_landed) == (
                transfer.token_ids[: transfer.num_landed])

    @invariant()
    def held_requests_hold_the_kv_of_all_tokens_but_the_last(self) -> None:
        for request in self.engine.core._roster.live():
            if request.status is RequestStatus.HELD:
                wanted = request.token_ids.tolist()[:-1]
                assert self.engine.read(self.engine.core.block_ids(request.request_id), len(wanted)) == wanted

    @invariant()
    def events_tell_exactly_what_is_cached(self) -> None:
        for event in self.engine.core.take_kv_events():
            match event:
                case BlockStored(stored):
                    self.mirror.update(stored)
                case BlockRemoved(removed):
                    assert self.mirror.issuperset(removed)
                    self.mirror.difference_update(removed)
                case BlocksCleared():
                    self.mirror.clear()
        pool = self.engine.core._pool
        assert self.mirror == {h for b in range(pool.num_blocks) if (h := pool.hash_of(b)) is not None}

    @invariant()
    def tokens_equal_the_oracle(self) -> None:
        for name, output in self.engine.last.items():
            asked, got = self.engine.asked[output.request_id], self.engine.tokens[name]
            num_prompt = len(asked.prompt_token_ids)
            limit = min(asked.params.max_tokens, POOL_TOKENS - num_prompt)
            whole = oracle(asked.prompt_token_ids, limit, output.choice, self.grammars[output.request_id])
            assert got == whole[: len(got)]
            grammar = self.grammars[output.request_id]
            fails = grammar is not None and grammar.max_accepted < min(grammar.length, limit)
            if isinstance(output.error, DeadlineExceeded):
                assert asked.deadline is not None
                assert asked.deadline <= self.now
            elif output.error is not None:
                assert fails
            elif output.finish_reason is not FinishReason.ABORT:
                is_stop = grammar is not None and grammar.length <= limit
                assert not fails
                assert output.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
                assert got == whole
            assert output.num_prompt_tokens == num_prompt
            assert output.num_cached_tokens <= num_prompt - 1

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        core = self.engine.core
        while self.transfers:
            self.start(0)
        while self.pins:
            self.unpin(0)
        for _ in range(2000):  # far more steps than all requests can need
            while self.slow and self.slow.fetches:
                self.end_fetch(0)
            if not (self.live or core.has_work):
                break
            if core.has_work:
                self.step(1)
            for request_id in self.live:
                for held in core._roster.choices(request_id):
                    if held.status is RequestStatus.HELD:
                        assert self.engine.progress[request_id] == held.num_tokens - 1
                        self.released.add(request_id)
                        core.release(request_id)
        assert not self.live
        self.tokens_equal_the_oracle()
        names = {name for asked in self.engine.asked.values() for name in self.engine.names(asked)}
        unanswered = {name.split("#")[0] for name in names - self.engine.last.keys()}
        assert unanswered <= self.released | self.failed
        assert not len(core._roster.prefixes)
        stats = core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert (core._roster.in_flight.num_leaving, core._roster.forks.num_waiting) == (0, 0)
        assert not self.engine.runner._joined
        core.close(Overloaded("the test is over"))


class TestEngineEquality(EngineMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.full
class TestEngineEqualityAtLength(EngineMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=2000, stateful_step_count=50, deadline=None)


def test_a_hundred_requests_in_a_pool_for_ten_all_get_their_own_tokens() -> None:
    engine = Engine(num_blocks=60, block_size=4, max_num_seqs=32, max_num_batched_tokens=48)
    prompts = {f"r{i}": [3 + (i % 5)] * (8 + i % 13) for i in range(100)}
    engine.run(*(ask(request_id, tokens, 20) for request_id, tokens in prompts.items()))
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    for request_id, tokens in prompts.items():
        assert engine.tokens[request_id] == oracle(tokens, 20)
