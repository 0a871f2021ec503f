"""Where the trainer's batches come from in a run of many processes: the coordinator says which, their files say what.

Groups are put together, shaped, selected and measured by the functions of a run of one process, in an order that no
clock has made. So all metrics but those of time are equal to that run's.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxagent.algorithms.streams import shaped
from jaxagent.config import ConfigError, RLConfig
from jaxagent.config.fleet import FleetConfig
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.fleet import episodes
from jaxagent.fleet.admission import Batch, Outcome
from jaxagent.fleet.client import CallError, Client
from jaxagent.fleet.plan import EpisodeId, GroupId
from jaxagent.fleet.record import WHAT_TO_DO
from jaxagent.fleet.vitals import WEIGHTS, Vitals
from jaxagent.learner import peers
from jaxagent.models import global_arrays
from jaxagent.observe.text import duration
from jaxagent.rollout.groups import Selection
from jaxagent.runs import attempts
from jaxagent.runs.attempts import Rollouts, rollouts
from jaxagent.types import Episode, Group, StopReason

LONGEST_POLL_S = 10.0
TELL_EVERY_S = 30.0  # what it waits for
READERS = 8  # threads
BACK = "Put the file back from a copy, and the same command goes on; without one, begin anew in another workdir."
MOST_IN_VAIN = 4  # readings of what is damaged here, and is not where the coordinator reads it


@dataclasses.dataclass(eq=False)
class Batches:
    """A source (runs/seams.py) of what engines have played."""

    rl: RLConfig
    fleet: FleetConfig  # of the run
    link: Client  # to the coordinator
    folder: pathlib.Path  # the ledger's, where it is to be seen from here; its episodes are read there, else over HTTP
    signs: Vitals  # is told of waiting and working
    note: Callable[[str], None]  # prints a line
    # Called while it waits for a step: it ends a run that was asked to end.
    look: Callable[[int], None] = lambda step: None
    # Why nobody can play a step's episodes any more: the weights of their version cannot be had; "": they can. Calls
    # its second argument again and again while it reads them.
    lacks: Callable[[int, Callable[[], None]], str] = lambda step, tick: ""
    # The id of a group's task; None: this process has not told it.
    task_of: Callable[[GroupId], str | None] = lambda group: None

    def __post_init__(self) -> None:
        self._first = True
        self._timed_out = False
        self._before: dict[str, float] = {}  # seconds that each engine had been idle
        self._since = 0.0  # when that was
        if peers.count() > 1:  # compiles
            global_arrays.everyones(b"", [1] * peers.count())

    def batch(self, step: int) -> Rollouts:
        """The groups of a step. Asked again, it gives the same ones, also in another process.

        A stored episode that is damaged is played again, and waited for.

        Raises:
          ConfigError: a stored episode is damaged and cannot be had again, or is another one; says why, and what to do.
          CoordinatorGoneError: the coordinator was away for too long.
        """
        started = time.monotonic()
        budget_s = self.fleet.start_s if self._first else self.fleet.hang_s  # the first one compiles
        self._first = False
        from_files, in_vain, waited = True, 0, 0.0
        while True:
            poll_began = time.monotonic()
            batch = self._wait(step, started)
            self._check_batch(step, batch)
            waited += time.monotonic() - poll_began
            self.signs.phase(f"trains step {step}", budget_s, done=step)
            episodes_read, unreadable = self._read(step, batch, from_files)
            if not unreadable:
                return self._rollouts(step, batch, episodes_read, self._numbers(waited))
            # What this process misreads may be whole: the second time the coordinator reads, and sends it.
            if not from_files and not self._played_again(step, batch, unreadable):
                in_vain += 1
                if in_vain == MOST_IN_VAIN:
                    raise ConfigError(
                        f"step {step}: the coordinator reads what this process cannot: "
                        f"{next(iter(unreadable.values()))} This machine's network, file system or memory errs: the "
                        "same command goes on, elsewhere if that happens again."
                    )
            from_files = False

    # ---------------------------------------------------------------- waiting

    def _wait(self, step: int, started: float) -> Batch:
        """Asks until the batch is there."""
        self.signs.phase(f"waits for step {step}", self.fleet.hang_s, done=step)
        poll_s = min(LONGEST_POLL_S, self.fleet.hang_s / 4)
        noted, in_vain = started, 0
        while (batch := self.link.batch(step, poll_s)) is None:
            self.signs.tick()
            self.look(step)
            if time.monotonic() - noted >= TELL_EVERY_S:
                self.note(f"step {step} waits for {duration(time.monotonic() - started)}: {self._why()}")
                in_vain = self._weights_in_vain(step, in_vain)
                noted = time.monotonic()  # afterwards, since that may read for long
        return batch

    def _weights_in_vain(self, step: int, before: int) -> int:
        """How often an engine wanted weights that nobody has. They are looked for only where one waits for some.

        Raises:
          ConfigError: it was the second time.
        """
        phases = [row["phase"] for row in self.link.status()["members"]["engine"].values()]
        if WEIGHTS not in phases:  # between two tries it waits for a place
            return before
        if not (why := self.lacks(step, self.signs.tick)):
            return 0
        if before:
            raise ConfigError(f"step {step} waits for episodes that nobody can play under their version: {why} {BACK}")
        return 1

    def _why(self) -> str:
        """For people: the oldest group that is not finished, and who plays."""
        status = self.link.status()
        engines = status["members"]["engine"]
        oldest = status.get("oldest_unfinished_group")
        what = f"group {oldest[2]} of step {oldest[0]} is the oldest unfinished" if oldest else "all groups are stored"
        doing = ", ".join(f"{name} {row['phase']}" for name, row in sorted(engines.items()))
        playing = status["episodes"]["playing"]
        damaged = status["episodes"]["damaged"]
        again = f"; {damaged} damaged episodes are to be played again" if damaged else ""
        what += f"{again}; {playing} episodes are played by {len(engines)} engines"
        return what + (f" ({doing})" if doing else "")

    def _check_batch(self, step: int, batch: Batch) -> None:
        """Raises CallError where it is none of this run's: it is asked for again when the process has started again."""
        groups, group_count = (*batch.groups, *batch.left_out), self.rl.tasks_per_step
        attempts = range(self.rl.group_size)
        count = len(batch.groups) == group_count or (len(batch.groups) < group_count and self.rl.refill is not None)
        own = batch.step == step and (self.fleet.window > 1 or all(group.step == step for group in groups))
        complete = batch.results.keys() == {EpisodeId(group, sample) for group in groups for sample in attempts}
        if not (count and own and complete and len(set(groups)) == len(groups)):
            raise CallError(
                f"step {step}: the coordinator has sent a batch of step {batch.step} with {len(set(batch.groups))} of "
                f"{group_count} groups and {len(batch.results)} episodes, none of this run's: its code or memory errs."
            )

    # ---------------------------------------------------------------- reading

    def _read(self, step: int, batch: Batch, from_files: bool) -> tuple[dict[EpisodeId, Episode], dict[EpisodeId, str]]:
        """All episodes of a batch, checked; and of those that cannot be read, why. The same in all trainer processes.

        Each of them reads its part, and has the others' from the other processes.

        Args:
          from_files: the files may be read, where they are to be seen; else the coordinator does that.
        """
        in_folder = from_files and (self.folder / episodes.FOLDER).is_dir()
        unreadable: dict[EpisodeId, str] = {}

        def read_episode(which: EpisodeId) -> Episode | None:
            digest = batch.results[which].digest
            try:
                if in_folder:
                    return episodes.read(self.folder, which, digest)
                packed = self.link.episode(which)
                where = str(episodes.path_of(self.folder / episodes.FOLDER, which, digest))
                return codec.unpack(Packed(digest, packed.body), where)
            except (ConfigError, CallError) as error:
                unreadable[which] = str(error)
                return None

        ordered, rank, count = sorted(batch.results), peers.index(), peers.count()
        own = ordered[rank::count]
        with concurrent.futures.ThreadPoolExecutor(READERS) as threads:
            read = {
                which: episode
                for which, episode in zip(own, threads.map(read_episode, own), strict=True)
                if episode is not None
            }
        if count > 1:
            data = codec.to_columns(list(read.values()))
            reasons = {ordered.index(which): why for which, why in unreadable.items()}
            mark = _sha256("".join(batch.results[which].digest for which in ordered).encode())
            parts = peers.meet(f"the episodes of step {step}, {mark[:8]}", [len(data), _sha256(data), reasons])
            everything = global_arrays.everyones(data, [size for size, *_ in parts])
            for other, (_, digest, reasons) in enumerate(parts):
                unreadable |= {ordered[int(number)]: why for number, why in reasons.items()}
                if _sha256(everything[other]) != digest:
                    raise peers.PeerError(f"What process {other} has read for step {step} came in damaged.")
                if other != rank:
                    readable = [which for which in ordered[other::count] if which not in unreadable]
                    read |= zip(readable, codec.of_columns(everything[other]), strict=True)
        return {which: read[which] for which in batch.results if which in read}, unreadable

    def _played_again(self, step: int, batch: Batch, unreadable: Mapping[EpisodeId, str]) -> bool:
        """Has the coordinator have damaged episodes played again. False: it finds none of them damaged.

        Raises:
          ConfigError: one cannot be had again.
        """
        any_again = False
        lacks = dict[int, str]()  # by step: to know it, all weights of its version may be read
        for which, why in sorted(unreadable.items()):
            damage = f"step {step}: {episodes.name_of(which)} is damaged on disk ({why.rstrip('.')})"
            if which.group.step not in lacks:
                lacks[which.group.step] = self.lacks(which.group.step, self.signs.tick)
            if why := lacks[which.group.step]:
                raise ConfigError(f"{damage}. It cannot be played again under its version: {why} {WHAT_TO_DO}")
            answer = self.link.damaged(which, batch.results[which].digest)
            if answer.outcome is Outcome.REFUSED:
                raise ConfigError(f"{damage}. It cannot be had again: {answer.reason}")
            if answer.outcome is Outcome.STORED:
                self.note(f"{damage}: it is played again, and the step waits for that.")
            any_again |= answer.outcome in (Outcome.STORED, Outcome.DUPLICATE)
        return any_again

    def _rollouts(
        self, step: int, batch: Batch, episodes_read: Mapping[EpisodeId, Episode], numbers: dict[str, float]
    ) -> Rollouts:
        ordered = sorted((*batch.groups, *batch.left_out))
        begun = {}
        for group in ordered:
            of_group = {which: episodes_read[which] for which in sorted(episodes_read) if which.group == group}
            self._check_whose(step, of_group)
            own = list(of_group.values())
            begun[group] = Group(own[0].task, own)
        self._complain_of_time(step, episodes_read.values())
        by_id = {group: shaped(full_group, self.rl) for group, full_group in begun.items()}
        chosen = Selection(
            groups=[by_id[group] for group in batch.groups],
            sampled=[by_id[group] for group in ordered],
            rounds=1 + max(group.round for group in ordered),
        )
        rounds = [[begun[group] for group in ordered if group.round == number] for number in range(chosen.rounds)]
        return rollouts(self.rl, step, chosen, rounds, numbers)

    def _check_whose(self, step: int, of_group: Mapping[EpisodeId, Episode]) -> None:
        """Raises ConfigError where an episode of a group is another one, whatever was said when it was handed in."""
        first_task = next(iter(of_group.values())).task.id
        for which, episode in of_group.items():
            task = self.task_of(which.group) or first_task
            if episode.task.id != task or not self._numbers_fit(which, episode.sample):
                raise ConfigError(
                    f"step {step}: what is stored as {episodes.name_of(which)}, of task {task!r}, is attempt "
                    f"{episode.sample} of the run, at task {episode.task.id!r}: a process has handed in another "
                    "episode's result. The run cannot go on from here: begin anew in another workdir."
                )

    def _numbers_fit(self, which: EpisodeId, number: int) -> bool:
        """Whether an attempt's number in the run can be the episode's, however many steps sampled before the stage.

        One that failed before it began is numbered within its group.
        """
        begin = attempts.first(self.rl, which.group.step, which.group.round, 0) + which.sample
        of_a_step = attempts.first(self.rl, 1, 0, 0)
        return number == which.sample or (number - begin) % of_a_step == 0

    def _complain_of_time(self, step: int, episodes_read: Any) -> None:
        """Limits in seconds are the one leak of `pinned`."""
        late = sum(episode.stop_reason is StopReason.TIMEOUT for episode in episodes_read)
        if late and self.fleet.rule == "pinned" and not self._timed_out:
            self._timed_out = True
            self.note(
                f"step {step}: {late} episodes ended by a limit in seconds: this run is not reproducible by sampling "
                "again (it is from its ledger). Limit turns and tokens instead. Said once; stop/timeout has the rest."
            )

    # ---------------------------------------------------------------- balance

    def _numbers(self, waited_s: float) -> dict[str, float]:
        """Who waits for whom."""
        numbers = {"fleet/trainer_wait_s": waited_s}
        status = self.link.status()
        engines = status["members"]["engine"]
        numbers["fleet/damaged_episodes"] = float(status["episodes"]["found_damaged"])
        numbers["fleet/engines"] = float(len(engines))
        numbers["fleet/episodes_playing"] = float(sum(row["playing"] for row in engines.values()))
        now = time.monotonic()
        idle = {name: float(row["numbers"].get("idle_s", 0.0)) for name, row in engines.items()}
        idle_growth = [max(0.0, idle[name] - self._before[name]) for name in idle if name in self._before]
        if idle_growth:
            numbers["fleet/engine_idle_frac"] = min(1.0, sum(idle_growth) / (len(idle_growth) * (now - self._since)))
        self._before, self._since = idle, now
        return numbers


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
