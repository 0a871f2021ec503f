"""The run on Ray: actors that hold its processes, under the supervisor of every launcher. See `launch.ray_fleet`."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxagent.config import Config, ConfigError
from jaxagent.config.errors import WAITED, WaitedInVainError
from jaxagent.fleet import local, settings
from jaxagent.fleet.child import Program
from jaxagent.fleet.supervise import Gang, Supervisor
from jaxagent.fleet.vitals import Sign
from jaxagent.launch.processes import TOKEN, Run
from jaxagent.launch.ray_process import HOST, PORT, Process, at, where

ANSWER_S = 60.0  # an actor that runs, and does not answer for so long, is as good as gone
ROOM_S = 5.0  # between two looks for room
KILL_S = 10.0


def run(what: Run, cfg: Config, token: str, args: argparse.Namespace) -> int:
    """Connects to the cluster, and runs until the trainer has ended; returns the exit code."""
    try:
        ray.init(address=args.address, namespace="jaxagent", ignore_reinit_error=True, log_to_driver=True)
    except ConnectionError as error:
        raise ConfigError(f"There is no Ray cluster at '{args.address}': ray start --head makes one.") from error
    fleet = Fleet(what, cfg, token, args)
    try:
        return fleet.run()
    finally:
        remove_placement_group(fleet.group)


class Placed:
    """A process on some node, with the methods of a `Child`; before there is room for it, it only waits."""

    readable = ()

    def __init__(self, program: Program, options: dict[str, Any], *started_with: Any):
        self.program, self.place = program, None
        self._actor = ray.remote(Process).options(max_restarts=0, **options).remote()
        self._call = self._actor.start.remote(program, *started_with)
        self._since, self._to_send = time.monotonic(), []
        self._code, self._hang, self._sign, self._line = None, "", None, "it said nothing"

    @property
    def started(self) -> float:
        """When it was, on this machine's clock; now, where it waits for room."""
        return self._since if self.place else time.monotonic()

    def exit_code(self) -> int | None:
        """Its exit code; `WAITED` where its node is lost. Never waits."""
        if self._code is None:
            self._hear()
        return self._code

    def _hear(self) -> None:
        now = time.monotonic()
        while self._to_send and self.place:
            self._actor.send.remote(self._to_send.pop())
        try:
            if not ray.wait([self._call], timeout=0)[0]:
                if self.place and now - self._called > ANSWER_S:
                    self._lost("its node does not answer")
                return
            answer = ray.get(self._call)
        except RayError as error:
            self._lost((str(error).strip().splitlines() or [type(error).__name__])[-1])
            return
        if self.place is None:
            self.place, self._since = answer, now
            print(f"ray: {self.program.name} runs on {answer[0]}", file=sys.stderr, flush=True)
        else:
            self._code, self._hang, self._sign, self._line = answer
        self._call, self._called = self._actor.look.remote(), now

    def _lost(self, why: str) -> None:
        self._code, self._line, self.place = WAITED, f"it is lost: {why}", None

    def hangs(self) -> str:
        """Why it shows no progress, as its actor says; "" where it does."""
        return self._hang

    def sign(self) -> Sign | None:
        """The newest sign of life that its actor has read."""
        return self._sign

    def last_line(self) -> str:
        """The newest line that it has printed."""
        return self._line

    def write_stacks(self) -> bool:
        """Its actor has them written when it finds the hang."""
        return False

    def send(self, signum: int) -> None:
        """With the next look, since a signal's handler must not call Ray."""
        self._to_send.append(int(signum))

    def kill(self) -> None:
        """Ends the process, and its actor."""
        with contextlib.suppress(Exception):
            if self.place:
                ray.get(self._actor.kill.remote(), timeout=KILL_S)
        with contextlib.suppress(Exception):
            ray.kill(self._actor)

    def pump(self) -> None:
        """Its actor shows what it prints."""

    def close(self) -> None:
        """Nothing to close."""


class Fleet(Supervisor):
    """The gangs of a run, and where Ray puts them."""

    def __init__(self, what: Run, cfg: Config, token: str, args: argparse.Namespace):
        self._what, self._args, self._trainers = what, args, settings.of(cfg).trainers
        needs = [_bundle(args.trainer_resources) for _ in range(self._trainers)]
        for name, amount in _bundle(args.coordinator_resources).items():
            needs[0][name] = needs[0].get(name, 0.0) + amount
        self.group = placement_group(needs, strategy=args.trainers_on)
        self._needs, self._begun = needs, time.monotonic()
        self._roomy, self._meeting, self._url, self._port = False, None, "", 0
        self._enough = self._asked_for_room = time.monotonic()
        engines = [
            Gang(f"engine-{k}", lambda _, k=k: self._engine(k), ready=lambda k=k: self._may_play(k))
            for k in range(args.max_engines)
        ]
        gangs = [
            Gang("coordinator", lambda _: self._coordinator(), needed=True, ready=self._has_room),
            Gang("trainer", lambda _: self._gang(), leads=True, ready=self._may_train),
            *engines,
        ]
        self._with = pathlib.Path(cfg.workdir).absolute() / settings.FOLDER, {TOKEN: token}, settings.of(cfg).start_s
        grace_s = args.grace_s + 10.0
        super().__init__(gangs, *self._with[:2], args.restarts, self._with[2], grace_s=grace_s, begin=self._place)

    def _look(self) -> None:
        super()._look()
        coordinator, _, *engines = self._all
        place = next((child.place for child in coordinator.children if child.place), None)
        if place and (url := f"http://{at(*place)}") != self._url:
            moved, self._url, self._port = bool(self._url), url, place[1]
            print(f"ray: the coordinator listens on {url}", file=sys.stderr, flush=True)
            for running in self._all[1:] if moved else ():  # the ledger is on the disk: all go on with the new address
                self._close(running)
        running = sum(bool(r.children and r.children[0].place) for r in engines)
        if running >= self._args.min_engines or not self._opened():
            self._enough = time.monotonic()
        elif time.monotonic() - self._enough > self._args.patience_s:
            few = f"{running} engines for {self._args.patience_s:g} s, which is less than --min_engines"
            raise WaitedInVainError(f"{few}: the cluster has {_room()} left.")

    def _place(self, program: Program) -> Placed:
        role, _, number = program.name.partition("-")
        needs = getattr(self._args, f"{role}_resources")
        strategy = "SPREAD" if role == "engine" else self._bundle_of(int(number or 0))
        port = self._port if role == "coordinator" else 0
        return Placed(program, {"scheduling_strategy": strategy, **needs}, *self._with, port)

    def _bundle_of(self, number: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)

    # ---------------------------------------------------------------- what is started

    def _coordinator(self) -> list[Program]:
        return [Program("coordinator", self._what.coordinator(f"{HOST}:{PORT}"))]

    def _gang(self) -> list[Program]:
        meet_at = at(*ray.get(self._meeting)) if self._meeting else ""
        self._meeting, count = None, self._trainers
        meet = [self._what.trainer(self._url, HOST, k, count, meet_at) for k in range(count)]
        return [Program(f"trainer-{k}", command, on_console=k == 0) for k, command in enumerate(meet)]

    def _engine(self, number: int) -> list[Program]:
        name = f"engine-{number}"
        return [Program(name, self._what.engine(self._url, HOST, name))]

    # ---------------------------------------------------------------- when it may be started

    def _has_room(self) -> bool:
        self._roomy = self._roomy or self.group.wait(timeout_seconds=0.1)
        if not self._roomy and time.monotonic() - self._begun > self._args.patience_s:
            raise WaitedInVainError(
                f"No room for coordinator and trainers, which need {self._needs}: the cluster has {_room()} left."
            )
        return self._roomy

    def _may_train(self) -> bool:
        """When the coordinator listens; several trainers need a new port of the first node each time, too."""
        if not self._url or not any(child.place for child in self._all[0].children):
            return False
        if self._trainers > 1 and self._meeting is None:
            self._meeting = ray.remote(where).options(num_cpus=0, scheduling_strategy=self._bundle_of(0)).remote()
        try:
            if self._meeting and ray.wait([self._meeting], timeout=0)[0]:
                ray.get(self._meeting)
                return True
        except RayError:
            self._meeting = None
        return self._trainers == 1

    def _may_play(self, number: int) -> bool:
        """Those of --engines when there is something to open, the others while there is room that nobody waits for."""
        if number < self._args.engines or not self._opened():
            return self._opened()
        now = time.monotonic()
        if now - self._asked_for_room < ROOM_S or any(not c.place for r in self._all[2:] for c in r.children):
            return False
        self._asked_for_room, room = now, ray.available_resources()
        return all(room.get(name, 0.0) >= amount for name, amount in _bundle(self._args.engine_resources).items())

    def _opened(self) -> bool:
        sign = self._all[1].children[0].sign() if self._all[1].children else None
        return sign is not None and sign.phase != local.OPENING


def _bundle(needs: dict) -> dict[str, float]:
    """Actor options as a bundle of a placement group."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    return {**{names[name]: amount for name, amount in needs.items() if name in names}, **needs.get("resources", {})}


def _room() -> dict[str, float]:
    return {name: amount for name, amount in ray.available_resources().items() if not name.startswith("node:")}
