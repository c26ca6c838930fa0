from __future__ import annotations

from kvstore_svc.chain_index import Block, ChainIndex, Tier
from kvstore_svc.slab_allocator import Slot


def block(name: str, parent: str = "root") -> Block:
    return Block(name.encode(), parent.encode(), 64, 0)


def placed(index: ChainIndex, *names: str, tier: Tier = Tier.DRAM) -> list[Block]:
    """A chain from the root, used once."""
    blocks = [block(name, parent) for name, parent in zip(names, ("root", *names), strict=False)]
    for number, each in enumerate(blocks):
        index.place(each, tier, Slot(0, number))
    index.touch(blocks)
    return blocks


def drain(index: ChainIndex, tier: Tier) -> list[str]:
    order = []
    while (victim := index.victim(tier)) is not None:
        index.displace(victim, tier)
        order.append(victim.key.decode())
    return order


def test_the_least_recent_chain_goes_first_and_each_leaf_before_its_parent() -> None:
    index = ChainIndex()
    first = placed(index, "a1", "a2", "a3")
    placed(index, "b1", "b2")
    index.touch(first[:2])
    assert drain(index, Tier.DRAM) == ["a3", "b2", "b1", "a2", "a1"]
    assert not list(index)


def test_using_a_chain_from_its_middle_uses_its_ancestors() -> None:
    index = ChainIndex()
    first = placed(index, "a1", "a2", "a3")
    placed(index, "b1")
    index.touch(first[2:])
    assert drain(index, Tier.DRAM) == ["b1", "a3", "a2", "a1"]


def test_the_order_itself_has_children_before_parents_so_that_a_victim_is_found_at_once() -> None:
    index = ChainIndex()
    chain = placed(index, "a1", "a2", "a3")
    index.touch(chain[1:])
    assert [each.key for each in index.oldest_first()] == [b"a3", b"a2", b"a1"]


def test_a_pinned_leaf_keeps_its_whole_chain() -> None:
    index = ChainIndex()
    chain = placed(index, "a1", "a2")
    chain[1].num_pins = 1
    assert index.victim(Tier.DRAM) is None
    chain[1].num_pins = 0
    assert index.victim(Tier.DRAM) is chain[1]


def test_a_parent_leaves_the_store_after_a_child_that_is_only_on_the_other_tier() -> None:
    index = ChainIndex()
    (parent,) = placed(index, "a1")
    child = block("a2", "a1")
    index.place(child, Tier.SSD, Slot(0, 0))
    assert index.victim(Tier.DRAM) is None
    assert index.victim(Tier.DRAM, may_move=True) is parent
    index.place(parent, Tier.SSD, Slot(0, 1))
    assert index.victim(Tier.DRAM) is parent
    assert index.victim(Tier.SSD) is child


def test_a_present_prefix_ends_at_the_first_hole() -> None:
    index = ChainIndex()
    chain = placed(index, "a1", "a2", "a3")
    index.displace(chain[1], Tier.DRAM)
    assert index.prefix([b"a1", b"a2", b"a3"]) == chain[:1]
    assert index.prefix([b"a3"]) == chain[2:]


def test_without_history_children_come_before_parents_in_any_order_of_finding() -> None:
    for names in (["a1", "a2", "a3", "b1"], ["a3", "b1", "a1", "a2"]):
        index = ChainIndex()
        for number, name in enumerate(names):
            parent = "root" if name[1] == "1" else f"{name[0]}{int(name[1]) - 1}"
            index.place(block(name, parent), Tier.SSD, Slot(0, number))
        index.settle()
        order = drain(index, Tier.SSD)
        assert order.index("a3") < order.index("a2") < order.index("a1")
