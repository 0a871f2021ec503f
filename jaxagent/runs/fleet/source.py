"""Where the trainer's batches come from in a run of many processes: the coordinator says which, their files say what.

Groups are put together, shaped, selected and measured by the functions of a run of one process, in an order that no
clock has made. So all metrics but those of time are equal to that run's.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxagent.algorithms.group_rewards import shaped
from jaxagent.config import ConfigError, RLConfig
from jaxagent.config.fleet import FleetConfig
from jaxagent.fleet import episodes, packing
from jaxagent.fleet.admission import Batch
from jaxagent.fleet.packing import Packed
from jaxagent.fleet.plan import EpisodeId
from jaxagent.fleet.vitals import Vitals
from jaxagent.observe.text import duration
from jaxagent.rollout.selection import Selection
from jaxagent.runs.collect import rollouts
from jaxagent.runs.fleet.lend import Lender
from jaxagent.runs.seams import Rollouts
from jaxagent.types import Episode, Group, StopReason

LONGEST_POLL_S = 10.0
TELL_EVERY_S = 30.0  # what it waits for
READERS = 8  # threads


class Link(Protocol):
    """What a source asks the coordinator: `fleet.client.Client`."""

    def batch(self, step: int, wait_s: float = 0.0) -> Batch | None:
        """What a step trains on; None: not all of it is there yet."""
        ...

    def episode(self, which: EpisodeId) -> Packed:
        """A stored episode."""
        ...

    def status(self) -> Mapping[str, Any]:
        """What the coordinator tells people."""
        ...


class Batches:
    """A source (runs/seams.py) of what engines have played.

    Args:
      rl, fleet: of the run.
      link: to the coordinator.
      folder: the ledger's, where it is to be seen from here; its episodes are read there, else over HTTP.
      signs: is told of waiting and working.
      note: prints a line.
      look: called while it waits for a step: it ends a run that was asked to end.
      lender: has this process's engine play for the step that it waits for; None: the engine does nothing then.
    """

    def __init__(
        self,
        rl: RLConfig,
        fleet: FleetConfig,
        link: Link,
        folder: pathlib.Path,
        signs: Vitals,
        note: Callable[[str], None],
        look: Callable[[int], None] = lambda step: None,
        lender: Lender | None = None,
    ):
        self._rl, self._fleet, self._link, self._folder = rl, fleet, link, folder
        self._signs, self._note, self._look, self._lender = signs, note, look, lender
        self._first = True
        self._timed_out = False
        self._before: dict[str, float] = {}  # seconds that each engine had been idle
        self._since = 0.0  # when that was

    def batch(self, step: int) -> Rollouts:
        """The groups of a step. Asked again, it gives the same ones, also in another process.

        Raises:
          ConfigError: a stored episode is damaged.
          CoordinatorGoneError: the coordinator was away for too long.
        """
        started = time.monotonic()
        found = self._wait(step, started)
        waited = time.monotonic() - started
        budget_s = self._fleet.start_s if self._first else self._fleet.hang_s  # the first one compiles
        self._first = False
        self._signs.phase(f"trains step {step}", budget_s, done=step)
        return self._rollouts(step, found, self._read(found), self._numbers(waited))

    # ---------------------------------------------------------------- waiting

    def _wait(self, step: int, started: float) -> Batch:
        if self._lender is None:
            self._signs.phase(f"waits for step {step}", self._fleet.hang_s, done=step)
            return self._poll(step, started, lambda: True)
        self._signs.phase(f"waits for step {step}", self._lender.budget_s, done=step)
        if (found := self._link.batch(step)) is not None:
            return found
        with self._lender.lent(step) as lent:
            return self._poll(step, started, lent.goes_on)

    def _poll(self, step: int, started: float, goes_on: Callable[[], bool]) -> Batch:
        """Asks until the batch is there. `goes_on` says whether that is a sign of life: what plays here may hang."""
        poll_s = min(LONGEST_POLL_S, self._fleet.hang_s / 4)
        told = started
        while (found := self._link.batch(step, poll_s)) is None:
            if goes_on():
                self._signs.tick()
            self._look(step)
            if time.monotonic() - told >= TELL_EVERY_S:
                told = time.monotonic()
                self._note(f"step {step} waits for {duration(told - started)}: {self._why()}")
        return found

    def _why(self) -> str:
        """For people: the oldest group that is not finished, and who plays."""
        status = self._link.status()
        engines = status["members"]["engine"]
        oldest = status.get("oldest_unfinished_group")
        what = f"group {oldest[2]} of step {oldest[0]} is the oldest unfinished" if oldest else "all groups are stored"
        doing = ", ".join(f"{name} {row['phase']}" for name, row in sorted(engines.items()))
        playing = status["episodes"]["playing"]
        return f"{what}; {playing} episodes are played by {len(engines)} engines" + (f" ({doing})" if doing else "")

    # ---------------------------------------------------------------- reading

    def _read(self, found: Batch) -> dict[EpisodeId, Episode]:
        """All episodes of a batch, checked."""
        seen = (self._folder / episodes.FOLDER).is_dir()

        def one(which: EpisodeId) -> Episode:
            digest = found.results[which].digest
            if seen:
                return episodes.read(self._folder, (which.group, which.sample), digest)
            packed = self._link.episode(which)
            if packed.digest != digest:
                raise ConfigError(f"{name_of(which)}: {digest} was stored, and {packed.digest} came.")
            return packing.unpack(packed, name_of(which))

        with concurrent.futures.ThreadPoolExecutor(READERS) as threads:
            return dict(zip(found.results, threads.map(one, found.results), strict=True))

    def _rollouts(
        self, step: int, found: Batch, played: Mapping[EpisodeId, Episode], numbers: dict[str, float]
    ) -> Rollouts:
        ordered = sorted((*found.groups, *found.left_out))
        begun = {}
        for group in ordered:
            attempts = [played[which] for which in sorted(played) if which.group == group]
            begun[group] = Group(attempts[0].task, attempts)
        self._complain_of_time(step, played.values())
        by_id = {group: shaped(whole, self._rl) for group, whole in begun.items()}
        chosen = Selection(
            groups=[by_id[group] for group in found.groups],
            played=[by_id[group] for group in ordered],
            rounds=1 + max(group.round for group in ordered),
        )
        rounds = [[begun[group] for group in ordered if group.round == number] for number in range(chosen.rounds)]
        return rollouts(self._rl, step, chosen, rounds, numbers)

    def _complain_of_time(self, step: int, played: Any) -> None:
        """Limits in seconds are the one leak of `pinned`."""
        late = sum(episode.stop_reason is StopReason.TIMEOUT for episode in played)
        if late and self._fleet.rule == "pinned" and not self._timed_out:
            self._timed_out = True
            self._note(
                f"step {step}: {late} episodes ended by a limit in seconds: this run is not reproducible by sampling "
                "again (it is from its ledger). Limit turns and tokens instead. Said once; stop/timeout has the rest."
            )

    # ---------------------------------------------------------------- balance

    def _numbers(self, waited_s: float) -> dict[str, float]:
        """Who waits for whom."""
        numbers = {"fleet/trainer_wait_s": waited_s, **(self._lender.numbers() if self._lender else {})}
        engines = self._link.status()["members"]["engine"]
        numbers["fleet/engines"] = float(len(engines))
        numbers["fleet/episodes_playing"] = float(sum(row["playing"] for row in engines.values()))
        may = [float(row["numbers"]["places"]) for row in engines.values() if "places" in row["numbers"]]
        if may:
            numbers["fleet/in_flight"] = sum(may) / len(may)
        now = time.monotonic()
        idle = {name: float(row["numbers"].get("idle_s", 0.0)) for name, row in engines.items()}
        known = [max(0.0, idle[name] - self._before[name]) for name in idle if name in self._before]
        if known:
            numbers["fleet/engine_idle_frac"] = min(1.0, sum(known) / (len(known) * (now - self._since)))
        self._before, self._since = idle, now
        return numbers


def name_of(which: EpisodeId) -> str:
    """For messages."""
    return episodes.name_of((which.group, which.sample))
