"""Scoring without training: what a model says of the action tokens of sequences, under any parameters.

In: trajectories. Out: one f32[T, ...] per trajectory and output of a program, 0 outside action tokens. Used for the
frozen reference, for the critic before advantages are estimated, for the engine-versus-trainer gap, and for a teacher.
Same packing, same forward as the update.
Axis letters: B packed rows, T tokens, R targets per row, K top-k tokens, C candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent.algorithms.distill import Support
from jaxagent.algorithms.streams import Streams, action_mask
from jaxagent.algorithms.value_losses import Categorical, Squared
from jaxagent.learner import forward as forwards
from jaxagent.learner.batching import Packer, unpack
from jaxagent.learner.state import Batch
from jaxagent.learner.update import same_plan, scalar, shard
from jaxagent.models import global_arrays
from jaxagent.models.spec import ModelSpec
from jaxagent.types import Trajectory

Tree = Any  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class Scorer:
    """`scorer(params, trajectories) -> arrays`. Holds a compiled program, no arrays."""

    mesh: jax.sharding.Mesh
    packer: Packer
    program: Callable[[Tree, Batch, jax.Array], tuple[jax.Array, ...]]
    temperature: float  # that of a call which names none
    candidates: int = 0  # C: tokens that are asked about at each place, beside the one that stands there

    def __call__(
        self,
        params: Tree,
        trajectories: Sequence[Trajectory],
        temperature: float | None = None,
        candidates: Sequence[np.ndarray] | None = None,
    ) -> tuple[list[np.ndarray], ...]:
        """One list per output of the program, one f32[T, ...] per trajectory in it.

        `candidates` are i32[T, C] of each trajectory, None where C is 0. Another temperature compiles nothing.
        """
        at = scalar(self.temperature if temperature is None else temperature, self.mesh)
        streams = [Streams.of(t, policy_weights=action_mask(t)) for t in trajectories]
        batches = self._with_candidates(self.packer.pack(streams), candidates)
        same_plan("a scoring", batches)
        with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
            results = [self.program(params, shard(batch, self.mesh), at) for batch in batches]
        outputs = zip(*global_arrays.get(results), strict=True) if results else [[]] * self._outputs(params)
        return tuple(unpack(batches, output, streams) for output in outputs)

    def warm_up(self, params: Tree) -> None:
        """Compiles, by scoring padding."""
        with jax.set_mesh(self.mesh):
            result = self.program(params, *self._padding())
        global_arrays.get(result)  # outside, as in a call: where processes share the mesh, this is a program, too

    def _outputs(self, params: Tree) -> int:
        with jax.set_mesh(self.mesh):
            return len(jax.eval_shape(self.program, params, *self._padding()))

    def _padding(self) -> tuple[Batch, jax.Array]:
        (empty,) = self._with_candidates([self.packer.empty()], [])
        return shard(empty, self.mesh), scalar(self.temperature, self.mesh)

    def _with_candidates(self, batches: list[Batch], candidates: Sequence[np.ndarray] | None) -> list[Batch]:
        if not self.candidates:
            return batches
        supports = [Support(ids, np.zeros(ids.shape, np.float32)) for ids in candidates or ()]
        return with_support(batches, supports, self.candidates)


def policy_scorer(
    forward: Callable[[Tree, Batch, jax.Array], tuple[jax.Array, jax.Array]],
    temperature: float,
    packer: Packer,
    mesh: jax.sharding.Mesh,
) -> Scorer:
    """Scores (log-probs, entropies) of action tokens under whatever parameters it is called with.

    `forward` is of forward.py; `temperature` that of calls which name none.
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


def top_scorer(spec: ModelSpec, packer: Packer, mesh: jax.sharding.Mesh, k: int, candidates: int) -> Scorer:
    """The fields of `distill.Scores`, of the k likeliest tokens and C `candidates`, under any parameters of `spec`."""
    return Scorer(mesh, packer, jax.jit(forwards.top_forward(spec, k)), 1.0, candidates)


def with_support(batches: Sequence[Batch], supports: Sequence[Support], width: int) -> list[Batch]:
    """The batches with `support` and `teacher_logprobs` i32 and f32 [B, R, width]; padding has no entry that counts.

    `supports`: [T, width] of each sequence that was packed.
    """
    starts = np.cumsum([0, *(len(support.ids) for support in supports)])
    ids = np.concatenate([np.zeros((0, width), np.int32), *(support.ids for support in supports)])
    logprobs = np.concatenate([np.zeros((0, width), np.float32), *(support.teacher_logprobs for support in supports)])
    out = []
    for batch in batches:
        real = batch.sequence >= 0
        at = starts[batch.sequence[real]] + batch.offset[real]
        tokens = np.zeros((*real.shape, width), np.int32)
        teacher_logprobs = np.full((*real.shape, width), -np.inf, np.float32)
        tokens[real], teacher_logprobs[real] = ids[at], logprobs[at]
        out.append(batch.replace(support=tokens, teacher_logprobs=teacher_logprobs))
    return out
