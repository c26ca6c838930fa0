"""How one step's prompt tokens are divided among the prompts that can use them.

The oldest prompt of the best priority class gets up to half of the budget, and all of it when it is alone; the rest
goes to the shortest remainders first, within the better classes first; what they leave goes back to the oldest. One of
the oldest's class that is no shorter than the oldest comes after it: sharing would make both late. So a long prompt
never holds short ones back, and no stream of short ones holds a long one back by more than half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """A prompt in progress: in the order of admission, within `divide`."""

    priority: int  # lower first
    num_tokens: int  # left to plan, at least 1


def divide(budget: int, claims: Sequence[Claim]) -> list[int]:
    """Tokens for each claim; their sum is the budget, or all that is claimed."""
    shares = [0] * len(claims)
    if not claims or budget <= 0:
        return shares
    oldest = min(range(len(claims)), key=lambda i: claims[i].priority)
    if len(claims) > 1:
        shares[oldest] = min(claims[oldest].num_tokens, -(-budget // 2))
        budget -= shares[oldest]
    first = claims[oldest]
    overtaking, following = list[int](), list[int]()
    for index in sorted(range(len(claims)), key=lambda i: claims[i]):
        if index != oldest:
            waits = claims[index].priority == first.priority and claims[index].num_tokens >= first.num_tokens
            (following if waits else overtaking).append(index)
    for index in (*overtaking, oldest, *following):
        more = min(claims[index].num_tokens - shares[index], budget)
        shares[index] += more
        budget -= more
    return shares
