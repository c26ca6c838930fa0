from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import pytest

from bench.serve import workloads
from bench.serve.workloads import BenchRequest


def digest(requests: Sequence[BenchRequest]) -> str:
    made = hashlib.sha256()
    for request in requests:
        made.update(json.dumps([request.prompt, request.output_len, repr(request.arrival)]).encode() + b"\n")
    return made.hexdigest()[:32]


@pytest.mark.parametrize(("make", "count", "expected"), [
    (workloads.mixed, 512, "78d93623e0a1e2d2a1711e7c36689834"),
    (lambda: workloads.mixed(20, 49152, 7), 20, "8d748b91e7760421fcc206f867e5707a"),
    (lambda: workloads.random(16, 64, 32), 16, "a5305a06ea7ff41cc361f595a008ea39"),
    (workloads.shared_prefix, 256, "c271c19fc700d4e8a9e7a05e826d06be"),
    (lambda: workloads.poisson(4.0), 81, "1de82dddc2d10331bc24791f0a023bfd"),
    (lambda: workloads.poisson(8.0, 5.0, 100, 20, 49152, 11), 32, "aad10c51dbcb456a7c5c6d487b9a4026"),
    (workloads.interference, 80, "b0d83fef9233704d8fe10030b1186012"),
])
def test_a_workload_is_the_same_token_for_token_as_when_the_peers_were_measured(
    make: Callable[[], list[BenchRequest]], count: int, expected: str
) -> None:
    requests = make()
    assert len(requests) == count
    assert digest(requests) == expected


def test_conversations_share_their_beginning_and_each_turn_follows_the_one_before() -> None:
    requests = workloads.multi_turn(3, 3, prefix_len=20, user_len=5, output_len=7, think_s=1.5)
    assert [request.follows for request in requests] == [None, 0, 1, None, 3, 4, None, 6, 7]
    firsts = [list(request.prompt) for request in requests if request.follows is None]
    assert all(first[:20] == firsts[0][:20] and len(first) == 25 for first in firsts)
    assert firsts[0][20:] != firsts[1][20:]
    assert all(len(r.prompt) == 5 and r.arrival == 1.5 for r in requests if r.follows is not None)
