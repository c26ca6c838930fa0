from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.prefill_share import Claim, divide

claims = st.lists(st.builds(Claim, st.integers(0, 2), st.integers(1, 300)), max_size=12)


def plain(*sizes: int) -> list[Claim]:
    return [Claim(0, size) for size in sizes]


def test_one_prompt_gets_all_that_it_can_use() -> None:
    assert divide(64, plain(150)) == [64]
    assert divide(64, plain(10)) == [10]
    assert (divide(64, []), divide(0, plain(5))) == ([], [0])


def test_the_oldest_gets_half_and_the_shortest_remainders_the_rest() -> None:
    assert divide(64, plain(100, 40, 10)) == [32, 22, 10]
    assert divide(63, plain(100, 99)) == [32, 31]


def test_who_is_no_shorter_than_the_oldest_waits_for_it() -> None:
    assert divide(64, plain(100, 100)) == [64, 0]
    assert divide(64, plain(40, 100, 50)) == [40, 0, 24]
    assert divide(64, [Claim(0, 100), Claim(1, 100)]) == [32, 32]


def test_what_nobody_else_takes_goes_back_to_the_oldest() -> None:
    assert divide(64, plain(100, 5, 6)) == [53, 5, 6]


def test_a_better_class_is_the_oldest_whenever_it_came_and_goes_first() -> None:
    assert divide(64, [Claim(1, 100), Claim(0, 100), Claim(1, 5)]) == [27, 32, 5]
    assert divide(64, [Claim(0, 100), Claim(1, 5), Claim(0, 40)]) == [32, 0, 32]


@given(st.integers(1, 512), claims)
def test_the_budget_is_used_up_or_everything_is_served(budget: int, made: list[Claim]) -> None:
    shares = divide(budget, made)
    assert sum(shares) == min(budget, sum(claim.num_tokens for claim in made))
    assert all(0 <= share <= claim.num_tokens for share, claim in zip(shares, made, strict=True))


@given(st.integers(2, 512), claims.filter(bool))
def test_the_oldest_of_the_best_class_always_moves_by_half_the_budget(budget: int, made: list[Claim]) -> None:
    best = min(claim.priority for claim in made)
    oldest = next(index for index, claim in enumerate(made) if claim.priority == best)
    assert divide(budget, made)[oldest] >= min(made[oldest].num_tokens, -(-budget // 2))
