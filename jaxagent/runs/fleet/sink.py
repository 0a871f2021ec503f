"""Who gets the trainer's weights in a run of many processes: engines, by immutable versions on disk.

A version is on disk, every byte of it, before the coordinator hears of it; so a trainer that dies in between publishes
it again. A trainer that goes back to a bundle trains the steps since then again, from the same batches, and publishes
them again: with exact numerics they must come out equal, bit for bit. The first of those steps have tokens of versions
before the bundle, which are scored again (runs/rescore.py): they stay as long as the bundle does, and for one that is
still being written, since either may be the one that the trainer goes back to.

Under LoRA a version is adapters alone. The frozen weights that they change are on disk once, before the first version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxagent.config import Config, ConfigError
from jaxagent.engine.driver import Driver
from jaxagent.fleet import manifest, weights
from jaxagent.fleet.admission import Answer, Outcome
from jaxagent.fleet.leaves import Path
from jaxagent.fleet.vitals import Vitals
from jaxagent.fleet.wire import TaskRef
from jaxagent.learner import peers
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.runs.fleet import trees
from jaxagent.runs.fleet.adapters import digest_of_merged

Tasks = Mapping[int, Sequence[Sequence[TaskRef]]]  # of steps: those of each round


class Link(Protocol):
    """What a sink and a ledger tell the coordinator: `fleet.client.Client`."""

    def publish(self, version: int, digest: str, lineage: str, tasks: Tasks) -> Answer:
        """A version's weights can be fetched."""
        ...

    def weights(self, version: int) -> object | None:
        """Where a version's weights are; None: it is not published."""
        ...

    def keep(self, step: int) -> Answer:
        """The trainer's state before `step` is saved."""
        ...


@dataclasses.dataclass(frozen=True)
class Content:
    """What a version consists of."""

    tree: dict[Path, np.ndarray]  # all weights, or adapters
    base: str = ""  # digest of the frozen weights that adapters change
    merged: str = ""  # digest of what they make of them: adapters.digest_of_merged


def content(state: TrainState, base: str = "") -> Content:
    """What the trainer publishes of its state. Where other processes hold parts of it, each has to call this.

    Args:
      state: the trainer's.
      base: under LoRA, the digest of its frozen weights.
    """
    if not base:
        return Content(trees.to_host(state.policy))
    return Content(trees.to_host(state.params), base, digest_of_merged(state.policy, state.params))


class Versions:
    """A sink (runs/seams.py) that publishes.

    Args:
      cfg: the run's.
      driver: of this process: it has the newest version inside, for evaluation.
      link: to the coordinator.
      folder: of all versions.
      lineage: the run's id.
      tasks: version -> the tasks of the steps that it admits.
      signs: is told when training is over.
      note: prints a line.
      probe: called before version 0 is published, with the weights in the driver: what engines compare with.
      trained: gives what was trained of an earlier version; None where it is not to be had any more.
      bundled: the steps that bundles hold, the one being written too: a trainer goes on from one of them.
    """

    def __init__(
        self,
        cfg: Config,
        driver: Driver,
        link: Link,
        folder: pathlib.Path,
        lineage: str,
        tasks: Callable[[int], Tasks],
        signs: Vitals,
        note: Callable[[str], None],
        probe: Callable[[], None],
        trained: Callable[[int], Params | None],
        bundled: Callable[[], Collection[int]],
    ):
        assert cfg.fleet is not None
        self._cfg, self._fleet, self._driver, self._link = cfg, cfg.fleet, driver, link
        self._folder, self._lineage, self._tasks = folder, lineage, tasks
        self._signs, self._note, self._probe, self._trained = signs, note, probe, trained
        self._bundled = bundled
        self._base = ""  # digest of the frozen weights, once they are on disk

    def publish(self, version: int, state: TrainState) -> None:
        """See `Sink`. Versions that nobody asks for any more are deleted.

        Raises:
          ConfigError: the version was published before, and a repetition of its steps has come out differently; or the
            coordinator does not know the steps before it.
          OSError: the disk is full, or failed.
        """
        self._driver.update_params(state.policy, version)
        if self._cfg.model.lora.rank and not self._base:
            self._base = self._publish_base(trees.to_host(state.frozen.base))
        found = content(state, self._base)
        if peers.is_first():
            self._tell(version, found)
        self._signs.phase(f"goes on after version {version}", self._fleet.start_s, done=version)

    def _publish_base(self, tree: dict[Path, np.ndarray]) -> str:
        """Writes the weights that adapters change; their digest."""
        digest = manifest.digest(tree)
        if peers.is_first():
            try:
                weights.publish(self._folder / weights.BASE, tree, self._lineage, weights.FIRST)
            except weights.ConflictError as conflict:
                raise ConfigError(
                    f"The frozen weights under the adapters are not those that this run has published: {conflict} "
                    f"{self._folder.parent} is of another run, or '{self._cfg.workdir}/base' was replaced: use another "
                    "workdir."
                ) from None
        return digest

    def _tell(self, version: int, found: Content) -> None:
        """Process 0 of the trainer speaks for all."""
        if version == 0:
            self._probe()
        digest = self._written(version, found)
        if digest is not None:
            answer = self._link.publish(version, digest, self._lineage, self._tasks(version))
            if answer.outcome is Outcome.CONFLICT:
                self._differs(version, answer.reason)
            elif answer.outcome is Outcome.REFUSED:
                raise ConfigError(
                    f"'{self._cfg.workdir}' has done {version} steps that '{self._folder.parent}' does not know "
                    f"({answer.reason}) They were done without config.fleet, or the ledger was removed: go on without "
                    "config.fleet, or use another workdir."
                )
        staleness = self._cfg.rl.staleness
        before = {earlier for step in self._bundled() for earlier in range(step - staleness, step)}
        weights.delete(self._folder, version - staleness - 1, {weights.FIRST, *before})

    def past(self) -> Mapping[int, Params]:
        """None for bundles: versions are on disk until nobody asks for them any more."""
        return {}

    def missing(self, version: int) -> Sequence[int]:
        """None: see above."""
        return ()

    def held(self, version: int) -> Params | None:
        """See `Sink`."""
        return self._trained(version)

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """For evaluation: the driver of this process plays nothing else."""
        yield

    def _written(self, version: int, found: Content) -> str | None:
        """Writes a version; its digest, or None: another one is published, and stays."""
        of = found.tree, self._lineage, version, found.base, found.merged
        try:
            return weights.publish(self._folder, *of).digest
        except weights.OtherRunError as other:
            raise ConfigError(
                f"The versions in '{self._folder}' are of another run than the ledger beside them: {other} The ledger "
                "was removed or replaced: put it back from a copy, go on without config.fleet, or use another workdir."
            ) from None
        except weights.ConflictError as conflict:
            if self._cfg.numerics == "exact" or self._link.weights(version) is not None:
                self._differs(version, str(conflict))
                return None
        # A trainer that died before it told anyone wrote the other one.
        shutil.rmtree(weights.path_of(self._folder, version))
        return weights.publish(self._folder, *of).digest

    def _differs(self, version: int, reason: str) -> None:
        """A repetition has come out differently: a defect with exact numerics, and to be expected with fast ones."""
        if self._cfg.numerics == "exact":
            raise ConfigError(
                f"Version {version} was published before, and training it again from the same episodes gave other "
                f"weights, where numerics='exact' promises equal ones: {reason} Code, libraries or processor are not "
                f"those of before, the hardware errs, or {self._folder.parent} is of another run: then use another "
                "workdir."
            )
        self._note(
            f"version {version} came out differently when its steps were repeated (numerics='fast'): what engines have "
            "stays as it is, and what they play with it keeps its own log-probs."
        )


class Kept:
    """A ledger (runs/seams.py) that lets the coordinator forget what no bundle needs."""

    def __init__(self, link: Link):
        self._link, self._step = link, 0

    def commit(self, step: int) -> None:
        """See `Ledger`."""
        if step > self._step and peers.is_first():
            self._link.keep(step)
            self._step = step
