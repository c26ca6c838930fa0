from typing import Any

import pytest

from engine.block_manager import BlockManager
from engine.block_pool import BlockCounts, BlockPool, LedgerError
from engine.request import EngineRequest, Request
from tests.unit.engine.builders import ask, prompt, scheme

TOKENS = prompt(40)


def setup(num_blocks: int = 20, caching: bool = True) -> tuple[BlockPool, BlockManager]:
    pool = BlockPool(num_blocks)
    return pool, BlockManager(pool, scheme(4), caching)


def request(asked: EngineRequest) -> Request:
    return Request(asked, scheme(4))


def compute(blocks: BlockManager, asked: EngineRequest) -> Request:
    """Run the whole prompt and free it, as a finished request does."""
    made = request(asked)
    assert blocks.allocate(made, made.num_tokens, blocks.match(made))
    made.set_computed(made.num_tokens)
    blocks.commit(made)
    return made


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (40, 36)])
def test_a_hit_is_full_blocks_and_leaves_a_token_to_compute(num_tokens: int, hit: int) -> None:
    _, blocks = setup()
    blocks.free(compute(blocks, ask("a", TOKENS)))
    assert blocks.match(request(ask("b", TOKENS[:num_tokens]))).num_tokens == hit


def test_a_hit_stops_at_the_first_difference() -> None:
    _, blocks = setup()
    blocks.free(compute(blocks, ask("a", TOKENS)))
    other = [*TOKENS[:9], TOKENS[9] - 1, *TOKENS[10:]]
    assert blocks.match(request(ask("b", other))).num_tokens == 8


def test_a_hit_stops_at_a_hole_although_later_blocks_are_cached() -> None:
    pool, blocks = setup()
    made = compute(blocks, ask("a", TOKENS[:16]))
    pool.release([made.block_ids[1]])
    pool.clear()
    assert blocks.match(request(ask("b", TOKENS))).num_tokens == 4


def test_freeing_lets_the_end_of_a_prefix_be_evicted_before_its_start() -> None:
    pool, blocks = setup(num_blocks=4)
    blocks.free(compute(blocks, ask("a", TOKENS[:16])))
    pool.take(3)
    assert blocks.match(request(ask("b", TOKENS))).num_tokens == 4


def test_adapter_salt_and_none_never_share_blocks() -> None:
    _, blocks = setup()
    blocks.free(compute(blocks, ask("a", TOKENS[:8], adapter="X")))
    others: list[dict[str, Any]] = [
        {}, {"cache_salt": "X"}, {"adapter": "X", "cache_salt": "X"}, {"adapter": "Y"}]
    for fields in others:
        assert blocks.match(request(ask("b", TOKENS, **fields))).num_tokens == 0
    assert blocks.match(request(ask("b", TOKENS, adapter="X"))).num_tokens == 8


def test_allocation_is_all_or_nothing() -> None:
    pool, blocks = setup(num_blocks=3)
    made = request(ask("a", TOKENS))
    assert not blocks.allocate(made, 13)
    assert made.block_ids == ()
    assert pool.num_grantable == 3
    assert blocks.allocate(made, 12)
    assert len(made.block_ids) == 3


def test_hit_blocks_are_not_counted_as_room_for_new_ones() -> None:
    pool, blocks = setup(num_blocks=3)
    blocks.free(compute(blocks, ask("a", TOKENS[:8])))
    made = request(ask("b", TOKENS[:16]))
    hit = blocks.match(made)
    assert hit.num_tokens == 8
    assert not blocks.allocate(made, 16, hit)
    assert pool.counts() == BlockCounts(free=1, cached=2, requests=0)
    assert blocks.allocate(made, 12, hit)
    blocks.check([made])


def test_hashes_are_private_until_the_step_is_committed() -> None:
    _, blocks = setup()
    made = request(ask("a", TOKENS[:12]))
    blocks.allocate(made, 12)
    blocks.commit(made)
    assert blocks.match(request(ask("b", TOKENS))).num_tokens == 0
    made.set_computed(7)
    blocks.commit(made)
    assert blocks.match(request(ask("b", TOKENS))).num_tokens == 4


def test_blocks_filled_by_output_are_published_too() -> None:
    _, blocks = setup()
    made = compute(blocks, ask("a", TOKENS[:6]))
    made.token_ids.extend(TOKENS[6:13])
    blocks.allocate(made, 13)
    made.set_computed(12)
    blocks.commit(made)
    blocks.free(made)
    assert blocks.match(request(ask("next turn", TOKENS))).num_tokens == 12


def test_without_prefix_caching_nothing_is_matched_or_kept() -> None:
    pool, blocks = setup(caching=False)
    blocks.free(compute(blocks, ask("a", TOKENS)))
    assert blocks.match(request(ask("b", TOKENS))).num_tokens == 0
    assert pool.counts().cached == 0


def test_the_check_finds_a_leak_a_short_table_and_foreign_content() -> None:
    _, blocks = setup()
    made = compute(blocks, ask("a", TOKENS[:8]))
    blocks.check([made])
    assert blocks.count_leaked([]) == 2
    with pytest.raises(LedgerError, match="references"):
        blocks.check([])
    made.set_computed(9)
    with pytest.raises(LedgerError, match="9 computed tokens in 2 blocks of 4"):
        blocks.check([made])
    made.set_computed(8)
    made.block_hashes[1] = bytes(16)
    with pytest.raises(LedgerError, match="other content"):
        blocks.check([made])
