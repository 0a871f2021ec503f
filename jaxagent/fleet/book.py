"""What a coordinator has on disk: its rules (admission.py) with their ledger, tasks of steps, episodes as files.

    book = Book(folder, plan)
    answer = book.publish(0, digest, lineage, tasks)
    book.flush().result()                          # now it may be told

Every method that changes something only asks for its lines to be written; an answer leaves when the future that
`flush` returns is done. The ledger has the coordinator's events (events.py) and three kinds of lines beside them:

    run        the first line: the run's id and its rules
    assigned   a version's lineage, and a digest of the tasks that came with it; before its `published`
    tasks      the tasks of a step; before the `assigned` that names it
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import pathlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.fleet import episodes, events, segments, wire
from jaxagent.fleet.admission import Answer, Batch, Coordinator, Outcome
from jaxagent.fleet.episodes import DamagedEpisodeError, EpisodeFiles, Key
from jaxagent.fleet.ledger import Ledger
from jaxagent.fleet.plan import EpisodeId, GroupId, Plan
from jaxagent.fleet.wire import Job, Rounds, Tasks
from jaxagent.types import Episode

FREE = ("steps", "lease_s", "domains")  # of a plan: may be others when a run goes on; the last is of older code
OPEN_S = 60.0  # for the first line
LEAST_DEAD, DEAD_PART = 1000, 0.3  # forgotten lines from which the ledger is compacted; and of all its lines


class Book:
    """An open coordinator. Its own thread is the only one that may use it, but for `files` and `read`.

    Args:
      folder: for ledger and episodes; made where there is none.
      exact: see `Coordinator`.

    Attributes:
      run: the run's id, made with its ledger.
      epoch: of this process.
      files: of the episodes. A result that `rules.expected` wants is put there, and then told by `rules.put`.
      notes: for people: what was found.
      damage: episodes whose files were gone when it was opened and that are played again, what is wrong with each, and
        what came of it.

    Raises:
      ConfigError: the ledger is damaged, or is another run's, or the run has trained more steps than it is given.
      OSError: the disk is full, or failed.
    """

    def __init__(self, folder: pathlib.Path, plan: Plan, exact: bool = True):
        folder.mkdir(parents=True, exist_ok=True)
        self.plan, self._folder = plan, folder
        if not segments.names(folder / segments.FOLDER):
            _must_be_new(folder)
        self._ledger = Ledger(folder)
        try:
            self.epoch, self.notes = self._ledger.epoch, list(self._ledger.notes)
            self._assigned: dict[int, dict[str, str]] = {}  # by version: its lineage, and the digest of its tasks
            self._tasks: dict[int, Rounds] = {}  # by step, not forgotten
            self.run, past = "", list[events.Event]()
            self._lines = self._dead = 0  # of the ledger, about; and those of what is forgotten
            for line in self._ledger.recovered():
                self._lines += 1
                self._read(folder, line, past)
            if not self.run:
                self.run = secrets.token_hex(8)
                rules = dataclasses.asdict(plan)
                try:
                    self._ledger.append([{"kind": "run", "run": self.run, "plan": rules}]).result(OPEN_S)
                except TimeoutError:
                    raise OSError(f"its first line was not on disk after {OPEN_S:g} s: the disk hangs.") from None
            self.rules = Coordinator(plan, "", self.epoch, past, exact)
            self._check_steps(folder)
            self._forget_tasks()
            # Steps beyond the end that the run had when their versions were published.
            groups = filter(self.rules.record.is_needed, self.rules.record.groups)
            self._without_tasks = {group.step for group in groups} - self._tasks.keys()
            records = self.rules.record.groups.items()
            digests: dict[Key, str] = {
                EpisodeId(group, sample): result.digest
                for group, record in records
                for sample, result in record.results.items()
            }
            self._dead = sum(isinstance(event, events.EpisodeStored) for event in past) - len(digests)
            self.files = EpisodeFiles(folder, digests)
            self.damage: list[tuple[EpisodeId, str, Answer]] = []
            self._look_for_damaged(digests)
        except BaseException:
            self._ledger.close()
            raise
        if past:
            self.notes.append(f"{len(past)} events were read; version {self.rules.record.published} is the newest.")
        if self.files.removed:
            self.notes.append(f"{len(self.files.removed)} episode files that no line names were removed.")

    def close(self) -> None:
        """Writes what waits."""
        self._ledger.close()

    def check_fence(self) -> None:
        """Raises FencedError: another process has taken the folder over. For any thread."""
        self._ledger.check_fence()

    def flush(self, lines: Iterable[Mapping[str, Any]] = ()) -> concurrent.futures.Future[None]:
        """Asks for what happened so far to be written, and these lines before it. The future: see `Ledger.append`."""
        lines = [*lines, *map(events.to_line, self.rules.take_events())]
        self._lines += len(lines)
        return self._ledger.append(lines)

    # ---------------------------------------------------------------- workers

    def take(self, now: float, name: str, places: int, holding: Sequence[str]) -> list[Job]:
        """Episodes for a worker, with their tasks: none before the tasks of all that is admitted are known."""
        if self._without_tasks:
            self.rules.beat(now, name, holding)
            return []
        taken = [(work, work.episode.group) for work in self.rules.take(now, name, places, holding)]
        return [Job(work, self._tasks[group.step][group.round][group.number]) for work, group in taken]

    def read(self, group: GroupId) -> list[Episode]:
        """The stored attempts of a group, in order. For any thread.

        Raises:
          DamagedEpisodeError: names the file.
        """
        results = self.rules.record.groups[group].results
        return [
            episodes.read(self._folder, (group, sample), results[sample].digest) for sample in range(self.plan.attempts)
        ]

    def why_damaged(self, episode: EpisodeId) -> str:
        """What is wrong with a stored result's file; "" where it is whole, or not stored. For any thread."""
        if (digest := self.digest(episode)) is not None:
            try:
                episodes.read(self._folder, episode, digest)
            except DamagedEpisodeError as error:
                return str(error)
        return ""

    # ---------------------------------------------------------------- the trainer

    def publish(self, version: int, digest: str, lineage: str, tasks: Tasks) -> Answer:
        """A version exists; its tasks are those of the steps that it admits.

        Published again, by a trainer that replays, it must be the same in everything. In a run that was given more
        steps it also brings the tasks of those that were beyond the former end.
        """
        assignment = {"lineage": lineage, "tasks": _digest(tasks)}
        if refusal := self._wrong_tasks(version, tasks):
            return Answer(Outcome.REFUSED, refusal)
        assigned = self._assigned.get(version)
        answer = self.rules.publish(version, digest)
        if answer.outcome is Outcome.DUPLICATE:
            other_lineage = assigned is None or assigned["lineage"] != lineage
            if other_lineage or any(self._tasks.get(step, rounds) != rounds for step, rounds in tasks.items()):
                what = "lineage" if other_lineage else "tasks"
                reason = f"version {version} was published with another {what}; the weights are equal."
                self.rules.conflicts.append(reason)
                answer = Answer(Outcome.CONFLICT, reason)
        if answer.outcome not in (Outcome.STORED, Outcome.DUPLICATE):
            return answer
        first_step = self.rules.record.kept
        new = {step: rounds for step, rounds in sorted(tasks.items()) if step >= first_step and step not in self._tasks}
        self._tasks |= new
        self._without_tasks -= new.keys()
        lines = [{"kind": "tasks", "step": step, "rounds": wire.rounds_to(rounds)} for step, rounds in new.items()]
        if answer.outcome is Outcome.STORED:
            self._assigned[version] = assignment
            lines.append({"kind": "assigned", "version": version, **assignment})
        self.flush(lines)
        return answer

    def keep(self, step: int) -> tuple[Answer, list[tuple[Key, str]]]:
        """What is before a step is saved. Returns the answer, and the results to `forget` once this is written.

        A death in between leaves files that nobody knows, which the next opening removes.
        """
        record = self.rules.record
        trained = [record.batches[earlier] for earlier in range(record.kept, step) if earlier in record.batches]
        digests: list[tuple[Key, str]] = [
            (EpisodeId(group, sample), result.digest)
            for batch in trained
            for group in (*batch.groups, *batch.left_out)
            for sample, result in record.groups[group].results.items()
        ]
        answer = self.rules.keep(step)
        if answer.outcome is not Outcome.STORED:
            return answer, []
        self._forget_tasks()
        self._dead += len(digests)
        return answer, digests

    def compact(self) -> concurrent.futures.Future[int] | None:
        """Drops the ledger's lines of what is forgotten; None: too few of them are, since this reads all lines."""
        if self._dead < max(LEAST_DEAD, self._lines * DEAD_PART):
            return None
        self._lines, self._dead = self._lines - self._dead, 0
        groups, steps = frozenset(self.rules.record.groups), frozenset(self._tasks)

        def is_live(line: Mapping[str, Any]) -> bool:
            if line["kind"] == "stored":
                return GroupId(*line["group"]) in groups
            return line["kind"] != "tasks" or line["step"] in steps

        return self._ledger.compact(is_live)

    def batch(self, step: int) -> Batch | None:
        """What a step trains on; None: not all of it is there yet."""
        return self.rules.batch(step)

    def lineage(self, version: int) -> str:
        """The lineage of a published version."""
        return self._assigned[version]["lineage"]

    def digest(self, episode: EpisodeId) -> str | None:
        """The digest of a stored result; None: it is not stored, or forgotten."""
        group = self.rules.record.groups.get(episode.group)
        result = group.results.get(episode.sample) if group is not None else None
        return result.digest if result is not None else None

    def task(self, group: GroupId) -> str | None:
        """The id of a group's task; None: it is not known, or not any more."""
        rounds = self._tasks.get(group.step, ())
        if group.round >= len(rounds) or group.number >= len(rounds[group.round]):
            return None
        return rounds[group.round][group.number].id

    def path(self, episode: EpisodeId, digest: str) -> pathlib.Path:
        """Where a stored result's file lies."""
        return episodes.path_of(self._folder / episodes.FOLDER, episode, digest)

    # ---------------------------------------------------------------- inside

    def _read(self, folder: pathlib.Path, line: dict[str, Any], past: list[events.Event]) -> None:
        kind = line.get("kind")
        if kind == "run":
            self.run = line["run"]
            self._compare(folder, line["plan"])
        elif kind == "assigned":
            self._assigned[line["version"]] = {name: line[name] for name in ("lineage", "tasks")}
        elif kind == "tasks":
            self._tasks[line["step"]] = wire.rounds_of(line["rounds"])
        else:
            past.append(events.from_line(line))

    def _compare(self, folder: pathlib.Path, before: dict[str, Any]) -> None:
        """Raises ConfigError where the run had other rules."""
        now = json.loads(json.dumps(dataclasses.asdict(self.plan)))
        for name in sorted((before.keys() | now.keys()) - set(FREE)):
            if before.get(name) != now.get(name):
                raise ConfigError(
                    f"'{folder}' holds a run with {name}={before.get(name)}; this one has {name}={now.get(name)}. Go "
                    f"on with the old value, or begin a new run in another folder."
                )

    def _check_steps(self, folder: pathlib.Path) -> None:
        """Raises ConfigError where more steps are trained than the run has now."""
        trained = self.rules.record.published
        if trained > self.plan.steps:
            raise ConfigError(
                f"'{folder}' holds a run that has trained {trained} steps, and the config gives it {self.plan.steps}: "
                "what is trained cannot be taken back. Give it as many, which ends it there, or use another workdir."
            )

    def _wrong_tasks(self, version: int, tasks: Tasks) -> str:
        """Why these are not the tasks that a version brings; "" where they are. It may bring others that are due."""
        plan = self.plan
        end = plan.admitted(version)
        new_steps = range(0 if version == 0 else plan.admitted(version - 1), end)
        if not set(new_steps) <= tasks.keys() <= set(range(version, end)):
            return f"version {version} brings the tasks of steps {list(new_steps)}, not of {sorted(tasks)}."
        further = plan.groups_per_round or plan.groups_per_step
        sizes = [plan.first_round] + [further] * (plan.rounds - 1)
        for step, rounds in tasks.items():
            if (counts := list(map(len, rounds))) != sizes:
                return f"the rounds of step {step} have {counts} tasks, and must have {sizes}."
        return ""

    def _look_for_damaged(self, digests: Mapping[Key, str]) -> None:
        """At the start: files that are gone are as good as damaged, and damaged ones may have been put back.

        Of what nobody may need again the trainer tells, if it replays (`Repairs.at_once`).
        """
        missing = set(self.files.missing)
        for which in self.rules.record.damaged():
            if which not in missing and not self.why_damaged(which):
                self.rules.found_again(which)
                self.notes.append(f"{episodes.name_of(which)} was damaged, and its file is whole again.")
            else:
                missing.discard(which)
        for which in sorted(EpisodeId(GroupId(*group), sample) for group, sample in missing):
            damage = f"{self.path(which, digests[which])} is gone, and the ledger has it"
            if self.rules.repairs.at_once(which):
                self.damage.append((which, f"{damage}.", self.rules.damaged(which, digests[which])))
            else:
                self.notes.append(f"{damage}: {episodes.name_of(which)} is played again if the trainer asks for it.")

    def _forget_tasks(self) -> None:
        record = self.rules.record
        needed = {group.step for group in record.groups}
        for step in [step for step in self._tasks if step < record.kept and step not in needed]:
            del self._tasks[step]


def _digest(tasks: Tasks) -> str:
    return hashlib.sha256(json.dumps(wire.tasks_to(tasks), separators=(",", ":")).encode()).hexdigest()


def _must_be_new(folder: pathlib.Path) -> None:
    """Raises ConfigError where a ledger has been here: its episodes would be removed as those of no known run.

    Before the ledger is opened, since that begins a segment, which those that are put back would not go on from.
    """
    episode_file = next((path for path in (folder / episodes.FOLDER).rglob("*.z")), None)
    if episode_file is not None:
        raise ConfigError(
            f"'{folder}' has no ledger any more, and episodes of one ('{episode_file}'): put its folder of segments "
            "back from a copy, go on without config.fleet, or use another workdir."
        )
