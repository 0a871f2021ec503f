"""Rollouts in a trainer of several processes: process 0 plays, on its own devices, and all have what was played.

An engine cannot run on the mesh of all processes: it decides by itself, at any time, what to compute next, and they
would have to decide alike. So process 0 has an engine on its own devices, with a copy of the weights; the others take
part in copying them. What process 0 plays is sent to the others, so every process goes on with the same episodes and
comes to the same decisions (when a gate opens, when to stop). With engine processes elsewhere, only evaluations and
the stages before RL are played like this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxagent.config import ConfigError
from jaxagent.data import codec
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.learner import peers
from jaxagent.models.params import Params
from jaxagent.rollout.workers import STOP_TIMEOUT_S, Rollout, Workers
from jaxagent.types import Group, Task


class PlayedByFirst(Workers):
    """Workers of which those of process 0 play; `collect` gives every process the same groups."""

    def collect(self, tasks: Sequence[Task], group_size: int, rollout: Rollout, deadline_s: float) -> list[Group]:
        """As `Workers.collect`; every process calls it with the same tasks."""
        groups: list[Group] = []

        def play() -> list[list[dict]]:
            groups.extend(Workers.collect(self, tasks, group_size, rollout, deadline_s))
            return [[codec.encode_episode(episode) for episode in group.episodes] for group in groups]

        longest_s = self.longest_s(len(tasks) * group_size, deadline_s)
        rows = peers.share("the episodes of process 0", play, longest_s + STOP_TIMEOUT_S)
        if peers.is_first():
            return groups
        return [
            Group(task, [codec.decode_episode(row, "an episode of process 0") for row in episodes])
            for task, episodes in zip(tasks, rows, strict=True)
        ]


def own_mesh(mesh: Mesh) -> Mesh:
    """The part of a trainer's mesh that this process owns: `expert` and `tensor` as they are, rows split over the rest.

    Raises:
      ConfigError: these lie across processes.
    """
    inner = expert, tensor = mesh.devices.shape[-2:]
    mine = [part for part in mesh.devices.reshape(-1, *inner) if all(d in jax.local_devices() for d in part.flat)]
    if len(mine) * expert * tensor * peers.count() != mesh.devices.size:
        axes = f"config.mesh.tensor={tensor}" if expert == 1 else f"config.mesh.expert={expert} x tensor={tensor}"
        raise ConfigError(f"{axes} must divide the devices of each trainer process.")
    shape = (len(mine), *(1,) * (mesh.devices.ndim - 3), *inner)
    return Mesh(np.array(mine).reshape(shape), mesh.axis_names, axis_types=(AxisType.Explicit,) * len(shape))


def copied(model: LanguageModel, params: Params, mesh: Mesh, own: Mesh) -> Params:
    """Weights on this process's devices alone, in the layout of generation; every process has to call this.

    One program gathers what fsdp splits; what its devices then hold is taken as it is.
    """
    with jax.set_mesh(mesh):
        gathered = model.lay_out(params)

    def to_own_mesh(x: jax.Array) -> jax.Array:
        parts = {part.device: part.data for part in x.addressable_shards}
        where = NamedSharding(own, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, where, [parts[d] for d in own.devices.flat])

    return jax.tree.map(to_own_mesh, gathered)


class Replica(Driver):
    """The engine of process 0. Weights come as the trainer has them; every process calls `update_params`."""

    copy: Callable[[Params], Params]

    def update_params(self, params: Params, version: int) -> None:
        """As the driver's, of a copy."""
        super().update_params(self.copy(params), version)


class NoEngine:
    """What the other processes have in its place: it helps to copy weights, and plays nothing."""

    def __init__(self, copy: Callable[[Params], Params]):
        self._copy = copy

    def update_params(self, params: Params, version: int) -> None:
        """Takes part in the copying; this process's copy is dropped."""
        self._copy(params)

    def stats(self) -> dict[str, float]:
        """No counters: the engine's are process 0's."""
        return {}

    def check(self) -> None:
        """Nothing here can have died."""
