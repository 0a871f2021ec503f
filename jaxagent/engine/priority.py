"""Which turn is admitted next: pure functions of the queue. Fair over domains, then nearly complete groups first.

A free slot goes to the domain that holds fewest, and of several to the one that was served longest ago. A slot is held
for one turn, so a flood of one domain delays another by a turn, and with fewer slots than domains they take turns.
Inside a domain the group with the fewest unfinished episodes goes first, because a batch waits for whole groups; then
the session that was opened first.

The order says when a turn runs, never what it samples.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(eq=False)
class OpenGroup:
    """The episodes of one task that are sampled together; shared by its sessions while any of them is in use."""

    size: int
    finished: set[int] = dataclasses.field(default_factory=set)  # samples whose sessions are closed

    @property
    def unfinished(self) -> int:
        """Episodes that are still to come, the running ones included."""
        return self.size - len(self.finished)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What the order asks of a waiting turn."""

    domain: str
    unfinished: int  # of its group
    number: int  # of its session, in the order of opening


def admission_order(claims: Sequence[Claim], held: Mapping[str, int], served: Mapping[str, int]) -> list[int]:
    """The indices of waiting turns, the one to admit first in front.

    Args:
      claims: the waiting turns, in any order; session numbers differ.
      held: slots in use by domain.
      served: a clock's reading at each domain's last admission; a domain that is missing was not served lately.
    """
    queues: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)
    for i in sorted(range(len(claims)), key=lambda i: (claims[i].unfinished, claims[i].number)):
        queues[claims[i].domain].append(i)

    def entry(domain: str, slots: int, last: int) -> tuple[int, int, int, int, str]:
        first = claims[queues[domain][0]]
        return slots, last, first.unfinished, first.number, domain

    heap = [entry(domain, held.get(domain, 0), served.get(domain, -1)) for domain in queues]
    heapq.heapify(heap)
    clock = max(served.values(), default=-1)
    order: list[int] = []
    while heap:
        slots, _, _, _, domain = heapq.heappop(heap)
        order.append(queues[domain].popleft())
        clock += 1
        if queues[domain]:
            heapq.heappush(heap, entry(domain, slots + 1, clock))
    return order
