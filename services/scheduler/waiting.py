"""Requests that wait for admission, and the policies that order them."""

from collections.abc import Callable, Iterator
from itertools import islice

from services.scheduler.radix_tree import RadixTree
from services.scheduler.request import Request

OrderKey = Callable[[Request, int], tuple[int, ...]]
"""(request, now_ms) -> sort key, smallest first. Ties keep the order of arrival."""


def fcfs(request: Request, now_ms: int) -> tuple[int, ...]:
    """First come, first served. Whoever has been served before (and was retracted, or lost its worker) comes before all."""
    return (request.admitted_ms is None,)


def priority(request: Request, now_ms: int) -> tuple[int, ...]:
    """Higher priority first, then first come, first served."""
    return (-request.submit.priority, request.admitted_ms is None)


def longest_prefix_match(aging_ms: int) -> OrderKey:
    """Higher priority first, then the longest cached prefix: it is the cheapest work, and using it now keeps it cached.

    After `aging_ms` in the queue a request goes before all younger ones, so that none starves.
    """

    def key(request: Request, now_ms: int) -> tuple[int, ...]:
        is_aged = now_ms - request.arrived_ms >= aging_ms
        return (
            -request.submit.priority,
            request.admitted_ms is None,
            not is_aged,
            0 if is_aged else -request.match_len,
        )

    return key


def order_key(policy: str, aging_ms: int) -> OrderKey:
    """The policy named in the configuration. Raises KeyError for an unknown one."""
    return {"lpm": longest_prefix_match(aging_ms), "fcfs": fcfs, "priority": priority}[policy]


class WaitingQueue:
    """Waiting requests by id, in order of arrival; candidates for admission in the policy's order.

    Only the first `window` requests compete (a long queue is served in order of arrival), and only a few match lengths are
    looked up again per step: they are estimates, and the scheduler's time is bounded.
    """

    WINDOW = 64
    MAX_LOOKUPS = 8

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        assert request.placement is None
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request

    def add_first(self, request: Request) -> None:
        """For a retracted request: it came before all that still wait."""
        self._requests = {request.request_id: request} | self._requests

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def candidates(self, tree: RadixTree, now_ms: int) -> list[Request]:
        """The requests that compete for admission now, best first."""
        window = list(islice(self._requests.values(), self.WINDOW))
        stale = (request for request in window if request.match_version != tree.version)
        for request in islice(stale, self.MAX_LOOKUPS):
            request.match_len = tree.match_len(request.submit.namespace, request.tokens.view(), request.cacheable_limit)
            request.match_version = tree.version
        return sorted(window, key=lambda request: self._key(request, now_ms))
