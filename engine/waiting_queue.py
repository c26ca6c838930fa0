"""The sequences without blocks, and which of them is tried next.

Lower priority classes go first, strictly. Within a class: first those that were preempted or lost their fork, in
order; then, of the first `WINDOW` in order of arrival, the longest prefix hit, ties by arrival. One that has been
overtaken `MAX_OVERTAKEN` times is tried before all others of its class, and alone: so nobody of a class waits for more
than that many later ones of it. Longest prefix first is SGLang's; the bound is ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from engine.request import Request

WINDOW = 8
MAX_OVERTAKEN = 16


class WaitingQueue:
    """Owns the WAITING sequences, oldest first within each class."""

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[str, Request]] = {}  # no empty ones
        self._returned: set[str] = set()  # sequence ids of those that were put back
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Request]:
        return (request for priority in sorted(self._classes) for request in self._classes[priority].values())

    @property
    def head(self) -> Request | None:
        return next(iter(self), None)

    def add(self, request: Request) -> None:
        self._class(request)[request.sequence_id] = request
        self._num += 1

    def put_back(self, request: Request) -> None:
        """At the front of its class."""
        self.add(request)
        self._returned.add(request.sequence_id)
        self._class(request).move_to_end(request.sequence_id, last=False)

    def remove(self, request: Request) -> None:
        members = self._classes[request.priority]
        del members[request.sequence_id]
        self._returned.discard(request.sequence_id)
        self._num -= 1
        if not members:
            del self._classes[request.priority]

    def admit(self, request: Request) -> None:
        """Remove it, and count it for those of its class that came before."""
        for other in self._classes[request.priority].values():
            if other is request:
                break
            other.num_overtaken += 1
        self.remove(request)

    def candidates(self, hit_length: Callable[[Request], int]) -> list[Request]:
        """Who may be admitted next, best first."""
        members = self._classes[min(self._classes)]
        window = list(islice(members.values(), WINDOW))
        first = window[0]
        if first.sequence_id in self._returned or first.num_overtaken >= MAX_OVERTAKEN or len(window) == 1:
            return [first]
        return sorted(window, key=hit_length, reverse=True)  # stable: ties stay in order of arrival

    def _class(self, request: Request) -> OrderedDict[str, Request]:
        return self._classes.setdefault(request.priority, OrderedDict())
