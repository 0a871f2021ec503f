"""The model seen by the learner: parameters and a `Batch` -> numbers per target. The only learner file on the models.

In: parameters and packed rows. Out: log-probs and entropies of the targets, or the critic's values, f32[B, R].
ONE forward pass scores action tokens and ECHO's observation tokens alike: both are just targets.
Axis letters: B packed rows, T tokens, R target positions per row, E embed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxagent.algorithms.distill import DIVERGENCES, renormalise
from jaxagent.config import DistillConfig
from jaxagent.learner.batch import Batch
from jaxagent.models import critic as critic_model
from jaxagent.models import exact, scores, sharding
from jaxagent.models.logprobs import token_logprobs
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec
from jaxagent.models.transformer import forward_packed


def policy_forward(
    spec: ModelSpec, tiling: exact.Tiling | None = None
) -> Callable[[Params, Batch, float], tuple[jax.Array, jax.Array]]:
    """A function: params, batch, temperature -> (log-probs f32[B, R], entropies f32[B, R]).

    Targets with a cross-entropy weight are scored at temperature 1, all others at `temperature`. With a `tiling`, the
    engine's, the log-probs are bit for bit those the engine would record; gradients are those of the ordinary pass.
    """

    def forward(params: Params, batch: Batch, temperature: float) -> tuple[jax.Array, jax.Array]:
        return _policy_scores(params, spec, tiling, batch, _heads(params, spec, batch), temperature)

    return forward


def distill_forward(
    spec: ModelSpec, distill: DistillConfig, teacher: ModelSpec | None, tiling: exact.Tiling | None = None
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """As `policy_forward`, and third the divergence f32[B, R] to a teacher, in nats, 0 where it has no weight.

    With a spec of the `teacher` the function takes its parameters as a last argument, and whole vocabularies (their
    common part) are compared, a chunk of tokens at a time. Without, the batch says the support and what the teacher
    thinks of it. Both distributions are at `temperature`.
    """
    compare = functools.partial(DIVERGENCES[distill.loss], beta=distill.jsd_beta)

    def forward(
        params: Params, batch: Batch, temperature: float, *frozen: Params
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = _heads(params, spec, batch)
        sides, rest = [scores.Side(params, spec, _flat(x))], [_flat(batch.distill_weights != 0)]
        if teacher is not None:
            (weights,) = frozen
            y = jax.lax.stop_gradient(_heads(weights, teacher, batch))
            sides.append(scores.Side(jax.lax.stop_gradient(weights), teacher, _flat(y)))
            function = functools.partial(_compare_whole, compare, temperature)
        else:
            rest += [_flat(batch.support), _flat(batch.teacher_logprobs)]
            function = functools.partial(_compare_top_k, compare, temperature)
        divergence = sharding.split_rows(scores.map_scores(function, sides, *rest), *x.shape[:2])
        return *_policy_scores(params, spec, tiling, batch, x, temperature), divergence

    return forward


def top_forward(spec: ModelSpec, k: int, temperature: float) -> Callable[[Params, Batch], scores.TopLogprobs]:
    """A function: params, batch -> log-probs [B, R, ...] of targets, of the k likeliest and of `batch.support`."""

    def forward(params: Params, batch: Batch) -> scores.TopLogprobs:
        x = _heads(params, spec, batch)
        candidates = batch.targets[..., None][..., :0] if batch.support is None else batch.support
        flat = scores.top_logprobs(params, spec, _flat(x), _flat(batch.targets), _flat(candidates), k, temperature)
        return jax.tree.map(lambda a: sharding.split_rows(a, *x.shape[:2]), flat)

    return forward


def _compare_whole(compare: Callable, temperature: float, student, teacher, live) -> jax.Array:
    """f32[...] for logits [..., V] of both."""
    live = live[..., None]
    return compare(renormalise(student, live, temperature), renormalise(teacher, live, temperature), live)


def _compare_top_k(compare: Callable, temperature: float, student, live, ids, teacher) -> jax.Array:
    """f32[...] for the student's logits [..., V] and the teacher's log-probs [..., K] of tokens ids."""
    support = jnp.isfinite(teacher) & live[..., None]
    picked = jnp.take_along_axis(student, ids, axis=-1)
    return compare(renormalise(picked, support, temperature), renormalise(teacher, support, 1.0), support)


def _policy_scores(
    params: Params,
    spec: ModelSpec,
    tiling: exact.Tiling | None,
    batch: Batch,
    x: jax.Array,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies f32[B, R] of the targets from hidden states x[B, R, E]."""
    if temperature != 1.0:  # logits are linear in x
        x = jnp.where((batch.ce_weights != 0)[..., None], x * jnp.asarray(temperature, x.dtype), x)
    b, r, e = x.shape
    of_targets = token_logprobs(params, spec, x.reshape(b * r, e), batch.targets.reshape(b * r), temperature)
    rows = sharding.out(sharding.row_axes(x), None)
    logprobs, entropy = (score.reshape(b, r, out_sharding=rows) for score in of_targets)
    if tiling is None:
        return logprobs, entropy
    same = exact.packed_logprobs(
        jax.lax.stop_gradient(params),
        spec,
        tiling,
        batch.tokens,
        batch.positions,
        batch.head_positions,
        batch.targets,
        jnp.where(batch.ce_weights != 0, 1.0, jnp.float32(temperature)),
    )
    return exact.with_value(logprobs, same), entropy


def value_forward(spec: ModelSpec) -> Callable[[critic_model.Critic, Batch], jax.Array]:
    """A function: critic, batch -> values f32[B, R] of the states in which the targets were sampled."""

    def forward(critic: critic_model.Critic, batch: Batch) -> jax.Array:
        return critic_model.values(critic, _heads(critic.backbone, spec, batch))

    return forward


def _flat(a: jax.Array) -> jax.Array:
    """[B, R, ...] -> [B * R, ...]."""
    return sharding.merge_rows(jnp.asarray(a))


def _heads(params: Params, spec: ModelSpec, batch: Batch) -> jax.Array:
    return forward_packed(params, spec, batch.tokens, batch.positions, batch.segments, batch.head_positions)
