"""The trainer lends its devices while it waits for a step: its own engine plays episodes of that step, as others do.

    batch not there -> joins as an engine, for this step -> plays -> the batch is there -> leaves -> the update begins

It gets no episode of a later step (`fleet/admission.py`), so the batch is complete when it has nothing left in hand:
nothing is paused, and nothing is played in vain. What it may still hold all the same, as an episode that somebody else
finished after a lease ran out, is given back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxagent.engine.driver import Driver
from jaxagent.engine.requests import EngineError
from jaxagent.fleet import weights
from jaxagent.fleet.client import Client
from jaxagent.fleet.leaves import Leaves, Path
from jaxagent.fleet.manifest import Manifest, MissingError
from jaxagent.fleet.members import UNTIL
from jaxagent.fleet.neighbours import Done
from jaxagent.fleet.wire import Job, Sources
from jaxagent.fleet.worker import EngineWorker
from jaxagent.models.params import ArraySpec, Params
from jaxagent.rollout.workers import STOP_TIMEOUT_S
from jaxagent.runs.fleet import places
from jaxagent.runs.fleet.held import OnDevices
from jaxagent.runs.fleet.player import EnginePlayer, budget_s
from jaxagent.runs.parts import Parts

GRACE_S = 1.0  # for the answer to a result that is being handed in
LEAVE_S = 30.0  # for the loop to end; longer than its own threads may take
IN_HAND = ("waiting", "playing", "unsent")
METRICS = ("fleet/lent_s", "fleet/lent_idle_s", "fleet/lent_episodes")
GIVEN_BACK = "given back"
NOT_SHARED = ("source", "rank")  # facts of the trainer: it serves weights, and its engine does not


@dataclasses.dataclass(frozen=True)
class OwnFolder:
    """A `Reader` of what this process has published."""

    folder: pathlib.Path

    def read(
        self, ask: Callable[[], Sources], like: Mapping[Path, ArraySpec], base: str | None = ""
    ) -> tuple[Manifest, Leaves]:
        """See `places.read`."""
        return places.read(self.folder, ask(), like, base)


class OwnVersions:
    """The versions that this process has published, for its own engine."""

    def __init__(self, parts: Parts, link: Client, folder: pathlib.Path):
        own, base = OwnFolder(folder), OwnFolder(folder / weights.BASE)
        self._on_devices = OnDevices(parts.cfg, parts.spec, parts.mesh, link, own, base)

    def params(self, version: int) -> Params:
        """See `VersionSource`."""
        return self._on_devices.params(version)

    def expect(self, version: int) -> None:
        """Nothing: all of them are here."""

    def forget(self, below: int) -> None:
        """Nothing: whoever publishes deletes."""

    def numbers(self) -> dict[str, Any]:
        """Nothing comes over the network."""
        return {"weights_got_bytes": 0.0}


class OwnPlayer:
    """This process's engine, until it is taken back. See `Player`.

    Args:
      inner: plays.
    """

    def __init__(self, inner: EnginePlayer):
        self._inner = inner
        self._taking = threading.Lock()  # held while something begins: what has begun can be ended
        self._over = False

    def hold(self, version: int) -> None:
        """See `Player`."""
        with self._taking:
            if self._over:
                raise MissingError("the trainer has taken its devices back.")
            self._inner.hold(version)

    def expect(self, version: int) -> None:
        """See `Player`."""
        self._inner.expect(version)

    def play(self, job: Job, done: Done) -> None:
        """See `Player`."""
        with self._taking:
            if not self._over:
                return self._inner.play(job, done)
        done(None, job.work.version)

    def cancel(self, lease: str) -> None:
        """See `Player`."""
        self._inner.cancel(lease)

    def places(self) -> int:
        """See `Player`."""
        return self._inner.places()

    def numbers(self) -> dict[str, Any]:
        """See `Player`."""
        return self._inner.numbers()

    def take_back(self) -> None:
        """Nothing begins any more, and what runs is ended.

        Raises:
          EngineError: it does not end.
        """
        with self._taking:
            self._over = True
        try:
            self._inner.stop(STOP_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"What the trainer has given back still runs after {STOP_TIMEOUT_S:g} s.") from None


class Lent:
    """An engine's loop in a thread of this process.

    Args:
      worker: the loop.
      player: what it plays with.
    """

    def __init__(self, worker: EngineWorker, player: OwnPlayer):
        self._worker, self._player = worker, player
        self._thread = threading.Thread(target=self._run, name="lent", daemon=True)
        self._failure: BaseException | None = None
        self._since = time.monotonic()
        self._before = (0.0, 0.0)
        self._thread.start()

    def goes_on(self) -> bool:
        """Whether anything has gone on since this was asked last, or nothing is in hand that could.

        Raises:
          Exception: what the loop died of.
        """
        if self._failure is not None:
            raise self._failure
        if not self._thread.is_alive():  # the coordinator wants no more of it
            return True
        numbers = self._worker.numbers()
        now = (float(numbers["progress"]), float(numbers["episodes"]))
        before, self._before = self._before, now
        return now != before or not any(numbers[state] for state in IN_HAND)

    def take_back(self) -> dict[str, float]:
        """Ends the loop, and whatever still runs on the devices. Returns numbers.

        Raises:
          EngineError: episodes do not end.
        """
        self._worker.end("the trainer waits no more", GRACE_S)
        self._thread.join(LEAVE_S)
        self._player.take_back()
        numbers = self._worker.numbers()
        lent_s = time.monotonic() - self._since
        return {
            "fleet/lent_s": lent_s,
            "fleet/lent_idle_s": min(lent_s, numbers["idle_s"]),
            "fleet/lent_episodes": numbers["episodes"],
            GIVEN_BACK: sum(numbers[name] for name in (*IN_HAND, "cancelled", "given_back")),
        }

    def _run(self) -> None:
        try:
            self._worker.run()
        except BaseException as failure:  # told to the thread that waits for the batch
            self._failure = failure


class Lender:
    """Lends the devices of this process, the only one of its trainer, while it waits.

    Args:
      parts, driver: of this process. Before each wait, the driver has the newest version inside.
      link: to the coordinator, for the engine alone.
      folder: of the versions that this process publishes.
      facts: of this process.
      note: prints a line.

    Attributes:
      budget_s: without progress for so long, a wait counts as a hang.
    """

    def __init__(
        self,
        parts: Parts,
        driver: Driver,
        link: Client,
        folder: pathlib.Path,
        facts: Mapping[str, Any],
        note: Callable[[str], None],
    ):
        self._parts, self._driver, self._link, self._note = parts, driver, link, note
        self._versions = OwnVersions(parts, link, folder)
        self._facts = {name: value for name, value in facts.items() if name not in NOT_SHARED}
        self._facts["process"] = f"{facts['process']}'s engine"
        self.budget_s = budget_s(parts.cfg)
        self._numbers: dict[str, float] = {}

    @contextlib.contextmanager
    def lent(self, step: int) -> Iterator[Lent]:
        """While this is open, the engine of this process plays for a step. Then the devices are the caller's alone."""
        cfg, facts = self._parts.cfg, {**self._facts, UNTIL: step}
        assert cfg.fleet is not None
        # The version that was published last has the number of the step that comes next.
        player = OwnPlayer(EnginePlayer(self._parts, self._driver, self._versions, lambda: None, facts, holds=step))
        self._note(f"step {step} is not complete: the trainer lends its devices")
        lent = Lent(EngineWorker(self._link, player, facts, cfg.fleet.rule, self.budget_s), player)
        try:
            yield lent
        finally:
            self._numbers = lent.take_back()
            with self._parts.roles.turns.turn(lambda: False):  # the round that was under way is over
                pass
            self._tell(step)

    def numbers(self) -> dict[str, float]:
        """Of the newest wait, once: zeros where nothing was lent."""
        found, self._numbers = self._numbers, {}
        return {name: found.get(name, 0.0) for name in METRICS}

    def _tell(self, step: int) -> None:
        lent_s, idle_s, episodes = (self._numbers[name] for name in METRICS)
        self._note(
            f"step {step}: the trainer takes its devices back after {lent_s:.1f} s: {episodes:.0f} episodes played in "
            f"{lent_s - idle_s:.1f} s, {self._numbers[GIVEN_BACK]:.0f} given back"
        )
