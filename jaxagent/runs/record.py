"""The record of a stage that samples and trains: all that its steps were made of, so that they can be made again.

    <workdir>/record/rl/<digest>.json      a config that steps were made under, by its digest
    <workdir>/record/rl/00000012.step      step 12, whole or not at all
        {"record": 1, "step": 12, ..., "seal": "..."}      one line of JSON, the header
        episodes, packed (data/codec.py), one after the other in the order of rounds, groups, attempts

Groups are kept as they were played, before rewards that compare a group's attempts, selection and filters: those are
functions of them. The header has the digest of every episode, and the digests of the policy's weights before and after
the step. Its seal covers all of these and the seal of the step before, so the newest seal stands for the whole record:
who changes an old step has to change all that follow. Counters, times and text of episodes are kept and not sealed,
since another play of the same episode has others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.data.codec import Packed
from jaxagent.io import files
from jaxagent.learner import digests
from jaxagent.runs import provenance
from jaxagent.types import Episode, Group

FOLDER = "record"
SUFFIX = ".step"
FORMAT = 1
Rounds = Sequence[Sequence[Group]]  # of a step, as they were played


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """One step of a record, read."""

    number: int
    config: str  # digest of what of the config decides results
    code: str  # digest of the package's files
    before: str  # digest of the policy's weights before the step, ...
    after: str  # ... and after it
    previous: str  # seal of the step before; "" where the record begins
    seal: str
    rounds: tuple[tuple[Group, ...], ...]
    damage: tuple[str, ...] = ()  # what does not fit its digest, one line each


class Recorder:
    """Writes a record while the stage runs: `played`, `published` and `commit` once in every step.

    One thread packs and writes, while the learner's thread waits for the device. `seal` is the newest step's that is on
    disk after `wait`, "" where there is none.
    """

    def __init__(
        self, folder: Path, first: int, keep: Literal["all", "newest", "none"], config: str, writes: bool = True,
        own_code: Mapping[str, str] | None = None, stored_config: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        """Goes on with step `first`; what an earlier process recorded from there on is written anew.

        Args:
          folder: of the stage's record.
          first: the next step.
          keep: `checkpoint.replay`.
          config: the digest of what in the config decides the numbers of a step.
          own_code: `provenance.own_code` of the config.
          stored_config: that config, as `to_dict` makes it: kept beside the steps, by its digest.
          writes: False in a process that only takes part in the digests of weights that all hold together.
        """
        self._folder, self._keep, self._config, self._writes = folder, keep, config, writes
        self._own_code = dict(own_code or {})
        if keep != "none" and writes:
            folder.mkdir(parents=True, exist_ok=True)
            if stored_config is not None:
                files.replace_json(folder / f"{config}.json", stored_config)
        path = path_of(folder, first - 1)
        try:
            self.seal = _header(path)["seal"] if writes and path.is_file() else ""
        except ConfigError as error:
            raise ConfigError(f"{error} Delete it to go on: what lies before it cannot be made again then.") from None
        for old in [number for number in steps(folder) if number >= first] if writes else []:
            path_of(folder, old).unlink()
        self._weights = ""
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "record")
        self._packed: concurrent.futures.Future[tuple[Rounds, list[list[list[Packed]]]]] | None = None
        self._written: concurrent.futures.Future[None] | None = None
        self._forgotten = 0  # steps below

    def add_groups(self, rounds: Rounds) -> None:
        """The groups of a step, before they are learnt from."""
        if self._keep != "none" and self._writes:
            self._packed = self._thread.submit(
                lambda: (rounds, [[[*map(codec.pack, group.episodes)] for group in groups] for groups in rounds])
            )

    def published(self, version: int, params: Any) -> None:
        """The weights after `version` steps: the step before it is complete."""
        if self._keep == "none":
            return
        before, self._weights = self._weights, digests.digest(params)
        packed, self._packed = self._packed, None
        if packed is None:
            return
        self.wait()
        header = {"record": FORMAT, "step": version - 1, "config": self._config, "code": provenance.code_digest()}
        header |= {"before": before, "after": self._weights, "previous": self.seal, "own_code": self._own_code}

        def write() -> None:
            self.seal = _write(self._folder, header, *packed.result())

        self._written = self._thread.submit(write)

    def wait(self) -> None:
        """When this returns, every step that is complete is on disk.

        Raises:
          OSError: the disk is full, or failed.
          ConfigError: an episode holds what cannot be written.
        """
        pending, self._written = self._written, None
        try:
            if pending is not None:
                pending.result()
        except ValueError as error:  # a task's metadata with a NaN, say
            raise ConfigError(
                f"{self._folder}: an episode cannot be recorded ({error}). Mend the data, or go on with "
                "--config.checkpoint.replay=none."
            ) from error

    def commit(self, step: int) -> None:
        """Every step that is complete is on disk; those before `step`, which no bundle reaches, are forgotten."""
        self.wait()
        if self._keep == "newest" and self._writes and step > self._forgotten:
            for number in steps(self._folder):
                if number < step:
                    path_of(self._folder, number).unlink()
            self._forgotten = step

    def close(self) -> None:
        """Ends the thread when it has written what it was given."""
        self._thread.shutdown()


def path_of(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"{step:08d}{SUFFIX}"


def steps(folder: Path) -> list[int]:
    """The recorded steps, in order."""
    paths = folder.glob(f"*{SUFFIX}") if folder.is_dir() else ()
    return sorted(int(path.stem) for path in paths if path.stem.isdigit())


def read(folder: Path, step: int) -> RecordedStep:
    """A step. What does not fit its digest is in `damage`, and read all the same where it can be.

    Raises:
      ConfigError: there is no such file, or it cannot be read at all.
    """
    path = path_of(folder, step)
    header = _header(path)
    damage = []
    if seal_of(header) != header["seal"]:
        damage.append(f"{path}: its seal does not fit what it says")
    with path.open("rb") as file:
        file.readline()
        rounds = []
        for round_ in header["rounds"]:
            groups = []
            for group in round_:
                episodes = []
                for attempt, (digest, size) in enumerate(group):
                    where = f"{path}, round {len(rounds)}, group {len(groups)}, attempt {attempt}"
                    episode, intact = _unpacked(file.read(size), digest, where)
                    damage += [] if intact else [f"{where}: the episode does not fit its digest"]
                    episodes.append(episode)
                groups.append(Group(episodes[0].task, tuple(episodes)))
            rounds.append(tuple(groups))
    return RecordedStep(
        number=header["step"],
        config=header["config"],
        code=header["code"],
        before=header["before"],
        after=header["after"],
        previous=header["previous"],
        seal=header["seal"],
        rounds=tuple(rounds),
        damage=tuple(damage),
    )


def headers(folder: Path, damaged: dict[int, str] | None = None) -> dict[int, dict[str, Any]]:
    """The headers of all steps: cheap, no episode is read.

    Args:
      damaged: gets, by step, why a header cannot be read; None: that is raised.

    Raises:
      ConfigError: see `damaged`.
    """
    readable = {}
    for step in steps(folder):
        try:
            readable[step] = _header(path_of(folder, step))
        except ConfigError as error:
            if damaged is None:
                raise
            damaged[step] = str(error)
    return readable


def configs(folder: Path) -> list[dict[str, Any]]:
    """The configs under which a record's steps were made, as `to_dict` makes them; of old runs none."""
    configs = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError):  # damaged: whoever looks for its digest does not find it
            configs.append(json.loads(path.read_bytes()))
    return configs


def seal_of(header: dict[str, Any]) -> str:
    """The seal of a header: of everything in it but the sizes of bodies, the code, and the seal itself."""
    sealed = {name: header[name] for name in ("record", "step", "config", "before", "after", "previous", "tasks")}
    sealed["rounds"] = [[[digest for digest, _ in group] for group in round_] for round_ in header["rounds"]]
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def _write(folder: Path, header: dict[str, Any], rounds: Rounds, packed: list[list[list[Packed]]]) -> str:
    header["tasks"] = [[group.task.id for group in round_] for round_ in rounds]
    header["rounds"] = [
        [[(packed_one.digest, len(packed_one.body)) for packed_one in group] for group in round_] for round_ in packed
    ]
    header["seal"] = seal_of(header)
    bodies: Iterable[Packed] = itertools.chain.from_iterable(itertools.chain.from_iterable(packed))
    head = json.dumps(header, separators=(",", ":")).encode() + b"\n"
    files.replace(path_of(folder, header["step"]), b"".join([head, *(packed_one.body for packed_one in bodies)]))
    return header["seal"]


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
        if header["record"] != FORMAT:
            raise ValueError(f"it has format {header['record']}, and {FORMAT} is read")
        if missing := {"step", "config", "code", "before", "after", "previous", "tasks", "rounds", "seal"} - set(
            header
        ):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return header
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: the step was not recorded, or is forgotten.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}).") from None


def _unpacked(body: bytes, digest: str, where: str) -> tuple[Episode, bool]:
    """The episode, and whether it has the digest."""
    try:
        return codec.unpack(Packed(digest, body), where), True
    except ConfigError:
        return codec.unpack(Packed(codec.digest_of(body, where), body), where), False
