"""Versions of the weights, from wherever they are (places.py), on the devices of an engine.

Under LoRA a version is adapters alone, and what they are multiplied into an engine has once (adapters.py).
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jaxagent.config import Config
from jaxagent.fleet import leaves, weights
from jaxagent.fleet.leaves import Leaves
from jaxagent.fleet.manifest import MissingError
from jaxagent.fleet.weight_ahead import Ahead
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.wire import Sources
from jaxagent.models import params
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec
from jaxagent.runs.fleet import trees
from jaxagent.runs.fleet.adapters import Base
from jaxagent.runs.fleet.places import Places


class Link(Protocol):
    """Who knows where versions are: `fleet.client.Client`."""

    def weights(self, version: int) -> Sources | None:
        """Where a version's weights are; None: it is not published."""
        ...


def sources_of(link: Link, version: int) -> Sources:
    """Where a version is. Raises MissingError."""
    sources = link.weights(version)
    if sources is None:
        raise MissingError(f"the coordinator knows of no version {version}.")
    return sources


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
        of_base = fetcher.of_base()
        self._own, self._seen, self._fetchers, self._link = own, seen, (fetcher, of_base), link
        self._of_what = None if cfg.model.lora else ""  # adapters to whatever weights, or full weights
        self._ahead = Ahead(self._fetch)
        self._spec, self._mesh, self._versions = spec, mesh, Places(seen, own, fetcher, fetch_s)
        base = Places(seen / weights.BASE, own / weights.BASE, of_base, fetch_s)
        self._base = Base(cfg, spec, mesh, base) if cfg.model.lora else None

    def params(self, version: int) -> Params:
        """A version, whole, on the devices of the mesh.

        Raises:
          WeightsError: it cannot be had, or is not what was published; under LoRA, also: it has adapters to other
            weights than those that this process has.
          ConfigError: this process does not compute what the trainer computes, where it must.
          OSError: the disk is full, or failed.
        """
        ask = functools.partial(sources_of, self._link, version)
        with self._ahead.instead(version):
            if self._base is not None:
                value, found = self._versions.read(ask, self._base.like, self._base.digest)
                return self._base.merged(value, found, ask)
            _, found = self._versions.read(ask, trees.of_floats(params.param_specs(self._spec)))
            return place(found, self._spec, self._mesh)

    def expect(self, version: int) -> None:
        """A version will probably be asked for: it is fetched meanwhile, unless the trainer's folder has it."""
        self._ahead.expect(version)

    def _fetch(self, version: int, wanted: Callable[[], bool]) -> None:
        """Ahead of time: once through all sources, and whoever needs the version comes again."""
        if not any(weights.path_of(folder, version).exists() for folder in (self._seen, self._own)):
            ask = functools.partial(sources_of, self._link, version)
            self._fetchers[0].fetch(ask, 0.0, self._of_what, wanted=wanted)

    def forget(self, below: int) -> None:
        """Deletes older versions of this process's folder, but for the one by which engines are compared."""
        weights.delete(self._own, below)

    def numbers(self) -> dict[str, Any]:
        """Versions that this process hands on, and what went over the network."""
        numbers = [fetcher.numbers() for fetcher in self._fetchers]
        fetched = {name: sum(each[name] for each in numbers) for name in numbers[0]}
        differs = self._base is not None and self._base.differs  # it makes other bits of adapters than the trainer
        return {"versions": self.here(), **fetched, "merge_differs": float(differs)}

    def here(self) -> list[int]:
        """Versions of which this process has chunks to hand on; who has one of adapters has or fetches their base."""
        if not self._own.is_dir():
            return []
        copying = [path.name.split("-")[1] for path in self._own.glob(".copying-*")]
        return sorted({int(number) for number in copying} | set(weights.versions(self._own)))


def place(found: Leaves, spec: ModelSpec, mesh: jax.sharding.Mesh) -> Params:
    """Full weights on the devices of a mesh, in compute dtype, as an engine takes them."""
    return trees.placed(found, params.param_specs(spec), mesh, lambda path, array: spec.compute_dtype)


def blank(spec: ModelSpec, mesh: jax.sharding.Mesh) -> Params:
    """Zeros, with which an engine is compiled before there are weights."""
    like = {
        path: np.broadcast_to(np.zeros((), leaves.named(array.dtype)), array.shape)
        for path, array in trees.paths(params.param_specs(spec)).items()
    }
    return place(like, spec, mesh)
