"""Attention of one new token per sequence against plain torch, the cache it writes included."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import kernels.decode_attention as subject
from kernels.block_strips import strips_of
from kernels.decode_attention import DecodeChoice, DecodeWorkspace, decode_attention, plan_units, reference
from kernels.rope_write import reference as rope_reference
from tests.kernel_mode import DEVICE, DTYPES, LIMITS, ON_GPU, relative_error, rotary


@dataclass
class Case:
    """Sequences with blocks of their own in a pool of which everything else must stay."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    lens: list[int]
    dtype: torch.dtype
    has_norms: bool = True
    layer: int = 1
    num_blocks: int = 0  # of the pool; 0: a few more than needed
    choice: DecodeChoice = field(default_factory=DecodeChoice)

    def __post_init__(self) -> None:
        most = max(-(-length // self.block_size) for length in self.lens) + 1
        num = len(self.lens)
        size = self.num_blocks or num * most + 3
        self.pool = torch.zeros(
            size, 3, 2, self.num_kv_heads, self.block_size, self.head_dim, dtype=self.dtype, device=DEVICE)
        self.rows = torch.randperm(num + 2, device=DEVICE)[:num].to(torch.int32)
        self.tables = torch.zeros(num + 2, most, dtype=torch.int32, device=DEVICE)
        ids = torch.randperm(size, device=DEVICE)[: num * most] if not self.num_blocks else torch.arange(
            size - num * most, size, device=DEVICE)
        self.tables[self.rows.long()] = ids.view(num, most).to(torch.int32)
        self.pool[ids] = torch.randn(len(ids), *self.pool.shape[1:], device=DEVICE).to(self.dtype)
        self.qkv = torch.randn(num, self.num_heads + 2 * self.num_kv_heads, self.head_dim, device=DEVICE).to(self.dtype)
        self.norms = (torch.rand(self.num_heads + self.num_kv_heads, self.head_dim, device=DEVICE) + 0.5).to(
            self.dtype) if self.has_norms else None
        self.cos, self.sin = rotary(max(self.lens) + 1, self.head_dim)
        self.context_lens = torch.tensor(self.lens, dtype=torch.int32, device=DEVICE)

    def check(self, max_seqs: int = 0, launches: int = 1) -> DecodeWorkspace:
        live = self.context_lens > 0
        positions = (self.context_lens.long() - 1).clamp(min=0)
        q, k, v = rope_reference(self.qkv, self.norms, 1e-6, self.cos, self.sin, positions, self.num_kv_heads)
        tables = self.tables[self.rows.long()]
        blocks = tables.gather(1, (positions // self.block_size)[:, None])[:, 0].long()[live]
        places = (positions % self.block_size)[live]
        before = self.pool.clone() if not self.num_blocks else None
        found = torch.full((len(self.lens), self.num_heads, self.head_dim), float("nan"), dtype=self.dtype,
                           device=DEVICE)
        workspace = DecodeWorkspace.make(
            max_seqs or len(self.lens), self.num_heads, self.num_kv_heads, self.head_dim, DEVICE,
            self.choice)
        scale = self.head_dim**-0.5
        for _ in range(launches):
            plan_units(self.context_lens, self.block_size, workspace)
            qkv = self.qkv.clone()
            decode_attention(
                qkv, self.norms, 1e-6, self.cos, self.sin, self.pool, strips_of(self.pool), self.layer, self.tables,
                self.rows, self.context_lens, scale, workspace, found)
        limit = LIMITS[self.dtype]
        assert relative_error(self.pool[blocks, self.layer, 0, :, places], k[live]) < limit
        assert torch.equal(self.pool[blocks, self.layer, 1, :, places], v[live])
        lens = torch.where(live, self.context_lens, 1)
        expected = reference(q, self.pool[:, self.layer], tables, lens, scale)
        assert relative_error(found[live], expected[live]) < limit
        assert found[~live].isnan().all(), "padding is written"
        assert not workspace.arrived.any(), "the counters of a launch are not zero for the next"
        if before is not None:
            for part in (self.pool, before):
                part[blocks, self.layer, :, :, places] = 0
            assert torch.equal(self.pool, before), "something else is written"
        return workspace


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (2, 1), (9, 3), (4, 1), (14, 2), (8, 1)])
def test_every_group_size_attends_as_the_reference(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    if not ON_GPU and dtype == torch.float16 and num_heads != 9:
        pytest.skip("one group in float16 says it for all in the interpreter")
    Case(num_heads, num_kv_heads, 64, 16, [33, 0, 7], dtype).check()


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 64), *([(64, 64), (128, 16)] if ON_GPU else [])])
def test_contexts_that_end_at_and_beside_a_blocks_end(head_dim: int, block_size: int) -> None:
    lens = [block_size - 1, block_size, block_size + 1, 1]
    Case(2, 1, head_dim, block_size, lens, DTYPES[0]).check()


def test_without_head_norms() -> None:
    Case(2, 1, 64, 16, [20, 3], DTYPES[1], has_norms=False).check()


def test_units_of_several_blocks_are_merged_and_a_second_launch_gives_the_same(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "target_units", lambda num_seqs: 4)
    workspace = Case(2, 1, 64, 16, [5 * 16 + 5, 17], DTYPES[1]).check(launches=2)
    assert workspace.blocks_per_unit.item() == 2
    assert workspace.first_units.tolist() == [0, 3, 4]


@pytest.mark.parametrize("choice", [
    DecodeChoice(units_per_seq=2.0),
    *([DecodeChoice(8, 3), DecodeChoice(2, 2, 1.5)] if ON_GPU else [])])
def test_every_choice_gives_the_same(choice: DecodeChoice) -> None:
    Case(2, 1, 64, 16, [5, 0, 40], DTYPES[1], choice=choice).check(launches=2)
    if ON_GPU:
        lens = torch.randint(1, 1300, (130,)).tolist()
        Case(32, 8, 128, 64, lens, torch.bfloat16, choice=choice).check(launches=2)


@pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"),
                         [(32, 8, 128, 64), (16, 8, 128, 64), (9, 3, 64, 16), (14, 2, 64, 64)])
@pytest.mark.parametrize("num_seqs", [1, 5, 64, 130, 256])
def test_batches_of_real_shapes(
    num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    lens = (torch.randint(1, 700, (num_seqs,))).tolist()
    lens[num_seqs // 2] = 0 if num_seqs > 1 else 1500
    Case(num_heads, num_kv_heads, head_dim, block_size, lens, dtype).check(max_seqs=256, launches=3)


@pytest.mark.skipif(not ON_GPU, reason="needs 9 GB")
def test_the_last_blocks_of_a_pool_beyond_32_bit_offsets() -> None:
    per_block = 3 * 2 * 8 * 64 * 128
    Case(32, 8, 128, 64, [200, 65], torch.bfloat16, num_blocks=2**32 // per_block + 9).check()
