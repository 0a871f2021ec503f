"""Versions under LoRA: adapters alone, and the frozen weights that they change, which an engine process has once.

What is multiplied out here is multiplied out by the trainer's own function, from the same arrays in the same dtypes.
That it comes to the same bits is not assumed: a version says what its adapters make of their base, and every engine
compares.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

import jax

from jaxagent.config import Config, ConfigError
from jaxagent.fleet import weights
from jaxagent.fleet.leaves import Leaves, Path
from jaxagent.fleet.manifest import Manifest, WeightsError
from jaxagent.fleet.wire import Sources
from jaxagent.learner import digests, programs
from jaxagent.models import lora, params
from jaxagent.models.params import ArraySpec, Params
from jaxagent.models.spec import ModelSpec
from jaxagent.runs.fleet import trees
from jaxagent.runs.fleet.places import Places

logger = logging.getLogger(__name__)


class Base:
    """The frozen weights of a run, in an engine process, on its devices. One thread at a time may ask.

    Matrices that adapters change stay in the dtype in which they are stored, all else is in compute dtype and shared by
    every version.

    Args:
      cfg: of the run.
      spec, mesh: of the engine.
      reader: gives the frozen weights.
    """

    def __init__(self, cfg: Config, spec: ModelSpec, mesh: jax.sharding.Mesh, reader: Places):
        assert cfg.fleet is not None
        self._cfg, self._spec, self._mesh, self._reader = cfg, spec, mesh, reader
        self._strict = cfg.fleet.rule == "pinned" and cfg.numerics == "exact"
        self._adapters = lora.adapter_specs(spec, cfg.model.lora)
        self._digest: str | None = None
        self._params: Params | None = None
        self.differs = False  # this process has made other bits of a version's adapters than the trainer

    @property
    def digest(self) -> str | None:
        """Of the frozen weights that this process has; None: it has none yet."""
        return self._digest

    @property
    def like(self) -> dict[Path, ArraySpec]:
        """What a version consists of."""
        return trees.paths(self._adapters)

    def merged(self, value: Manifest, found: Leaves, ask: Callable[[], Sources]) -> Params:
        """A version, multiplied out.

        Args:
          value, found: its manifest, which names this base, and its adapters.
          ask: who has the version, and with it the base.

        Raises:
          WeightsError: the frozen weights cannot be had.
          ConfigError: this process does not multiply as the trainer does, where it must.
        """
        if self._params is None:
            self._params = self._had(value, ask)
            self._digest = value.base
        adapters = trees.placed(found, self._adapters, self._mesh, lambda path, array: array.dtype)
        with jax.set_mesh(self._mesh):
            policy = programs.merger(self._cfg)(self._params, adapters)
        made = digest_of_merged(policy, self._adapters)
        if made != value.merged:
            self._told(f"version {value.version} has adapters that make {value.merged} there and {made} here")
        return policy

    def _had(self, value: Manifest, ask: Callable[[], Sources]) -> Params:
        def base() -> Sources:
            return dataclasses.replace(ask(), version=weights.FIRST, digest=value.base)

        specs = params.param_specs(self._spec)
        try:
            _, found = self._reader.read(base, trees.paths(specs))
        except WeightsError as failure:
            raise type(failure)(
                f"the frozen weights that the adapters of version {value.version} change (digest {value.base}) cannot "
                f"be had: {failure}"
            ) from None
        changed = {("layers", name) for name in self._adapters}
        return trees.placed(
            found, specs, self._mesh, lambda path, array: array.dtype if path in changed else self._spec.compute_dtype
        )

    def _told(self, difference: str) -> None:
        text = f"This engine does not multiply adapters out as the trainer does: {difference}."
        if self._strict:
            raise ConfigError(
                f"{text} With fleet.rule='pinned' and numerics='exact' all processes must compute the same: give this "
                "process the trainer's devices, mesh and libraries, or use --config.numerics=fast."
            )
        if not self.differs:
            logger.warning("%s Said once.", text)
        self.differs = True


def digest_of_merged(policy: Params, names: Iterable[str]) -> str:
    """Of the matrices that adapters have changed. Processes that share the arrays must all call this."""
    changed = {name: getattr(policy.layers, name) for name in names}
    with jax.set_mesh(next(iter(changed.values())).sharding.mesh):
        return digests.digest(changed)
