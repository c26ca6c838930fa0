from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import HashScheme

KEY = b"k" * 32
SCHEME = HashScheme(KEY, "m", "r", "float32", 4)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens)
def test_a_chain_has_one_hash_per_full_block_and_a_prefix_keeps_its_hashes(ids: list[int]) -> None:
    chain = SCHEME.chain(SCHEME.root(), ids)
    assert len(chain) == len(ids) // 4
    for n in range(len(ids) + 1):
        assert SCHEME.chain(SCHEME.root(), ids[:n]) == chain[: n // 4]


@given(tokens.filter(lambda t: len(t) >= 4), st.data())
def test_changing_one_token_changes_its_block_and_all_after(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids) // 4 * 4 - 1))
    changed = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    before, after = SCHEME.chain(SCHEME.root(), ids), SCHEME.chain(SCHEME.root(), changed)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < at // 4 for i in range(len(before))]


def test_no_two_sources_of_a_root_collide() -> None:
    roots = {
        SCHEME.root(), SCHEME.root(adapter="X"), SCHEME.root(salt="X"), SCHEME.root(salt="A"), SCHEME.root(salt="B"),
        SCHEME.root("AB", "C"), SCHEME.root("A", "BC"),
        HashScheme(KEY, "m", "r2", "float32", 4).root(), HashScheme(KEY, "mr", "", "float32", 4).root(),
        HashScheme(KEY, "m", "r", "bfloat16", 4).root(), HashScheme(KEY, "m", "r", "float32", 8).root(),
        HashScheme(b"q" * 32, "m", "r", "float32", 4).root(),
    }
    assert len(roots) == 12


def test_token_boundaries_and_parents_count() -> None:
    scheme = HashScheme(KEY, "m", "r", "float32", 2)
    root = scheme.root()
    assert scheme.extend(root, [1, 23]) != scheme.extend(root, [12, 3])
    assert scheme.extend(root, [1, 2]) != scheme.extend(scheme.root(salt="s"), [1, 2])
