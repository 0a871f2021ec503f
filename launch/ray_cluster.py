"""The run on Ray: which actors there are, and what is done when one of them is gone. See `launch.ray_fleet`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxagent.config import ConfigError
from jaxagent.config.errors import EXIT_CODES, ending_signals
from jaxagent.launch.keep import Backoff
from jaxagent.launch.processes import TOKEN, Run
from jaxagent.launch.ray_process import HOST, Process

LOST = -1  # the exit code of a process whose actor is gone
_ANSWER_S = 60.0  # an actor that runs, and does not answer for so long, is as good as gone
_LOOK_S = 5.0  # between two looks for room
_ENDING_S = 20.0  # for engines to see the end of the run by themselves


@dataclasses.dataclass
class Slot:
    """A process that shall be there."""

    name: str
    backoff: Backoff
    actor: Any = None
    call: Any = None  # the newest call, whose answer is awaited
    started: float = 0.0  # when it ran; 0: its actor is not placed yet
    called: float = 0.0
    not_before: float = 0.0
    code: int | None = None  # of its end

    @property
    def runs(self) -> bool:
        """Whether its process was started, and has not ended."""
        return self.actor is not None and self.started > 0 and self.code is None


def run(what: Run, trainers: int, workdir: str, token: str, args: argparse.Namespace) -> int:
    """Connects to the cluster, and runs until the trainer has ended; returns the exit code."""
    try:
        ray.init(address=args.address, namespace="jaxagent", ignore_reinit_error=True, log_to_driver=True)
    except ConnectionError as error:
        raise ConfigError(f"There is no Ray cluster at '{args.address}': ray start --head makes one.") from error
    fleet = Fleet(what, trainers, pathlib.Path(workdir), token, args)
    with _listening(fleet):
        try:
            return fleet.run()
        finally:
            fleet.end()


class Fleet:
    """Actors, and the rules by which they come and go.

    Args:
      what: the recipe.
      trainers: processes of the gang.
      workdir: for the logs of engines and coordinator, each on its own node.
      token: the run's secret.
      args: flags of `launch.ray_fleet`.
    """

    def __init__(self, what: Run, trainers: int, workdir: pathlib.Path, token: str, args: argparse.Namespace):
        self._what, self._trainers, self._args = what, trainers, args
        self._workdir, self._environment = workdir.absolute(), {TOKEN: token}
        self.asked: list[signal.Signals] = []
        self._group: Any = None
        self._url = ""
        self._coordinator = Slot("coordinator", Backoff(args.restarts))
        self._gang_backoff = Backoff(args.restarts)
        self._gang: list[Slot] = []
        self._gang_at = 0.0  # not to be started before
        self._engines: list[Slot] = []
        self._names = 0
        self._looked = self._enough = time.monotonic()

    def run(self) -> int:
        """Returns the exit code of the run."""
        self._begin()
        while True:
            self._hear()
            if self.asked:
                return self._save()
            if (code := self._look()) is not None:
                return code

    def end(self) -> None:
        """Leaves nothing behind: whatever still runs is ended."""
        slots = [slot for slot in (self._coordinator, *self._gang, *self._engines) if slot.actor is not None]
        placed = [slot.actor.end.remote(15.0) for slot in slots if slot.started]
        with contextlib.suppress(Exception):
            ray.wait(placed, num_returns=len(placed), timeout=20.0) if placed else None
        for slot in slots:
            self._drop(slot)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    # ---------------------------------------------------------------- beginning

    def _begin(self) -> None:
        """Places coordinator and trainers, and starts the former."""
        needs = [_bundle(self._args.trainer_resources) for _ in range(self._trainers)]
        for name, amount in _bundle(self._args.coordinator_resources).items():
            needs[0][name] = needs[0].get(name, 0.0) + amount
        self._group = placement_group(needs, strategy=self._args.trainers_on)
        until = time.monotonic() + self._args.patience_s
        while not self._group.wait(timeout_seconds=1):
            if self.asked or time.monotonic() > until:
                raise ConfigError(f"No room for coordinator and trainers, which need {needs}: {_room()} is there.")
        slot = self._coordinator
        slot.actor = self._actor(self._args.coordinator_resources, bundle=0)
        try:
            host, port = ray.get(slot.actor.where.remote(), timeout=_ANSWER_S)
        except RayError as error:
            self._gone(slot, _first_line(error))  # and another one is tried
            return
        self._url = f"http://{host}:{port}"
        self._start(slot, self._what.coordinator(f"{host}:{port}"), self._args.restarts, grace_s=10.0)
        while len(self._engines) < self._args.engines:
            self._add_engine()

    def _start_gang(self) -> None:
        """All trainers, each start with another port for JAX's own coordination."""
        self._gang = [Slot(f"trainer-{k}", self._gang_backoff) for k in range(self._trainers)]
        for k, slot in enumerate(self._gang):
            slot.actor = self._actor(self._args.trainer_resources, bundle=k)
        try:
            host, port = ray.get(self._gang[0].actor.where.remote(), timeout=self._args.patience_s)
        except RayError as error:
            self._gone(self._gang[0], _first_line(error))
            return
        for k, slot in enumerate(self._gang):
            command = self._what.trainer(self._url, HOST, k, self._trainers, f"{host}:{port}")
            self._start(slot, command, 0, self._args.grace_s, shown=k == 0)

    def _add_engine(self) -> None:
        self._engines.append(Slot(f"engine-{self._names}", Backoff(self._args.restarts)))
        self._names += 1

    def _actor(self, needs: dict, bundle: int | None = None) -> Any:
        where: Any = "SPREAD"
        if bundle is not None:
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return ray.remote(Process).options(scheduling_strategy=where, max_restarts=0, **needs).remote()

    def _start(self, slot: Slot, command: tuple[str, ...], restarts: int, grace_s: float, shown: bool = False) -> None:
        log = "" if shown else str(self._workdir / "fleet" / "logs" / f"{slot.name}.log")
        slot.call = slot.actor.start.remote(slot.name, command, self._environment, restarts, grace_s, log)
        slot.started, slot.code = 0.0, None

    # ---------------------------------------------------------------- hearing what became of them

    def _hear(self) -> None:
        """Takes the answers that have come; waits for one for a second."""
        waiting = {
            slot.call: slot for slot in (self._coordinator, *self._gang, *self._engines) if slot.call is not None
        }
        if not waiting:
            time.sleep(0.5)
            return
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=1.0)
        more, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0.0)
        now = time.monotonic()
        for call in {*ready, *more}:
            slot, waiting[call].call = waiting[call], None
            try:
                answer = ray.get(call, timeout=_ANSWER_S)
            except RayError as error:
                self._gone(slot, _first_line(error))
                continue
            if not slot.started:
                slot.started = now
                _say(f"{slot.name} runs on {answer}")
            elif answer is not None:
                slot.code = answer
                continue
            slot.call, slot.called = slot.actor.code.remote(), now
        for slot in waiting.values():
            if slot.call is not None and slot.started and now - slot.called > _ANSWER_S:
                self._gone(slot, "its node does not answer")

    def _gone(self, slot: Slot, why: str) -> None:
        _say(f"{slot.name} is lost: {why}")
        slot.code, slot.call = LOST, None

    def _drop(self, slot: Slot) -> None:
        """Ends the actor, and with it the process."""
        if slot.actor is not None:
            with contextlib.suppress(Exception):
                ray.kill(slot.actor)
        slot.actor = slot.call = None
        slot.started = 0.0

    # ---------------------------------------------------------------- what is to be done

    def _look(self) -> int | None:
        """One look at everything; the run's exit code when it is over."""
        now = time.monotonic()
        if self._coordinator.code is not None:
            return self._move() if self._coordinator.code == LOST else max(1, self._coordinator.code)
        if not self._gang and now >= self._gang_at and self._coordinator.started:
            self._start_gang()
        codes = [slot.code for slot in self._gang]
        if codes and all(code == 0 for code in codes):
            self._let_engines_end()
            return 0
        failed = next((slot for slot in self._gang if slot.code not in (None, 0)), None)
        if failed is not None:
            if failed.code in (1, 2):  # it has told why: another start would come to the same
                return failed.code
            if (wait := self._gang_backoff.after(now - failed.started if failed.started else 0.0)) is None:
                _say(f"{failed.name} ended with {failed.code}: too often")
                return 1
            _say(f"{failed.name} ended with {failed.code}: all trainers start again in {wait:.0f} s")
            for slot in self._gang:
                self._drop(slot)
            self._gang, self._gang_at = [], now + wait
        return self._look_at_engines(now)

    def _look_at_engines(self, now: float) -> int | None:
        for slot in list(self._engines):
            if slot.actor is None and now >= slot.not_before and self._coordinator.started:
                slot.actor = self._actor(self._args.engine_resources)
                self._start(slot, self._what.engine(self._url, HOST, slot.name), self._args.restarts, grace_s=10.0)
            elif slot.code is not None and slot.code != 0:
                self._replace(slot, now)
                if not self._engines:
                    return 2
        running = sum(slot.runs for slot in self._engines)
        if running >= self._args.min_engines:
            self._enough = now
        elif now - self._enough > self._args.patience_s:
            _say(f"{running} engines in {self._args.patience_s:.0f} s, which is less than --min_engines: the run ends")
            return 1
        if now - self._looked > _LOOK_S:
            self._looked = now
            pending = any(not slot.started for slot in self._engines)
            if not pending and len(self._engines) < self._args.max_engines and _has(self._args.engine_resources):
                self._add_engine()
        return None

    def _replace(self, slot: Slot, now: float) -> None:
        """An engine has ended; another one takes its place where one is wanted."""
        wait = slot.backoff.after(now - slot.started)
        mistake = slot.code == 2
        if slot.code != LOST:
            line = ""
            with contextlib.suppress(Exception):
                line = ray.get(slot.actor.last_line.remote(), timeout=5)
            _say(f"{slot.name} ended with {slot.code}{f' ({line})' if line else ''}")
        self._drop(slot)
        if mistake or wait is None or len(self._engines) > self._args.engines:
            self._engines.remove(slot)
        else:
            slot.code, slot.not_before = None, now + wait

    def _move(self) -> None:
        """The coordinator's node is gone: everything starts anew, with another address. The ledger is on the disk."""
        if self._coordinator.backoff.after(time.monotonic() - self._coordinator.started) is None:
            raise ConfigError("The coordinator's node was lost too often.")
        _say("all processes start again, since the coordinator's address changes")
        for slot in (self._coordinator, *self._gang, *self._engines):
            self._drop(slot)
            slot.code = None
        remove_placement_group(self._group)
        self._gang, self._gang_at = [], 0.0
        self._begin()

    # ---------------------------------------------------------------- ending

    def _save(self) -> int:
        """The trainers save and end; the exit code is theirs, or the signal's."""
        until = time.monotonic() + self._args.grace_s + 10.0
        for slot in self._gang:
            if slot.runs:
                slot.actor.stop.remote()
        while any(slot.runs for slot in self._gang) and time.monotonic() < until and len(self.asked) < 2:
            self._hear()
        codes = [slot.code for slot in self._gang]
        return 0 if codes and all(code == 0 for code in codes) else EXIT_CODES[self.asked[0]]

    def _let_engines_end(self) -> None:
        until = time.monotonic() + _ENDING_S
        while any(slot.runs for slot in self._engines) and time.monotonic() < until:
            self._hear()


def _bundle(needs: dict) -> dict[str, float]:
    """Actor options as a bundle of a placement group."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    return {**{names[name]: amount for name, amount in needs.items() if name in names}, **needs.get("resources", {})}


def _has(needs: dict) -> bool:
    """Whether the cluster has what one more wants. If no single node has it, the new one waits, as demand."""
    room = ray.available_resources()
    return all(room.get(name, 0.0) >= amount for name, amount in _bundle(needs).items())


def _room() -> dict[str, float]:
    return {name: amount for name, amount in ray.available_resources().items() if not name.startswith("node:")}


@contextlib.contextmanager
def _listening(fleet: Fleet) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP are asked for, and answered by the loop."""
    before = [
        (number, signal.signal(number, lambda n, _: fleet.asked.append(signal.Signals(n))))
        for number in ending_signals()
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _say(line: str) -> None:
    print(f"ray: {line}", file=sys.stderr, flush=True)
