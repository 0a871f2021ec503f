"""What the coordinator and its callers tell each other, to JSON and back. See docs/asynchronous_internals.md.

Both sides read with these functions, so both refuse what they do not understand, and name the field.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

from jaxagent.fleet.admission import Answer, Batch, LeasedEpisode, Outcome
from jaxagent.fleet.plan import EpisodeId, GroupId
from jaxagent.fleet.record import StoredResult

WIRE = 3  # version of all of this: the two sides of a call have the same, or do not talk
# Of every request, beside the token. KEY: of a process, from its first call on.
RUN, ATTEMPT, NAME, KEY = "Fleet-Run", "Fleet-Attempt", "Fleet-Name", "Fleet-Key"
DIGEST = "Fleet-Digest"  # of an episode's result, with its body
SUM = "Fleet-Sum"  # of every request and every answer: what came in is what was sent
MAX_CALL_BYTES = 32 * 2**20  # of any body but an episode's, either way
MAX_EPISODE_BYTES = 64 * 2**20
LONGEST_POLL_S = 20.0
CALL_S = 30.0  # longest time for an answer, beyond that of the poll
BODY_S = 120.0  # longest time for an episode's body

LOCAL = "127.0.0.1"
ANY = ("", "0.0.0.0", "::")  # where who listens there listens on all addresses of its machine

T = TypeVar("T")


def url_of(host: str, port: int) -> str:
    """An IPv6 address stands in brackets, which it may have already."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def sum_of_call(method: str, path: str, headers: Mapping[str, str]) -> hashlib._Hash:
    """SHA-256 of a request's address and of the headers that mean something; its body is still to be added."""
    values = [headers.get(name, "") for name in (RUN, ATTEMPT, NAME, KEY, DIGEST)]
    return hashlib.sha256("\n".join((method, path, *values, "")).encode("utf-8", "replace"))


def sum_of_answer(call_sum: hashlib._Hash, status: int, digest: str, body: bytes) -> str:
    """SHA-256 of an answer with its status, its header DIGEST ("": none) and its body.

    And of what was asked as it came in, `sum_of_call` without the body, so that no other call's answer passes for it.
    """
    return hashlib.sha256(f"{call_sum.hexdigest()}\n{status}\n{digest}\n".encode() + body).hexdigest()


class BadMessageError(ValueError):
    """A message that is none of these: names the field."""


# What a server answers where it refuses: a word for its client, and the status.
STATUS = {
    "malformed": 400, "missing": 404, "conflict": 409, "refused": 409, "replaced": 409, "lost": 409,
    "unknown_worker": 410, "damaged": 422, "busy": 503, "ending": 503, "full_disk": 507,
}  # fmt: skip


# Statuses of refusals that may pass. 401: the token was damaged on the way, or another run has the port for a while;
# 422: the call came in damaged; 507: the disk is full.
REPEATED = (401, 408, 422, 429, 500, 502, 503, 504, 507)


def may_pass(status: int, waited_s: float, patience_s: float, accepted: bool) -> bool:
    """Whether a client repeats a call that a server has refused with this status.

    A refused token is final only for a process none of whose calls was ever `accepted`, and after `patience_s`: a token
    that worked is right, and its process waits as for a server that is away.
    """
    return status in REPEATED and (status != 401 or accepted or waited_s <= patience_s)


class RefusedCallError(Exception):
    """A call that a server refuses; one line says why, and what to do.

    Attributes:
      kind: one of `STATUS`. "busy": it may be repeated in a moment; "damaged": it is not what its digest says, and is
        to be sent again; "full_disk": nothing is stored until there is room; "replaced": another process has taken
        the caller's place.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class TaskRef(NamedTuple):
    """A task of the training data."""

    row: int  # in the source of training tasks, as the trainer has it
    id: str  # its own id, by which whoever plays it sees that the data are equal


# Of a step: its rounds, each a list of tasks, one for every group of the round by number.
Rounds: TypeAlias = tuple[tuple[TaskRef, ...], ...]
Tasks: TypeAlias = dict[int, Rounds]  # by step


@dataclasses.dataclass(frozen=True)
class Job:
    """An episode to play, with its task."""

    work: LeasedEpisode
    task: TaskRef

    @property
    def group(self) -> GroupId:
        """The step, the round, and the group's number in it."""
        return self.work.episode.group

    @property
    def sample(self) -> int:
        """Which attempt of the group it is."""
        return self.work.episode.sample


@dataclasses.dataclass(frozen=True)
class Joined:
    """What a process learns when it joins."""

    name: str  # of this process, for its next calls
    epoch: int  # of the coordinator's process
    run: str
    lease_s: float  # a process that is silent for so long is given up
    newest: int  # version; -1: none is published
    cancel: tuple[str, ...]  # leases that it must give up
    ended: str  # why the run is over; "": it goes on
    key: str = ""  # by which the coordinator knows the process again: a trainer's calls need it


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process learns when it shows that it lives."""

    newest: int  # version; -1: none is published
    cancel: tuple[str, ...]  # leases to give up: the episode is stored, or somebody else plays it
    ended: str  # why the run is over; "": it goes on
    drain: bool  # finish what is in hand, then leave: no more work comes
    soon: int = -1  # with `pinned`: the version that its next work will probably have; -1: none is known


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where a version's weights are."""

    version: int
    digest: str  # of the tree
    lineage: str
    urls: tuple[str, ...]  # in the order in which to try them; each serves /v1/manifest/{v} and /v1/chunk/{digest}
    trainers: int = 1  # how many of them are trainer processes: the last ones

    @property
    def engines(self) -> tuple[str, ...]:
        """Those of engines."""
        return self.urls[: max(0, len(self.urls) - self.trainers)]


# -------------------------------------------------------------------- values


def json_object(raw: bytes) -> dict[str, Any]:
    """A body. Raises BadMessageError: no JSON object of finite numbers."""

    def refused(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        row = json.loads(raw, parse_constant=refused)
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"the body is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadMessageError(f"the body must be a JSON object, not {type(row).__name__}")
    return row


def whole_number(row: Mapping[str, Any], name: str, default: int | None = None, most: int = 2**53) -> int:
    """A whole number from 0, also as the digits that an address has."""
    value = row.get(name, default)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 17:
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise BadMessageError(f"'{name}' must be a whole number from 0 to {most}, got {_short(value)}")
    return value


def number(row: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number from 0."""
    value = row.get(name, default)
    if type(value) not in (int, float) or not 0 <= value < 1e15:  # not NaN either
        raise BadMessageError(f"'{name}' must be a number from 0, got {_short(value)}")
    return float(value)


def text(row: Mapping[str, Any], name: str, default: str | None = None, most: int = 4096) -> str:
    """A text."""
    value = row.get(name, default)
    if not _is_text(value) or len(value) > most:
        raise BadMessageError(f"'{name}' must be a text of {most} characters at most, got {_short(value)}")
    return value


def table(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; {} where there is none."""
    value = row.get(name, {})
    if not isinstance(value, dict):
        raise BadMessageError(f"'{name}' must be an object, got {_short(value)}")
    return value


def numbers(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a process counts: numbers, and under "versions" the list of those that it has."""
    counters = table(row, name)
    for key, value in counters.items():
        if key == "versions":
            fits = isinstance(value, list) and all(type(entry) is int for entry in value)
        else:
            fits = type(value) in (int, float) and abs(value) < 1e300  # not NaN either
        if not fits:
            raise BadMessageError(f"'{name}' must hold numbers, and a list as 'versions', got {_short({key: value})}")
    return counters


def entries(row: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> tuple[T, ...]:
    """A list, each entry read."""
    value = row.get(name, [])
    if not isinstance(value, list):
        raise BadMessageError(f"'{name}' must be a list, got {_short(value)}")
    return tuple(map(read, value))


def lease(value: Any) -> str:
    """A lease: of which coordinator process, and a number."""
    epoch, _, count = value.partition("-") if isinstance(value, str) else ("", "", "")
    if not (epoch.isdigit() and count.isdigit() and value.isascii() and len(value) < 40):
        raise BadMessageError(f"{_short(value)} is no lease")
    return value


def _is_text(value: Any) -> TypeGuard[str]:
    """Half of a surrogate pair is none: the ledger could not hold it."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _short(value: Any) -> str:
    return f"{value!r:.80}"


def _wholes(value: Any, count: int, what: str) -> list[int]:
    if not isinstance(value, list) or len(value) != count or any(type(v) is not int or v < 0 for v in value):
        raise BadMessageError(f"{what} is {count} whole numbers, got {_short(value)}")
    return value


def group(value: Any) -> GroupId:
    """[step, round, number]."""
    return GroupId(*_wholes(value, 3, "a group"))


def episode(value: Any) -> EpisodeId:
    """[step, round, number, sample]."""
    step, round_, index, sample = _wholes(value, 4, "an episode")
    return EpisodeId(GroupId(step, round_, index), sample)


def flat(which: EpisodeId) -> list[int]:
    """An episode's id as [step, round, number, sample]."""
    return [*which.group, which.sample]


def holding_of(value: Any) -> tuple[str, EpisodeId]:
    """[lease, step, round, number, sample]: what a process plays."""
    if not isinstance(value, list) or len(value) != 5:
        raise BadMessageError(f"what is played is [lease, step, round, number, sample], got {_short(value)}")
    return lease(value[0]), episode(value[1:])


def task(value: Any) -> TaskRef:
    """[row, id]."""
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int or not _is_text(value[1]):
        raise BadMessageError(f"a task is [row, id], got {_short(value)}")
    return TaskRef(*value)


# -------------------------------------------------------------------- tasks


def tasks_to(tasks: Mapping[int, Sequence[Sequence[TaskRef]]]) -> dict[str, Any]:
    """Tasks as JSON: {"step": [[[row, id], ...] of each round]}."""
    return {str(step): rounds_to(rounds) for step, rounds in sorted(tasks.items())}


def rounds_to(rounds: Sequence[Sequence[TaskRef]]) -> list[list[list[Any]]]:
    """A step's rounds as JSON: a list of rounds, each a list of [row, id]."""
    return [[list(ref) for ref in tasks] for tasks in rounds]


def tasks_of(row: Mapping[str, Any]) -> Tasks:
    """Reads the tasks of a message's "tasks"."""
    tasks: Tasks = {}
    for key, value in table(row, "tasks").items():
        tasks[whole_number({"tasks": key}, "tasks")] = rounds_of(value)
    return tasks


def rounds_of(value: Any) -> Rounds:
    """Reads a step's rounds from their JSON."""
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        raise BadMessageError(f"a step's tasks are a list of rounds, each a list of tasks, got {_short(value)}")
    return tuple(tuple(map(task, entry)) for entry in value)


# -------------------------------------------------------------------- answers

# How a field is read, by its type.
_READERS: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    "str": text,
    "int": lambda row, name: -1 if row.get(name) == -1 else whole_number(row, name),  # -1: no version
    "float": number,
    "bool": lambda row, name: row.get(name) is True,
    "tuple[str, ...]": lambda row, name: entries(row, name, lambda value: text({name: value}, name)),
}


def plain(kind: type[T], row: Mapping[str, Any]) -> T:
    """Reads a dataclass of plain fields, such as `Joined`, from the JSON that `dataclasses.asdict` has made of it."""
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return kind(**{field.name: _READERS[str(field.type)](row, field.name) for field in fields})


def job_to(job: Job) -> dict[str, Any]:
    """A job as JSON."""
    work = job.work
    return {
        "episode": flat(work.episode),
        "lease": work.lease,
        "version": work.version,
        "domain": "",  # of older code, which reads it
        "task": list(job.task),
    }


def job_of(row: Mapping[str, Any]) -> Job:
    """Reads a job from its JSON."""
    work = LeasedEpisode(episode(row.get("episode")), lease(row.get("lease")), whole_number(row, "version"))
    return Job(work, task(row.get("task")))


def answer_to(answer: Answer) -> dict[str, Any]:
    """What became of something, as JSON."""
    return {"outcome": answer.outcome.value, "reason": answer.reason, "complete": answer.complete}


def answer_of(row: Mapping[str, Any]) -> Answer:
    """Reads an answer from its JSON."""
    try:
        outcome = Outcome(row.get("outcome"))
    except ValueError:
        raise BadMessageError(f"{_short(row.get('outcome'))} is no outcome") from None
    return Answer(outcome, text(row, "reason"), row.get("complete") is True)


def batch_to(batch: Batch) -> dict[str, Any]:
    """What a step trains on, as JSON."""
    results = [[*flat(which), result.digest, result.version, result.lease] for which, result in batch.results.items()]
    return {
        "step": batch.step,
        "groups": list(map(list, batch.groups)),
        "left_out": list(map(list, batch.left_out)),
        "results": results,
        "ages": {str(age): count for age, count in batch.ages.items()},
    }


def batch_of(row: Mapping[str, Any]) -> Batch:
    """Reads a batch from its JSON."""
    results: dict[EpisodeId, StoredResult] = {}
    for value in entries(row, "results", lambda entry: entry):
        if not isinstance(value, list) or len(value) != 7:
            raise BadMessageError(f"a result is an episode, its digest, version and lease, got {_short(value)}")
        results[episode(value[:4])] = StoredResult(*value[4:])
    ages = {whole_number({"ages": age}, "ages"): count for age, count in table(row, "ages").items()}
    return Batch(
        whole_number(row, "step"), entries(row, "groups", group), entries(row, "left_out", group), results, ages
    )
