"""The processes of one trainer: what they say to each other beside XLA's collectives.

A trainer of several processes runs one program on one mesh. A collective waits for every process, for ever: a process
that went another way hangs them all, and nobody can say who. So before device work that a process could miss they meet
here, through the coordination service of `jax.distributed`, which has time limits and knows who is missing. All
processes make the same calls in the same order; each call says what it is, so that one that went another way is found
at the next meeting. In one process every call returns at once.

Called by the main thread alone, but for `meetings_of`. `runs/devices.py` connects the processes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from jaxagent.config.errors import WaitedInVainError

T = TypeVar("T")  # JSON-able

INIT_S = 600  # for all processes to connect: a cluster starts hosts minutes apart
HEARTBEAT_S = 60  # after which a process that is silent has died; its supervisor knows earlier
SHUTDOWN_S = 60  # for all processes to come to a normal end
MEETING_S = 900.0  # between the first process and the last: a step's batch, compilation and published weights included
GRACE_S = 10.0  # for the word of process 0 to arrive that somebody is missing
PIECE = 2**20  # characters of one message
SLICE_S = 2.0  # of waiting: between two, Python's signal handlers run


class PeerError(RuntimeError):
    """The processes of the trainer cannot go on together; says who is missing, or what differs. The group must end."""


class MissingPeerError(PeerError, WaitedInVainError):
    """A process has not come to a meeting in time, or process 0 has waited in vain for something else."""


@dataclasses.dataclass
class Meetings:
    """The meetings of one process, `index` of `count`, with the trainer's other processes."""

    client: Any  # of the coordination service: a store of texts by key, whose reading waits
    index: int
    count: int
    space: str = "jaxagent"  # under which their texts are stored: other meetings at the same time have another one
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # the same in every process

    def meet(self, what: str, message: Any, timeout_s: float) -> list[Any]:
        """Waits for all processes and returns the message of each, as the function `meet` says."""
        number, size = next(self.numbers), self.count
        if self.index != 0:
            self.client.key_value_set(f"{self.space}/{number}/{self.index}", json.dumps([what, message]))
            answer = self.wait(f"{self.space}/{number}/all", timeout_s + GRACE_S)
            if answer is None:
                raise MissingPeerError(f"Process 0 has not come to '{what}' in {timeout_s:g} s.")
            verdict = json.loads(answer)
        else:
            verdict = self._verdict(number, what, message, size, timeout_s)
            self.client.key_value_set(f"{self.space}/{number}/all", json.dumps(verdict))
            for old in range(number - 3, number - 1):  # all have come here, so they have read what came before
                self.client.key_value_delete(f"{self.space}/{old}/")
        if "missing" in verdict:
            raise MissingPeerError(verdict["missing"])
        if "wrong" in verdict:
            raise PeerError(verdict["wrong"])
        return verdict["said"]

    def share(self, what: str, make: Callable[[], T], timeout_s: float) -> T:
        """Gives every process what process 0 makes, as the function `share` says."""
        number = next(self.numbers)
        if self.index != 0:
            answer = self.meet(what, None, timeout_s)[0]
            if "failed" in answer:
                kind = MissingPeerError if answer["waited"] else PeerError
                raise kind(f"Process 0 failed at '{what}': {answer['failed']}")
            pieces = [self.wait(f"{self.space}/{number}/{i}", GRACE_S) for i in range(answer["pieces"])]
            return json.loads("".join(filter(None, pieces)))
        try:
            result = make()
            text = json.dumps(result)
        except BaseException as error:
            failed = {"failed": f"{type(error).__name__}: {error}", "waited": isinstance(error, WaitedInVainError)}
            self.meet(what, failed, GRACE_S)
            raise
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        for i, piece in enumerate(pieces):
            self.client.key_value_set(f"{self.space}/{number}/{i}", piece)
        self.meet(what, {"pieces": len(pieces)}, timeout_s)
        return result

    def wait(self, key: str, timeout_s: float) -> str | None:
        """The key's value; None where it did not come in time."""
        return self._waited(key, timeout_s)[0]

    def _waited(self, key: str, remaining_s: float) -> tuple[str | None, float]:
        """The key's value, and the seconds that are left. Those in which this process was stopped do not count."""
        value = None
        while value is None and remaining_s > 0:
            began = time.monotonic()
            try:
                value = self.client.blocking_key_value_get(key, max(int(1000 * min(remaining_s, SLICE_S)), 1))
            except RuntimeError as error:  # jax's own is one
                if "DEADLINE_EXCEEDED" not in str(error):
                    message = str(error).splitlines()[0]
                    raise PeerError(f"The trainer's coordination service is gone: {message}") from error
            remaining_s -= min(time.monotonic() - began, SLICE_S)  # more: this process was stopped meanwhile
        return value, remaining_s

    def _verdict(self, number: int, what: str, own_message: Any, size: int, timeout_s: float) -> dict[str, Any]:
        """Process 0 reads the messages of all others: {"said": [...]}, {"wrong": a line} or {"missing": a line}."""
        answers, missing, remaining_s = [own_message], [], timeout_s
        for other in range(1, size):
            message, remaining_s = self._waited(f"{self.space}/{number}/{other}", max(remaining_s, 0.01))
            if message is None:
                missing.append(str(other))
                continue
            place, value = json.loads(message)
            if place != what:
                return {"wrong": f"The trainer's processes went apart: 0 is at '{what}', {other} is at '{place}'."}
            answers.append(value)
        if missing:
            who = f"process {', '.join(missing)} of {size}"
            return {"missing": f"The trainer waits for {who}, not come to '{what}' in {timeout_s:g} s."}
        return {"said": answers}


_own: Meetings | None = None  # None: the trainer is this process alone
ending_together = False  # all have agreed to save and end


def count() -> int:
    """Processes of the trainer."""
    return 1 if _own is None else _own.count


def index() -> int:
    """This one's number, from 0. Process 0 writes what all have in common."""
    return 0 if _own is None else _own.index


def is_first() -> bool:
    """Whether this is process 0: of one, or of several."""
    return index() == 0


def agree(what: str, digest: str, timeout_s: float = MEETING_S) -> None:
    """Waits for all, and compares their digests. Raises PeerError where they differ, or a process is missing."""
    digests = meet(what, digest, timeout_s)
    if others := [i for i, other in enumerate(digests) if other != digests[0]]:
        raise PeerError(
            f"The trainer's processes disagree about {what}: process 0 says {digests[0]}, process {others[0]} says "
            f"{digests[others[0]]}. They read different data or run different code."
        )


def meet(what: str, message: T = None, timeout_s: float = MEETING_S) -> list[T]:
    """Waits for all processes, and returns what each has said, in their order.

    Args:
      what: the meeting's name, for messages and to find a process that is at another place.
      message: a small JSON value.
      timeout_s: for the last process, counted from process 0's arrival.

    Raises:
      PeerError: a process does not come, or comes to another meeting.
    """
    return [message] if _own is None else _own.meet(what, message, timeout_s)


def meetings_of(thread: str) -> Callable[[str, Any, float], list[Any]]:
    """A `meet` for another thread than the main one: its meetings do not wait for those of the main thread.

    The name of the thread is no other's, and the same in all processes.
    """
    if _own is None:
        return meet
    return Meetings(_own.client, _own.index, _own.count, f"jaxagent-{thread}").meet


def share(what: str, make: Callable[[], T], timeout_s: float) -> T:
    """What process 0 makes, a JSON value, for all: a decision that must be the same everywhere, or work done once.

    Of a failure the others are told, and end too: they raise PeerError, also where it takes longer than `timeout_s`.
    """
    return make() if _own is None else _own.share(what, make, timeout_s)


def connect(process: int, processes: int, address: str) -> None:
    """Connects this process to the others; `runs.devices.distributed` is the way to call it.

    Raises PeerError where they did not come in `INIT_S`.
    """
    global _own
    import jax
    from jax._src import distributed  # the client has no public name; orbax takes it from there, too

    # It would take SIGTERM for itself, which asks a run to save and end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            processes,
            process,
            cluster_detection_method="deactivate",
            initialization_timeout=INIT_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except jax.errors.JaxRuntimeError as error:
        abandon()
        raise PeerError(
            f"Process {process} of {processes} met nobody at {address} in {INIT_S} s: {str(error).splitlines()[0]}"
        ) from error
    _own = Meetings(distributed.global_state.client, process, processes)


def disconnect() -> None:
    """A normal end: waits until all processes have come here, so that none takes the others' leaving for a death."""
    global _own
    import jax

    _own = None
    jax.distributed.shutdown()


def abandon() -> None:
    """After a failure: the others are not waited for, here and when the interpreter ends. They notice, and end."""
    global _own
    from jax._src import distributed

    state, _own = distributed.global_state, None
    for part in (state.client, state.service, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # freed without a closing, it aborts the process
    state.client = state.service = state.preemption_sync_manager = None


def digest(arrays: Iterable[Any]) -> str:
    """64 bits of the shapes and contents of arrays, as text."""
    hashed = hashlib.blake2b(digest_size=8)
    for array in arrays:
        host = np.ascontiguousarray(array)
        hashed.update(f"{host.dtype.str}{host.shape}".encode())
        hashed.update(host.reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()
