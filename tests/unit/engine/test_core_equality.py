"""Whatever else runs, is aborted, preempted or cached: every token equals that of an engine without a cache."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockRemoved, BlocksCleared, BlockStored
from engine.outputs import FinishReason
from tests.unit.engine.builders import Engine, ask, oracle, scheme

BLOCK_SIZE = 4
POOL_TOKENS = 12 * BLOCK_SIZE


class EngineMachine(RuleBasedStateMachine):
    """A pool of 12 small blocks and prompts over two ids, so that prefixes are shared and room is short."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            num_blocks=12, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=10, max_num_waiting=20,
            max_kv_events=1000)
        self.asked: dict[str, tuple[list[int], int, str]] = {}
        self.mirror: set[bytes] = set()

    @precondition(lambda self: self.engine.core.stats().num_waiting < 20)
    @rule(
        tokens=st.lists(st.sampled_from([3, 4]), min_size=1, max_size=24), max_tokens=st.integers(1, 30),
        salt=st.sampled_from(["", "", "s"]))
    def submit(self, tokens: list[int], max_tokens: int, salt: str) -> None:
        self.add(tokens, max_tokens, salt)

    @precondition(lambda self: self.engine.last and self.engine.core.stats().num_waiting < 20)
    @rule(pick=st.integers(0, 10**6))
    def go_on_with_an_answer(self, pick: int) -> None:
        """The next turn of a chat: prompt and answer of an earlier request are the new prompt's start."""
        request_id = sorted(self.engine.last)[pick % len(self.engine.last)]
        tokens, _, salt = self.asked[request_id]
        self.add((tokens + self.engine.tokens[request_id])[: POOL_TOKENS - 4], 6, salt)

    def add(self, tokens: list[int], max_tokens: int, salt: str) -> None:
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = (tokens, max_tokens, salt)
        hashes = scheme(BLOCK_SIZE).chain(scheme(BLOCK_SIZE).root("", salt), tokens)
        self.engine.core.add(ask(request_id, tokens, max_tokens, cache_salt=salt, block_hashes=hashes))

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @precondition(lambda self: self.engine.core.has_work)
    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick: int) -> None:
        live = sorted(set(self.asked) - set(self.engine.last))
        output = self.engine.core.abort(live[pick % len(live)])
        assert output is not None
        self.engine.record(output)

    @rule()
    def clear_cache(self) -> None:
        self.engine.core.reset_prefix_cache()

    @invariant()
    def ledger_is_exact(self) -> None:
        self.engine.core.check_integrity()
        assert self.engine.core.stats().num_leaked_blocks == 0

    @invariant()
    def running_arrived_before_waiting(self) -> None:
        live = [int(request.request_id[1:]) for request in self.engine.core._scheduler.live()]
        assert live == sorted(live)

    @invariant()
    def events_tell_exactly_what_is_cached(self) -> None:
        for event in self.engine.core.take_kv_events():
            match event:
                case BlockStored(hashes):
                    self.mirror.update(hashes)
                case BlockRemoved(hashes):
                    assert self.mirror.issuperset(hashes)
                    self.mirror.difference_update(hashes)
                case BlocksCleared():
                    self.mirror.clear()
        pool = self.engine.core._pool
        assert self.mirror == {h for b in range(pool.num_blocks) if (h := pool.hash_of(b)) is not None}

    @invariant()
    def tokens_equal_the_oracle(self) -> None:
        for request_id, output in self.engine.last.items():
            tokens, max_tokens, _ = self.asked[request_id]
            got = self.engine.tokens[request_id]
            assert got == oracle(tokens, len(got))
            if output.finish_reason is FinishReason.LENGTH:
                assert len(got) == min(max_tokens, POOL_TOKENS - len(tokens))
            assert output.num_prompt_tokens == len(tokens)
            assert output.num_cached_tokens <= len(tokens) - 1

    def teardown(self) -> None:
        self.engine.run()
        self.tokens_equal_the_oracle()
        assert set(self.engine.last) == set(self.asked)
        stats = self.engine.core.stats()
        assert stats.num_free_blocks == stats.num_blocks


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestEngineEquality = EngineMachine.TestCase


def test_a_hundred_requests_in_a_pool_for_ten_all_get_their_own_tokens() -> None:
    engine = Engine(num_blocks=60, block_size=4, max_num_seqs=32, max_num_batched_tokens=48)
    prompts = {f"r{i}": [3 + (i % 5)] * (8 + i % 13) for i in range(100)}
    engine.run(*(ask(request_id, tokens, 20) for request_id, tokens in prompts.items()))
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    for request_id, tokens in prompts.items():
        assert engine.tokens[request_id] == oracle(tokens, 20)
