"""The trainer of a run of many processes: `loop.run` with the coordinator at its seams.

It plays nothing of the RL stage but evaluations. Everything before that stage it does alone, as a run of one process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib.version

from jaxagent.config import Config, ConfigError
from jaxagent.engine.driver import Driver
from jaxagent.fleet import settings
from jaxagent.fleet.client import Client, CoordinatorGoneError, ReplacedError
from jaxagent.fleet.plan import Plan
from jaxagent.fleet.server import LEDGER
from jaxagent.fleet.settings import plan_of
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.weight_server import WeightServer, listening_host
from jaxagent.fleet.wire import Rounds, TaskRef
from jaxagent.learner import peers
from jaxagent.rollout.experience import Experience
from jaxagent.runs import devices, provenance
from jaxagent.runs.checks import RL
from jaxagent.runs.fleet import probe, sink, source
from jaxagent.runs.parts import Parts
from jaxagent.runs.seams import Seams
from jaxagent.runs.workdir import Workdir

logger = logging.getLogger(__name__)
PACKAGE = pathlib.Path(__file__).parents[2]


def facts(cfg: Config, name: str, host: str, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What a process tells the coordinator of itself: whatever the bits of a token hang on, and where it is.

    `fleet/members.py` says which of them must be equal in all.
    """
    return {
        "process": name,
        "host": host,
        "pid": os.getpid(),
        "config": settings.digest_of(cfg),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "xla_flags": provenance.deciding_flags(os.environ.get("XLA_FLAGS", "")),
        "cpu_features": devices.processor(),
        "threads": devices.threads(explicit=True),  # of a mesh's virtual devices the probe tells
        "device_kind": next(iter(mesh.devices.flat)).device_kind,
        "program": program(),
        "mesh": dict(mesh.shape),
    }


@functools.cache
def program() -> str:
    """A digest of the package's own code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


ROLE = "trainer"
BEATS_PER_LEASE = 4
STOP_S = 5.0


class Trainer:
    """This process's side of the fleet. Use as a context manager around `loop.run`, which is given `connect`.

    Args:
      host: by which others reach it.
    """

    def __init__(self, cfg: Config, link: Client, token: str, name: str, host: str, signs: Vitals):
        self._cfg, self._fleet, self._link = cfg, settings.of(cfg), link
        self._token, self._name, self._host, self._signs = token, name, host, signs
        self._folder = pathlib.Path(cfg.workdir) / settings.FOLDER
        self._facts: dict[str, Any] = {}
        self._joined_as = self._stage = ""
        self._published: sink.VersionPublisher | None = None
        self._over = threading.Event()
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        if kind is None and self._published is not None:
            self._published.finish()
        self._over.set()
        self._opened.close()
        if kind is None and peers.is_first():
            with contextlib.suppress(CoordinatorGoneError):
                if not self._joined_as:  # there was nothing left to train
                    own_facts = {"process": self._name, "host": self._host, "config": settings.digest_of(self._cfg)}
                    self._link.join(ROLE, own_facts)
                self._link.end("the trainer has ended")

    def connect(self, parts: Parts, saved: Workdir, driver: Driver, experience: Experience, steps_before: int) -> Seams:
        """The seams of the RL stage (runs/seams.py). From now on the coordinator knows this process.

        Raises:
          ConfigError: the run would go on from a step that the coordinator has forgotten.
        """
        self._signs.phase("begins RL", self._fleet.start_s)
        # First of all: until the stage's first step the workdir is as the process found it.
        check_known(self._cfg.workdir, saved.step_of(RL), self._link.status()["steps"]["kept_from"])
        plan = plan_of(self._cfg)
        versions = self._folder / settings.WEIGHTS
        versions.mkdir(parents=True, exist_ok=True)
        self._facts = {**facts(self._cfg, self._name, self._host, parts.mesh), "rank": peers.index()}
        server = WeightServer([versions], self._token, listening_host(self._host), address=self._host)
        self._opened.enter_context(server)
        self._facts["source"] = server.url
        joined = self._link.join(ROLE, self._facts)
        self._joined_as = joined.name
        self._opened.enter_context(self._beating(joined.lease_s / BEATS_PER_LEASE))
        note = saved.progress.note
        rounds: dict[int, Rounds] = {}

        def look(step: int) -> None:
            assert self._published is not None
            self._published.check()
            saved.end_between_steps(RL, step)

        batches = source.Batches(
            self._cfg.rl,
            self._fleet,
            self._link,
            self._folder / LEDGER,
            self._signs,
            note,
            look,
            lambda step, tick: sink.lacking(self._link, versions, plan.version(step), tick),
            lambda group: rounds[group.step][group.round][group.number].id if group.step in rounds else None,
        )
        weights_of = sink.PublishedWeights(parts, self._link, versions, note).trained
        record = functools.partial(probe.record, versions, parts, driver, self._facts)
        if saved.other_rounding or any(field.startswith(probe.ASKED) for field, *_ in saved.changed):
            note(probe.renew(versions, driver, record, None if self._cfg.model.lora else weights_of(0)))
        self._published = sink.VersionPublisher(
            self._cfg,
            driver,
            self._link,
            versions,
            joined.run,
            tasks_of(experience, plan, rounds),
            self._signs,
            note,
            record,
            weights_of,
            saved.bundled,
        )
        return Seams(batches.batch, self._published, sink.FleetRetention(self._link).commit, plan.bound)

    def alive(self, stage: str) -> None:
        """What `loop.run` tells whenever it gets somewhere. Before the first stage, engines have nothing to open."""
        if stage != self._stage:
            self._stage = stage
            self._signs.phase(f"begins stage '{stage}'", self._fleet.start_s)
        else:
            self._signs.tick()

    @contextlib.contextmanager
    def _beating(self, every_s: float) -> Iterator[None]:
        thread = threading.Thread(target=self._beat, args=(every_s,), name="beats", daemon=True)
        thread.start()
        yield
        thread.join(STOP_S)  # it may wait for an answer

    def _beat(self, every_s: float) -> None:
        """For people, and so that the coordinator knows where versions are."""
        while not self._over.wait(every_s):
            phase, phase_s = self._signs.now()
            try:
                self._link.beat(self._joined_as, (), phase, phase_s, {})
            except ReplacedError as error:  # the loop's next call says so, too, and ends the process
                logger.error("%s", error)
                return
            except Exception as error:
                logger.warning("The coordinator was not told that this trainer lives: %s", error)


def check_known(workdir: str, step: int, kept_from: int) -> None:
    """Raises ConfigError where the coordinator has forgotten what the steps from `step` to `kept` were trained on."""
    if step < kept_from:
        raise ConfigError(
            f"'{workdir}' would go on from step {step}, and its coordinator has forgotten what the steps before "
            f"{kept_from} were trained on: bundles of step {kept_from} and later ones were damaged or removed. Put one "
            f"of them back from a copy, go on from step {step} without config.fleet, which plays those steps again, or "
            "use another workdir. Metrics, record and bundles are as they were."
        )


def tasks_of(experience: Experience, plan: Plan, rounds_of: dict[int, Rounds]) -> Callable[[int], sink.Tasks]:
    """Version -> the tasks of the steps that it admits, of all their rounds.

    The first version of this process brings those of all steps that are not trained: some of them lay beyond the end of
    the run when their version was published, if `rl.steps` was raised since.

    Args:
      experience: knows the tasks of every step.
      rounds_of: gets those that were told, by step, as long as a batch may still have groups of the step.
    """
    published: list[int] = []

    def tasks(version: int) -> sink.Tasks:
        first = plan.admitted(version - 1) if published else version
        published.append(version)
        rounds = {
            step: tuple(
                tuple(TaskRef(index, task.id) for index, task in zip(places, experience.tasks(places), strict=True))
                for places in experience.assign(step)
            )
            for step in range(first, plan.admitted(version))
        }
        rounds_of.update(rounds)
        for step in [step for step in rounds_of if step < version - plan.bound]:
            del rounds_of[step]
        return rounds

    return tasks
