"""The half of the coordinator's state that may be lost: what waits, and which worker plays what.

A lease ties an episode to a process that beats, not to its name. When the beats stop, the episode waits again.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from jaxagent.fleet.plan import EpisodeId, GroupId, Plan


@dataclasses.dataclass
class Worker:
    """An engine worker that joined."""

    last: float  # its newest sign of life, on the coordinator's clock
    running: dict[str, EpisodeId] = dataclasses.field(default_factory=dict)  # by lease
    step: int | None = None  # with `pinned`: whose groups it plays; None: it is empty
    free: int = 0  # places that it had when it asked last and that were not filled since
    asked_at: float = -math.inf  # when that was, or when it last said that weights come, for what it has


class Leases:
    """Waiting and running episodes.

    Args:
      needs_no_player: whether an episode is stored, or its group is gone.
      epoch: of the coordinator process; leases and worker ids of two processes differ.
    """

    def __init__(self, plan: Plan, needs_no_player: Callable[[EpisodeId], bool], epoch: int):
        self.plan = plan
        self.workers: dict[str, Worker] = {}
        self._needs_no_player, self._epoch, self._count = needs_no_player, epoch, 0
        self._waiting: dict[int, list[EpisodeId]] = {}  # heaps by step; may hold what runs or is done
        self._players: dict[EpisodeId, tuple[str, str]] = {}  # worker, lease

    def new_id(self) -> str:
        """An id that no process of this run used."""
        self._count += 1
        return f"{self._epoch}-{self._count}"

    def wait(self, episodes: Iterable[EpisodeId]) -> None:
        """Puts episodes where workers take them from."""
        for episode in episodes:
            heapq.heappush(self._waiting.setdefault(episode.group.step, []), episode)

    def waiting(self) -> list[int]:
        """Steps with an episode that nobody plays, oldest first."""
        steps = sorted(self._waiting)
        return [step for step in steps if self._has_waiting(step)]

    def give(self, name: str, step: int, places: int) -> list[tuple[str, EpisodeId]]:
        """Up to so many waiting episodes of a step, leased to a worker; a group's attempts stay together."""
        worker, leased = self.workers[name], []
        while len(leased) < places and self._has_waiting(step):
            episode = heapq.heappop(self._waiting[step])
            lease = self.new_id()
            self._start(name, worker, lease, episode)
            leased.append((lease, episode))
        return leased

    def adopt(self, name: str, lease: str, episode: EpisodeId) -> bool:
        """A worker goes on with what it plays under a lease of before. Returns whether it may.

        Whoever plays the episode since keeps it, unless the lease is of an earlier coordinator: then it was given away
        only because that one's successor knew of nobody, and the older play goes on. Else a long episode would begin
        anew at every restart of the coordinator. The same lease is the same play: its process joined again, since an
        answer was lost.
        """
        worker = self.workers[name]
        if self._needs_no_player(episode) or (
            self.plan.rule == "pinned" and worker.step not in (None, episode.group.step)
        ):
            return False
        if episode in self._players:
            other, newer = self._players[episode]
            if lease != newer and not _epoch(lease) < _epoch(newer):
                return False
            del self._players[episode]
            self._stop(self.workers[other], newer)
        self._start(name, worker, lease, episode)
        return True

    def finish(self, episode: EpisodeId) -> None:
        """An episode is stored. Whoever plays it, for all we know, learns with the next beat that it need not."""
        name, lease = self._players.pop(episode, ("", ""))
        if name:
            self._stop(self.workers[name], lease)

    def lose(self, name: str, leases: Sequence[str]) -> list[EpisodeId]:
        """Episodes that a worker no longer plays wait again. Returns them."""
        worker = self.workers[name]
        episodes = [worker.running[lease] for lease in leases]
        for lease, episode in zip(leases, episodes, strict=True):
            del self._players[episode]
            self._stop(worker, lease)
        self.wait(episodes)
        return episodes

    def remove(self, name: str) -> list[EpisodeId]:
        """A worker is gone; what it played waits again."""
        episodes = self.lose(name, list(self.workers[name].running))
        del self.workers[name]
        return episodes

    def players(self, step: int) -> list[Worker]:
        """With `pinned`: engines that play a step's groups."""
        return [worker for worker in self.workers.values() if worker.step == step]

    def running(self) -> dict[EpisodeId, str]:
        """The worker of every episode that is being played."""
        return {episode: name for episode, (name, _) in self._players.items()}

    def _has_waiting(self, step: int) -> bool:
        heap = self._waiting.get(step, [])
        while heap and (heap[0] in self._players or self._needs_no_player(heap[0])):
            heapq.heappop(heap)
        if not heap:
            self._waiting.pop(step, None)
        return bool(heap)

    def _start(self, name: str, worker: Worker, lease: str, episode: EpisodeId) -> None:
        self._players[episode] = (name, lease)
        worker.running[lease] = episode
        if self.plan.rule == "pinned":
            worker.step = episode.group.step

    def _stop(self, worker: Worker, lease: str) -> None:
        del worker.running[lease]
        worker.free += 1
        if not worker.running:
            worker.step = None


def _epoch(lease: str) -> int:
    return int(lease.partition("-")[0])


def attempts(plan: Plan, groups: Iterable[GroupId]) -> list[EpisodeId]:
    """The episodes of groups, in order."""
    return [EpisodeId(group, sample) for group in groups for sample in range(plan.attempts)]
