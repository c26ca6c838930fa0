from __future__ import annotations

from engine.request import Request
from engine.waiting_queue import MAX_OVERTAKEN, WINDOW, WaitingQueue
from tests.unit.engine.builders import Engine, ask, prompt, scheme


def waiting(queue: WaitingQueue, name: str, priority: int = 0) -> Request:
    request = Request(ask(name, prompt(4), priority=priority), scheme())
    queue.add(request)
    return request


def best(queue: WaitingQueue, hits: dict[str, int]) -> list[str]:
    return [request.request_id for request in queue.candidates(lambda request: hits.get(request.request_id, 0))]


def test_the_longest_hit_goes_first_and_ties_by_arrival() -> None:
    queue = WaitingQueue()
    for name in "abcd":
        waiting(queue, name)
    assert best(queue, {"c": 32, "d": 16}) == ["c", "d", "a", "b"]


def test_a_lower_class_waits_for_the_better_one() -> None:
    queue = WaitingQueue()
    waiting(queue, "a", priority=1)
    urgent = waiting(queue, "b", priority=-1)
    assert best(queue, {"a": 99}) == ["b"]
    assert [request.request_id for request in queue] == ["b", "a"]
    queue.admit(urgent)
    assert best(queue, {}) == ["a"]
    assert len(queue) == 1


def test_nobody_is_overtaken_more_often_than_the_bound() -> None:
    queue = WaitingQueue()
    waiting(queue, "unlucky")
    for index in range(MAX_OVERTAKEN):
        lucky = waiting(queue, f"r{index}")
        assert best(queue, {lucky.request_id: 16})[0] == lucky.request_id
        queue.admit(lucky)
    waiting(queue, "late")
    assert best(queue, {"late": 16}) == ["unlucky"]


def test_only_the_first_of_a_long_queue_are_looked_at() -> None:
    queue = WaitingQueue()
    for index in range(WINDOW + 1):
        waiting(queue, f"r{index}")
    assert best(queue, {f"r{WINDOW}": 99})[0] == "r0"


def test_one_that_was_preempted_is_alone_at_the_front() -> None:
    queue = WaitingQueue()
    for name in "ab":
        waiting(queue, name)
    victim = Request(ask("v", prompt(4)), scheme())
    victim.num_preemptions = 1
    queue.put_back(victim)
    assert best(queue, {"a": 99}) == ["v"]


def test_those_that_lost_their_fork_come_first_and_in_order_as_well() -> None:
    queue = WaitingQueue()
    for name in "ab":
        waiting(queue, name)
    for name in "wv":
        queue.put_back(Request(ask(name, prompt(4)), scheme()))
    for name in "vw":
        assert best(queue, {"a": 99, "w": 16}) == [name]
        queue.admit(next(iter(queue)))
    assert best(queue, {"b": 16}) == ["b", "a"]


def test_whole_engine_a_stream_of_hits_delays_a_miss_by_a_bounded_number() -> None:
    engine = Engine(max_num_seqs=1)
    engine.run(ask("warm", prompt(48), max_tokens=1))
    engine.add(ask("runs", prompt(48), max_tokens=1))
    engine.add(ask("miss", prompt(40, first=9), max_tokens=1))
    for index in range(4 * MAX_OVERTAKEN):
        engine.add(ask(f"hit{index}", prompt(48), max_tokens=1))
    engine.run()
    order = list(engine.last)
    assert order.index("miss") == 2 + MAX_OVERTAKEN
