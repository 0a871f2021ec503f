"""Who gets the trainer's weights in a run of many processes: engines, by immutable versions on disk.

A version is on disk, every byte of it, before the coordinator hears of it; so a trainer that dies in between publishes
it again. A trainer that goes back to a bundle trains the steps since then again, from the same batches, and publishes
them again: with exact numerics they must come out equal, bit for bit. The first of those steps have tokens of versions
before the bundle, which are scored again (runs/lag.py): they stay as long as the bundle does, and for one that is
still being written, since either may be the one that the trainer goes back to.

Under LoRA a version is adapters alone. The frozen weights that they change are on disk once, before the first version.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import pathlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent.config import Config, ConfigError
from jaxagent.engine.driver import Driver
from jaxagent.fleet import manifest, weight_reader, weights
from jaxagent.fleet.admission import Outcome
from jaxagent.fleet.client import Client
from jaxagent.fleet.leaves import Path
from jaxagent.fleet.manifest import MissingError, Share, WeightsError
from jaxagent.fleet.vitals import WEIGHTS, Vitals
from jaxagent.fleet.wire import TaskRef
from jaxagent.fleet.worker import WAITING
from jaxagent.learner import peers
from jaxagent.learner.state import TrainState
from jaxagent.models import lora, params
from jaxagent.models.params import Params
from jaxagent.rollout.workers import STOP_TIMEOUT_S
from jaxagent.runs.fleet import engine_weights, trees
from jaxagent.runs.fleet.trees import digest_of_merged
from jaxagent.runs.parts import Parts

UNPUBLISHED, DELETED = "unpublished", "it is deleted. Said once; logprob_gap/scored_frac has the rest."
LOOK_S = 0.5  # between two looks at what another thread does
Tasks = Mapping[int, Sequence[Sequence[TaskRef]]]  # of steps: those of each round


@dataclasses.dataclass(frozen=True)
class VersionContent:
    """What a process publishes of a version."""

    shares: list[Share]  # of all weights, or of adapters
    base: str = ""  # digest of the frozen weights that adapters change
    merged: str = ""  # digest of what they make of them: adapters.digest_of_merged


def dtype_of(cfg: Config, folder: pathlib.Path) -> str:
    """In which full weights are published: the one that engines compute in. Cast here, they have the same bits there.

    A run whose first version is in the trainer's own goes on with that: its steps may be repeated.
    """
    model = cfg.model
    dtype = "bfloat16" if "bfloat16" in (model.compute_dtype, model.param_dtype) else "float32"
    with (
        contextlib.suppress(manifest.WeightsError),
        weight_reader.OpenVersion(weights.path_of(folder, weights.FIRST)) as open_version,
    ):
        return dtype if any(leaf.dtype == dtype for leaf in open_version.manifest.leaves) else model.param_dtype
    return dtype


def content_of(state: TrainState, dtype: str, base: str = "") -> VersionContent:
    """What this process publishes of the trainer's state. Where others hold parts of it, each has to call this.

    Args:
      dtype: of full weights.
      base: under LoRA, the digest of its frozen weights.
    """

    def as_sent(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf if jax.tree_util.keystr(path[-1:], simple=True) in params.WIDE else leaf.astype(dtype)

    if not base:
        return VersionContent(trees.shares(jax.tree_util.tree_map_with_path(as_sent, state.policy)))
    return VersionContent(trees.shares(state.params), base, digest_of_merged(state.policy, state.params))


@dataclasses.dataclass(eq=False)
class VersionPublisher:
    """A sink (runs/seams.py) that publishes: in the step itself what may be a repetition, and beside the next one what
    is new, since nobody can have that already.
    """

    cfg: Config  # the run's
    driver: Driver  # of this process: it has the newest version inside, for evaluation
    link: Client  # to the coordinator
    folder: pathlib.Path  # of all versions
    lineage: str  # the run's id
    tasks: Callable[[int], Tasks]  # version -> the tasks of the steps that it admits
    signs: Vitals  # is told when training is over
    note: Callable[[str], None]  # prints a line
    # Called before version 0 is published, with the weights in the driver: what engines compare with.
    probe: Callable[[], None]
    # Gives what was trained of an earlier version; None where it is not to be had any more.
    trained: Callable[[int], Params | None]
    # The steps that bundles hold, the one being written too: a trainer goes on from one of them.
    bundled: Callable[[], Collection[int]]

    def __post_init__(self) -> None:
        assert self.cfg.fleet is not None
        self._fleet = self.cfg.fleet
        self._base = ""  # digest of the frozen weights, once they are on disk
        self._dtype = dtype_of(self.cfg, self.folder)
        self._exact = self.cfg.numerics == "exact" and not self.cfg.takes_other_rounding
        self._newest = -1  # that this process has published
        self._repeats = True  # the newest one was there already, for all that is known
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "publishes")
        self._under_way: concurrent.futures.Future[None] | None = None
        self._step_waits = True  # for chunks to come to the disk, which are its signs of life then
        meet = peers.meetings_of("publishes")
        self._meet: weights.Meet = lambda what, message: meet(what, message, max(self._fleet.hang_s, peers.MEETING_S))

    def publish(self, version: int, state: TrainState) -> None:
        """Publishes a version beside the next step, and deletes versions that nobody asks for any more.

        Raises, also of the version before:
          ConfigError: the version was published before, and a repetition of its steps has come out differently; or the
            coordinator does not know the steps before it.
          OSError: the disk is full, or failed.
        """
        self.driver.update_params(state.policy, version)
        if self.cfg.model.lora and not self._base:
            self._base = self._publish_base(trees.shares(state.frozen.base))
        self.finish()
        content = content_of(state, self._dtype, self._base)
        if not peers.is_first():
            self._step_waits = False
            self._under_way = self._pool.submit(self._write_version, version, content)
        else:
            staleness = self.cfg.rl.staleness
            before = {earlier for step in self.bundled() for earlier in range(step - staleness, step)}
            if self._repeats:
                self._write_and_report(version, content, before, self.tasks)
            else:  # the tasks as they are known now
                tasks, self._step_waits = {version: self.tasks(version)}, False
                self._under_way = self._pool.submit(self._write_and_report, version, content, before, tasks.__getitem__)
        # Once: what the first step compiles, and what the end of the stage writes.
        once = self._newest < 0 or version == self.cfg.rl.steps
        self._newest = version
        self.signs.phase(_after(version), self._fleet.start_s if once else self._fleet.hang_s, done=version)

    def check(self) -> None:
        """Raises what a publication that is over has failed of."""
        if self._under_way is not None and self._under_way.done():
            self.finish()

    def finish(self) -> None:
        """Waits until the newest version is on disk and told. Raises as `publish`."""
        if self._under_way is None:
            return
        publication, self._under_way, self._step_waits = self._under_way, None, True
        if not publication.done():
            self.signs.phase(f"publishes version {self._newest}", self._fleet.hang_s)
        publication.result()

    def _publish_base(self, shares: list[Share]) -> str:
        """Writes the weights that adapters change; in process 0, their digest."""
        folder, tell = self.folder / weights.BASE, {"rank": peers.index(), "meet": self._meet}
        try:
            value = weights.publish(folder, shares, self.lineage, weights.FIRST, **tell)
        except weights.ConflictError as conflict:
            raise ConfigError(
                f"The frozen weights under the adapters are not those that this run has published: {conflict} "
                f"{self.folder.parent} is of another run, or '{self.cfg.workdir}/base' was replaced: use another "
                "workdir."
            ) from None
        return value.digest if value is not None else "as process 0 says"

    def _write_and_report(
        self, version: int, content: VersionContent, before: set[int], tasks: Callable[[int], Tasks]
    ) -> None:
        """Writes a version, reports it to the coordinator, and deletes those that nobody asks for; in process 0."""
        digest = self._write_version(version, content)
        if version == 0:  # after the other processes' parts, which do not wait for what it compiles
            self.probe()
        if digest is not None:
            answer = self.link.publish(version, digest, self.lineage, tasks(version))
            self._repeats = answer.outcome is not Outcome.STORED
            if answer.outcome is Outcome.CONFLICT:
                self._report_difference(version, answer.reason)
            elif answer.outcome is Outcome.REFUSED:
                raise ConfigError(
                    f"'{self.cfg.workdir}' has done {version} steps that '{self.folder.parent}' does not know "
                    f"({answer.reason}) They were done without config.fleet, or the ledger was removed: go on without "
                    "config.fleet, or use another workdir."
                )
        weights.delete(self.folder, version - self.cfg.rl.staleness - 1, {weights.FIRST, *before})

    def past(self) -> Mapping[int, Params]:
        """None for bundles: versions are on disk until nobody asks for them any more."""
        return {}

    def missing(self, version: int) -> Sequence[int]:
        """None: see above."""
        return ()

    def weights_of(self, version: int) -> Params | None:
        """The weights of a version that can be read again; None: they cannot be."""
        return self.trained(version)

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """For evaluation: the driver of this process plays nothing else. What goes on there is its sign of life."""
        over = threading.Event()

        def look() -> None:
            before: Mapping[str, float] = {}
            while not over.wait(LOOK_S):
                stats = {name: count for name, count in self.driver.stats().items() if name != "free_slot_s"}
                if stats != before:
                    self.signs.tick()
                before = stats

        budget_s = max(self._fleet.hang_s, self.cfg.env.episode_timeout_s + 2 * STOP_TIMEOUT_S)
        if not peers.is_first():  # it waits for what process 0 plays, for as long as that may take
            budget_s = math.inf
        self.signs.phase(f"evaluates version {self._newest}", budget_s)
        watching = threading.Thread(target=look, name="evaluates", daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
        self.signs.phase(_after(self._newest), self._fleet.hang_s)

    def _write_version(self, version: int, content: VersionContent) -> str | None:
        """Writes what this process holds of a version.

        Returns:
          In process 0, its digest; None: another one is published, and stays.
        """
        of = content.shares, self.lineage, version, content.base, content.merged, self._tick
        replaces = functools.partial(self._may_replace, version)
        try:
            value = weights.publish(self.folder, *of, replaces, peers.index(), self._meet)
        except weights.OtherRunError as other:
            raise ConfigError(
                f"The versions in '{self.folder}' are of another run than the ledger beside them: {other} The ledger "
                "was removed or replaced: put it back from a copy, go on without config.fleet, or use another workdir."
            ) from None
        except weights.ConflictError as conflict:
            self._report_difference(version, str(conflict))
            return None
        return None if value is None else value.digest

    def _may_replace(self, version: int, conflict: weights.ConflictError) -> bool:
        """Whether the version that is there may go: a trainer wrote it that died before it told anyone."""
        if self._exact or isinstance(conflict, weights.OtherRunError):
            return False
        return self.link.weights(version) is None

    def _tick(self) -> None:
        if self._step_waits:
            self.signs.tick()

    def _report_difference(self, version: int, reason: str) -> None:
        """A repetition has come out differently: a defect with exact numerics, and to be expected with fast ones."""
        if self._exact:
            raise ConfigError(
                f"Version {version} was published before, and training it again from the same episodes gave other "
                f"weights, where numerics='exact' promises equal ones: {reason} Code, libraries or processor are not "
                f"those of before, the hardware errs, or {self.folder.parent} is of another run: then use another "
                "workdir."
            )
        self.note(
            f"version {version} came out differently when its steps were repeated: what engines have "
            "stays as it is, and what they play with it keeps its own log-probs."
        )


def _after(version: int) -> str:
    return f"goes on after version {version}"


class FleetRetention:
    """A ledger (runs/seams.py) that lets the coordinator forget what no bundle needs."""

    def __init__(self, link: Client):
        self._link, self._step = link, 0

    def commit(self, step: int) -> None:
        """Tells the coordinator that the state before `step` is saved."""
        if step > self._step and peers.is_first() and self._link.keep(step).outcome is not Outcome.REFUSED:
            self._step = step  # refused: that version is still on its way


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """Reads earlier versions back as they were trained, so that a trainer keeps none of them on its devices.

    Where several processes share the trainer's mesh, each of them has to ask for the same versions.
    """

    parts: Parts
    link: Client
    folder: pathlib.Path  # of all versions
    note: Callable[[str], None]  # prints a line
    _deleted: set[int] = dataclasses.field(default_factory=set)  # versions that are not there any more

    def trained(self, version: int) -> Params | None:
        """All weights of a version, or its adapters, in the dtypes in which they are trained; None: it is deleted.

        A version that one of the processes cannot read for another reason is not given to any of them. Both are told:
        the run does not need it.
        """
        lora_config, spec = self.parts.cfg.model.lora, self.parts.spec
        adapted = lora_config is not None
        specs: Any = lora.adapter_specs(spec, lora_config) if adapted else params.param_specs(spec)
        leaves, failure = dict[Path, np.ndarray](), ""
        try:
            if (sources := self.link.weights(version)) is None:
                failure = UNPUBLISHED
            else:
                expected = (trees.paths(specs), None) if adapted else (trees.of_floats(specs), "")
                _, leaves = engine_weights.read(self.folder, sources, *expected)
        except MissingError:
            failure = DELETED
        except (WeightsError, OSError) as error:
            failure = str(error)
        failure = next(filter(None, peers.meet(f"version {version} is read again", failure)), "")
        if not failure:
            return trees.placed(leaves, specs, self.parts.mesh, lambda path, array: array.dtype)
        if failure != UNPUBLISHED and not (failure == DELETED and self._deleted):
            self.note(f"the tokens of version {version} are not scored again: {failure}")
        if failure == DELETED:
            self._deleted.add(version)
        return None


def lacking(link: Client, folder: pathlib.Path, version: int, tick: Callable[[], None] = lambda: None) -> str:
    """Why nobody can have a version's weights; "" where somebody can. Reads all of them where no engine has them.

    Args:
      tick: called again and again while they are read.
    """
    sources = link.weights(version)
    if sources is None:
        return f"version {version} is not published."
    if any(_may_have(row, version) for row in link.status()["members"]["engine"].values()):
        return ""
    try:
        with weight_reader.OpenVersion(weights.path_of(folder, version)) as open_version:
            open_version.compare(tick)
    except WeightsError as failure:
        return str(failure)
    return ""


def _may_have(engine: Mapping[str, Any], version: int) -> bool:
    """Whether an engine has a version whole, for all that is known: one that waits for weights serves parts, too."""
    return engine["phase"] not in (WEIGHTS, WAITING) and version in engine["numbers"].get("versions", [])
