"""Versions of the weights in an engine process: where it finds them, and how they come onto its devices.

The trainer's folder is read where this process sees it; else a version is fetched over HTTP into a folder of its own,
and handed on from there. Whatever comes is compared, byte by byte, with what the coordinator says was published.

Under LoRA a version is adapters alone, and an engine has the frozen weights that they change once. It multiplies them
out by the trainer's own function, from the same arrays in the same dtypes. That this comes to the same bits is not
assumed: a version says what its adapters make of their base, and every engine compares.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxagent.config import Config, ConfigError
from jaxagent.fleet import weight_reader, weights
from jaxagent.fleet.client import Client
from jaxagent.fleet.leaves import Leaves, Path, named
from jaxagent.fleet.manifest import DamagedError, Manifest, MismatchError, MissingError, WeightsError
from jaxagent.fleet.weight_ahead import Ahead
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.wire import Sources
from jaxagent.learner import programs
from jaxagent.models import lora, params
from jaxagent.models.params import ArraySpec, Params
from jaxagent.models.spec import ModelSpec
from jaxagent.runs.fleet import trees
from jaxagent.runs.fleet.trees import digest_of_merged

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class EngineVersions:
    """The versions that an engine can have."""

    cfg: Config
    spec: ModelSpec
    mesh: jax.sharding.Mesh  # of the engine
    link: Client  # to the coordinator
    reader: VersionReader

    def __post_init__(self) -> None:
        self._kind_of_base = None if self.cfg.model.lora else ""  # adapters to whatever weights, or full weights
        self._ahead = Ahead(self._fetch)
        of_base = self.reader.of_base()
        self._fetchers = (self.reader.fetcher, of_base.fetcher)
        self._base = FrozenBase(self.cfg, self.spec, self.mesh, of_base) if self.cfg.model.lora else None

    def params(self, version: int) -> Params:
        """A version, whole, on the devices of the mesh.

        Raises:
          WeightsError: it cannot be had, or is not what was published; under LoRA, also: it has adapters to other
            weights than those that this process has.
          ConfigError: this process does not compute what the trainer computes, where it must.
          OSError: the disk is full, or failed.
        """
        ask = functools.partial(sources_of, self.link, version)
        with self._ahead.instead(version):
            if self._base is not None:
                manifest, adapters = self.reader.read(ask, self._base.like, self._base.digest)
                return self._base.merged(manifest, adapters, ask)
            _, leaves = self.reader.read(ask, trees.of_floats(params.param_specs(self.spec)))
            return place(leaves, self.spec, self.mesh)

    def expect(self, version: int) -> None:
        """A version will probably be asked for: it is fetched meanwhile, unless the trainer's folder has it."""
        self._ahead.expect(version)

    def _fetch(self, version: int, still_wanted: Callable[[], bool]) -> None:
        """Ahead of time: once through all sources, and whoever needs the version comes again."""
        if not any(
            weights.path_of(folder, version).exists() for folder in (self.reader.trainers_folder, self.reader.own)
        ):
            ask = functools.partial(sources_of, self.link, version)
            self._fetchers[0].fetch(ask, 0.0, self._kind_of_base, still_wanted=still_wanted)

    def forget(self, below: int) -> None:
        """Deletes older versions of this process's folder, but for the one by which engines are compared."""
        weights.delete(self.reader.own, below)

    def numbers(self) -> dict[str, Any]:
        """Versions that this process hands on, and what went over the network."""
        numbers = [fetcher.numbers() for fetcher in self._fetchers]
        fetched = {name: sum(each[name] for each in numbers) for name in numbers[0]}
        differs = self._base is not None and self._base.differs  # it makes other bits of adapters than the trainer
        return {"versions": self.versions_to_hand_on(), **fetched, "merge_differs": float(differs)}

    def versions_to_hand_on(self) -> list[int]:
        """Versions of which this process has chunks to hand on; who has one of adapters has or fetches their base."""
        own = self.reader.own
        copying = [path.name.split("-")[1] for path in own.glob(".copying-*")]
        return sorted({int(number) for number in copying} | set(weights.versions(own)))


def place(leaves: Leaves, spec: ModelSpec, mesh: jax.sharding.Mesh) -> Params:
    """Full weights on the devices of a mesh, in compute dtype, as an engine takes them."""
    return trees.placed(
        leaves, params.param_specs(spec), mesh, lambda path, array: array.dtype_among(spec.compute_dtype)
    )


def blank(spec: ModelSpec, mesh: jax.sharding.Mesh) -> Params:
    """Zeros, with which an engine is compiled before there are weights."""
    like = {
        path: np.broadcast_to(np.zeros((), named(array.dtype)), array.shape)
        for path, array in trees.paths(params.param_specs(spec)).items()
    }
    return place(like, spec, mesh)


def sources_of(link: Client, version: int) -> Sources:
    """Where a version is. Raises MissingError."""
    sources = link.weights(version)
    if sources is None:
        raise MissingError(f"the coordinator knows of no version {version}.")
    return sources


@dataclasses.dataclass(frozen=True)
class VersionReader:
    """Reads versions, or the frozen weights under them, from the first place that has them as they were published."""

    trainers_folder: pathlib.Path  # the trainer's folder, which this process may see or not
    own: pathlib.Path  # this process's
    fetcher: WeightFetcher  # into `own`
    fetch_s: float  # longest time for a fetch

    def of_base(self) -> VersionReader:
        """Another one, for the frozen weights that adapters change; they lie among the versions."""
        folders = self.trainers_folder / weights.BASE, self.own / weights.BASE
        return VersionReader(*folders, self.fetcher.of_base(), self.fetch_s)

    def read(
        self, ask: Callable[[], Sources], like: Mapping[Path, ArraySpec], base: str | None = ""
    ) -> tuple[Manifest, Leaves]:
        """What `ask` names, from the first place that has it as it was published.

        Args:
          ask: what is wanted and who has it; asked again while it is fetched.
          like, base: what it must be, as in `weight_reader.hold`.

        Raises:
          WeightsError: it cannot be had, or is not what was published.
          OSError: the disk is full, or failed.
        """
        sources = ask()
        what = f"version {sources.version} in {self.own.name}"
        try:
            return read(self.trainers_folder, sources, like, base)
        except MissingError:
            pass  # another machine's, most likely
        except WeightsError as failure:
            logger.warning("The trainer's folder does not give %s: %s", what, failure)
        try:
            return read(self.own, sources, like, base)
        except MissingError:
            pass
        except WeightsError as failure:
            logger.warning("What lies here of %s is fetched again: %s", what, failure)
            self.fetcher.drop(sources.version)
        self.fetcher.fetch(ask, self.fetch_s, base, like)
        return read(self.own, sources, like, base)


def read(
    folder: pathlib.Path, sources: Sources, like: Mapping[Path, ArraySpec], base: str | None = ""
) -> tuple[Manifest, Leaves]:
    """What lies in a folder, if it is what was published.

    Raises:
      WeightsError: it is not, or is not there.
    """
    with weight_reader.hold(folder, sources.version, sources.lineage, base, like) as open_version:
        if open_version.manifest.digest != sources.digest:
            raise MismatchError(
                f"{folder} has version {sources.version} with digest {open_version.manifest.digest}, and "
                f"{sources.digest} was published."
            )
        try:
            return open_version.manifest, open_version.read()
        except FileNotFoundError as failure:  # deleted meanwhile, where the file system has no locks
            raise DamagedError(str(failure)) from None


@dataclasses.dataclass(eq=False)
class FrozenBase:
    """The frozen weights of a run, in an engine process, on its devices. One thread at a time may ask.

    Matrices that adapters change stay in the dtype in which they are stored, all else is in compute dtype and shared by
    every version.
    """

    cfg: Config  # of the run
    spec: ModelSpec
    mesh: jax.sharding.Mesh  # of the engine
    reader: VersionReader  # gives the frozen weights

    def __post_init__(self) -> None:
        assert self.cfg.fleet is not None
        self._strict = self.cfg.fleet.rule == "pinned" and self.cfg.numerics == "exact"
        self._adapters = lora.adapter_specs(self.spec, self.cfg.model.lora)
        self._digest: str | None = None
        self._params: Params | None = None
        self.differs = False  # this process has made other bits of a version's adapters than the trainer

    @property
    def digest(self) -> str | None:
        """The digest of the frozen weights that this process has; None: it has none yet."""
        return self._digest

    @property
    def like(self) -> dict[Path, ArraySpec]:
        """What a version consists of."""
        return trees.paths(self._adapters)

    def merged(self, manifest: Manifest, leaves: Leaves, ask: Callable[[], Sources]) -> Params:
        """A version, multiplied out.

        Args:
          manifest, leaves: its manifest, which names this base, and its adapters.
          ask: who has the version, and with it the base.

        Raises:
          WeightsError: the frozen weights cannot be had.
          ConfigError: this process does not multiply as the trainer does, where it must.
        """
        if self._params is None:
            self._params = self._read_base(manifest, ask)
            self._digest = manifest.base
        adapters = trees.placed(leaves, self._adapters, self.mesh, lambda path, array: array.dtype)
        with jax.set_mesh(self.mesh):
            policy = programs.merger(self.cfg)(self._params, adapters)
        own_digest = digest_of_merged(policy, self._adapters)
        if own_digest != manifest.merged:
            self._report_difference(
                f"version {manifest.version} has adapters that make {manifest.merged} there and {own_digest} here"
            )
        return policy

    def _read_base(self, manifest: Manifest, ask: Callable[[], Sources]) -> Params:
        def base() -> Sources:
            return dataclasses.replace(ask(), version=weights.FIRST, digest=manifest.base)

        specs = params.param_specs(self.spec)
        try:
            _, leaves = self.reader.read(base, trees.paths(specs))
        except WeightsError as failure:
            raise type(failure)(
                f"the frozen weights that the adapters of version {manifest.version} change (digest {manifest.base}) "
                f"cannot be had: {failure}"
            ) from None
        changed = {("layers", *path[:-1]) for path in self.like}
        used = self.spec.compute_dtype
        return trees.placed(
            leaves, specs, self.mesh, lambda path, array: array.dtype if path in changed else array.dtype_among(used)
        )

    def _report_difference(self, difference: str) -> None:
        text = f"This engine does not multiply adapters out as the trainer does: {difference}."
        if self._strict:
            raise ConfigError(
                f"{text} With fleet.rule='pinned' and numerics='exact' all processes must compute the same: give this "
                "process the trainer's devices, mesh and libraries, or use --config.numerics=fast."
            )
        if not self.differs:
            logger.warning("%s Said once.", text)
        self.differs = True
