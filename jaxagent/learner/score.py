"""Scoring without training: log-probs and entropies under any parameters, and critic values, per sequence.

In: trajectories. Out: one f32[T] per trajectory, 0 outside action tokens. Used for the frozen reference, for the critic
before advantages are estimated, and for the engine-versus-trainer gap. Same packing, same forward as the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent.algorithms.streams import Streams, action_mask
from jaxagent.algorithms.value_losses import Categorical, Squared
from jaxagent.learner.batch import Batch
from jaxagent.learner.batching import Packer, unpack
from jaxagent.learner.update import same_plan, scalar, shard
from jaxagent.models import global_arrays
from jaxagent.types import Trajectory

Tree = Any  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class Scorer:
    """`scorer(params, trajectories) -> arrays`. Holds a compiled program, no arrays."""

    mesh: jax.sharding.Mesh
    packer: Packer
    program: Callable[[Tree, Batch, jax.Array], tuple[jax.Array, ...]]
    temperature: float  # that of a call which names none

    def __call__(
        self, params: Tree, trajectories: Sequence[Trajectory], temperature: float | None = None
    ) -> tuple[list[np.ndarray], ...]:
        """One list per output of the program, one f32[T] per trajectory in it. Another temperature compiles nothing."""
        at = scalar(self.temperature if temperature is None else temperature, self.mesh)
        streams = [Streams.of(t, policy_weights=action_mask(t)) for t in trajectories]
        batches = self.packer.pack(streams)
        same_plan("a scoring", batches)
        with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
            results = [self.program(params, shard(batch, self.mesh), at) for batch in batches]
        outputs = zip(*global_arrays.get(results), strict=True) if results else [[]] * self._outputs(params)
        return tuple(unpack(batches, output, streams) for output in outputs)

    def warm_up(self, params: Tree) -> None:
        """Compiles, by scoring padding."""
        with jax.set_mesh(self.mesh):
            empty = shard(self.packer.empty(), self.mesh)
            result = self.program(params, empty, scalar(self.temperature, self.mesh))
        global_arrays.get(result)  # outside, as in a call: where processes share the mesh, this is a program, too

    def _outputs(self, params: Tree) -> int:
        with jax.set_mesh(self.mesh):
            empty = shard(self.packer.empty(), self.mesh)
            return len(jax.eval_shape(self.program, params, empty, scalar(self.temperature, self.mesh)))


def policy_scorer(
    forward: Callable[[Tree, Batch, jax.Array], tuple[jax.Array, jax.Array]],
    temperature: float,
    packer: Packer,
    mesh: jax.sharding.Mesh,
) -> Scorer:
    """Scores (log-probs, entropies) of action tokens under whatever parameters it is called with.

    Args:
      forward: of forward.py.
      temperature: of calls that name none.
      packer, mesh: as the update's.
    """
    return Scorer(mesh, packer, jax.jit(forward), temperature)


def value_scorer(
    forward: Callable[[Tree, Batch], jax.Array],
    packer: Packer,
    mesh: jax.sharding.Mesh,
    loss: Squared | Categorical,
) -> Scorer:
    """Scores (values,) of the states in which action tokens were sampled; `loss` says what the head gives."""

    def values(critic: Tree, batch: Batch, _: jax.Array) -> tuple[jax.Array]:
        return (loss.values(forward(critic, batch)),)

    return Scorer(mesh, packer, jax.jit(values), 1.0)
