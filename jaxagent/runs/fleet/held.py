"""Versions of the weights, from wherever they are, on the devices of an engine.

The trainer's folder is read where it is to be seen; else a version is fetched over HTTP into a folder of this process,
which hands it on. Whatever comes is compared, byte by byte, with what the coordinator says was published.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import Any, Protocol

import jax
import numpy as np

from jaxagent.config import Config
from jaxagent.fleet import leaves, weight_reader, weights
from jaxagent.fleet.leaves import Leaves, Path
from jaxagent.fleet.manifest import DamagedError, MismatchError, MissingError, WeightsError
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.wire import Sources
from jaxagent.models import lora, params, sharding
from jaxagent.models.params import ArraySpec, Params
from jaxagent.models.spec import ModelSpec
from jaxagent.runs.fleet import trees

logger = logging.getLogger(__name__)


class Link(Protocol):
    """Who knows where versions are: `fleet.client.Client`."""

    def weights(self, version: int) -> Sources | None:
        """Where a version's weights are; None: it is not published."""
        ...


class HeldVersions:
    """The versions that an engine can have.

    Args:
      cfg: of the run.
      spec, mesh: of the engine.
      link: to the coordinator.
      fetcher: fetches into `own`.
      own: this process's folder of versions.
      seen: the trainer's folder, which this process may see or not.
      fetch_s: longest time for fetching a version.
    """

    def __init__(
        self,
        cfg: Config,
        spec: ModelSpec,
        mesh: jax.sharding.Mesh,
        link: Link,
        fetcher: WeightFetcher,
        own: pathlib.Path,
        seen: pathlib.Path,
        fetch_s: float,
    ):
        self._cfg, self._spec, self._mesh, self._link = cfg, spec, mesh, link
        self._fetcher, self._own, self._seen, self._fetch_s = fetcher, own, seen, fetch_s
        self._like = published_as(cfg, spec)

    def params(self, version: int) -> Params:
        """A version, on the devices.

        Raises:
          WeightsError: it cannot be had, or is not what was published.
          OSError: the disk is full, or failed.
        """
        return place(self._read(version), self._spec, self._mesh)

    def forget(self, below: int) -> None:
        """Deletes older versions of this process's folder, but for the one by which engines are compared."""
        weights.delete(self._own, below)

    def numbers(self) -> dict[str, Any]:
        """Versions that this process hands on, and what went over the network."""
        return {"versions": self.here(), **self._fetcher.numbers()}

    def here(self) -> list[int]:
        """Versions of which this process has chunks to hand on."""
        if not self._own.is_dir():
            return []
        copying = [path.name.split("-")[1] for path in self._own.glob(".copying-*")]
        return sorted({int(number) for number in copying} | set(weights.versions(self._own)))

    def _read(self, version: int) -> Leaves:
        sources = self._sources(version)
        try:
            return self._from(self._seen, sources)
        except MissingError:
            pass  # another machine's, most likely
        except WeightsError as failure:
            logger.warning("The trainer's folder does not give version %d: %s", version, failure)
        try:
            return self._from(self._own, sources)
        except MissingError:
            pass
        except WeightsError as failure:
            logger.warning("What lies here of version %d is fetched again: %s", version, failure)
            self._fetcher.drop(version)
        self._fetcher.fetch(lambda: self._sources(version), self._fetch_s, like=self._like)
        return self._from(self._own, sources)

    def _sources(self, version: int) -> Sources:
        sources = self._link.weights(version)
        if sources is None:
            raise MissingError(f"the coordinator knows of no version {version}.")
        return sources

    def _from(self, folder: pathlib.Path, sources: Sources) -> Leaves:
        """What lies in a folder, if it is what was published."""
        with weight_reader.hold(folder, sources.version, sources.lineage, like=self._like) as held:
            if held.manifest.digest != sources.digest:
                raise MismatchError(
                    f"{folder} has version {sources.version} with digest {held.manifest.digest}, and "
                    f"{sources.digest} was published."
                )
            try:
                return held.read()
            except FileNotFoundError as failure:  # deleted meanwhile, where the file system has no locks
                raise DamagedError(str(failure)) from None


def published_as(cfg: Config, spec: ModelSpec) -> dict[Path, ArraySpec]:
    """What a version of this model consists of; of LoRA, the merged matrices are in compute dtype."""
    like = dict(trees.paths(params.param_specs(spec)))
    if cfg.model.lora.rank:
        for name in lora.adapter_specs(spec, cfg.model.lora):
            path = ("layers", name)
            like[path] = dataclasses.replace(like[path], dtype=cfg.model.compute_dtype)
    return like


def place(found: Leaves, spec: ModelSpec, mesh: jax.sharding.Mesh) -> Params:
    """Weights on the devices of a mesh, in compute dtype, as an engine takes them.

    They go over leaf by leaf, each device gets its own part, and a leaf's original is gone when the next one goes over.
    The cast is the one by which an engine takes weights that it is given in another dtype.
    """

    def one(path: Path, array: ArraySpec, where: jax.sharding.Sharding) -> jax.Array:
        leaf = found[path]
        placed = jax.make_array_from_callback(array.shape, where, lambda index: np.asarray(leaf[index]))
        return jax.block_until_ready(placed.astype(spec.compute_dtype))

    specs = params.param_specs(spec)
    shardings = trees.paths(params.shardings(spec, mesh, sharding.TRAIN))
    with jax.set_mesh(mesh):
        filled = [one(path, array, shardings[path]) for path, array in trees.paths(specs).items()]
    return jax.tree.unflatten(jax.tree.structure(specs), filled)


def blank(spec: ModelSpec, mesh: jax.sharding.Mesh) -> Params:
    """Zeros, with which an engine is compiled before there are weights."""
    like = {
        path: np.broadcast_to(np.zeros((), leaves.named(array.dtype)), array.shape)
        for path, array in trees.paths(params.param_specs(spec)).items()
    }
    return place(like, spec, mesh)
