"""The model seen by the learner: parameters and a `Batch` -> numbers per target. The only learner file on the models.

In: parameters and packed rows. Out: log-probs and entropies of the targets, or the critic's values, f32[B, R].
ONE forward pass scores action tokens and ECHO's observation tokens alike: both are just targets.
Axis letters: B packed rows, T tokens, R target positions per row, E embed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxagent.algorithms.distill import divergences, renormalise
from jaxagent.algorithms.teachers import Divergence
from jaxagent.config import LoraConfig
from jaxagent.learner.state import Batch, Frozen, check_batch
from jaxagent.models import choices, exact, lora, scores, sharding
from jaxagent.models import critic as critic_model
from jaxagent.models.logprobs import token_scores
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec
from jaxagent.models.transformer import forward_packed

# params, batch, hidden states [B, R, E], temperature, teacher's params -> f32[B, R]
Compare = Callable[[Params, Batch, jax.Array, jax.Array, Params | None], jax.Array]


def policy_forward(
    spec: ModelSpec,
    tiling: exact.Tiling | None = None,
    adapters: LoraConfig | None = None,
    log_z: bool = False,
    compare: Compare | None = None,
    tells_routing: bool = False,
    watches: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """A function: params, batch, temperature f32[] (may be traced)[, frozen, teacher] -> (log-probs, entropies).

    Both f32[B, R]. Targets with a cross-entropy weight are scored at temperature 1, all others at `temperature`. Tokens
    go to the experts that the batch has recorded for them.

    Args:
      spec: of the policy.
      tiling: the engine's. Then the log-probs are bit for bit those the engine would record; gradients are those of
        the ordinary pass.
      adapters: with a `Frozen` as fourth argument, params are LoRA adapters of this config beside its base.
      log_z, compare, tells_routing, watches: with any there is a third result, `loss.Extras`: the normalisers, the
        divergences of `compare_to_teacher`, which reads the fifth argument, how far recorded experts are those of
        today, and the load of experts.
    """

    def forward(
        params: Params | lora.Adapters,
        batch: Batch,
        temperature: jax.Array,
        frozen: Frozen | None = None,
        teacher: Params | None = None,
    ) -> tuple[Any, ...]:
        policy = params if frozen is None else frozen.merged
        unsplit, batch = batch, _over_context(batch)
        params = params if frozen is None else lora.adapt(frozen.base, params, adapters)
        hidden, differing, load = _replayed_heads(params, spec, batch, watches)
        # Logits are linear in x; at temperature 1 this is the identity.
        x = jnp.where((batch.ce_weights != 0)[..., None], hidden * jnp.asarray(temperature, hidden.dtype), hidden)
        # Rows that share have room for many more targets than most of them hold.
        live = None if batch.ends is None else _flat(batch.sequence >= 0)
        of_targets = token_scores(params, spec, _flat(x), _flat(batch.targets), temperature, live)
        read_scores = of_targets[: 3 if log_z else 2]
        logprobs, entropy, *normalisers = (_targets(score, x) for score in read_scores)
        more: dict[str, Any] = {"log_z": normalisers[0]} if log_z else {}
        more |= {"load": load} if watches else {}
        if compare is not None:
            more["divergence"] = compare(params, batch, hidden, temperature, teacher)
        if tells_routing and differing is not None:
            recorded = choices.recorded(unsplit.experts).astype(jnp.float32)
            more["routing_recorded"] = jnp.take_along_axis(recorded, unsplit.head_positions, axis=1)
            more["routing_differs"] = sharding.whole_rows(differing) / unsplit.experts.shape[-1]
        extras = (more,) if more else ()
        if tiling is None:
            return logprobs, entropy, *extras
        same = exact.packed_logprobs(
            jax.lax.stop_gradient(policy),
            spec,
            tiling,
            unsplit.tokens,
            unsplit.positions,
            unsplit.head_positions,
            unsplit.targets,
            jnp.where(unsplit.ce_weights != 0, 1.0, jnp.float32(temperature)),
            shared=unsplit.ends is not None,
        )
        return exact.with_value(logprobs, same), entropy, *extras

    return forward


def compare_to_teacher(spec: ModelSpec, divergence: Divergence, teacher: ModelSpec | None) -> Compare:
    """Divergences f32[B, R] to a teacher, in nats, 0 where they have no weight.

    With a spec of the `teacher` its parameters are the last argument, and whole vocabularies (their common part) are
    compared, a chunk of tokens at a time. Without a spec, the batch holds the support and the teacher's log-probs of
    it. Both distributions are at the temperature, and from the ordinary forward pass whatever the numerics.
    """

    def compare(
        params: Params, batch: Batch, x: jax.Array, temperature: jax.Array, weights: Params | None
    ) -> jax.Array:
        sides, rest = [(params, spec, _flat(x))], [_flat(batch.distill_weights != 0)]
        if teacher is not None:
            y = jax.lax.stop_gradient(_heads(weights, teacher, batch))
            sides.append((jax.lax.stop_gradient(weights), teacher, _flat(y)))
            function = functools.partial(_compare_whole, divergence, temperature)
        else:
            rest += [_flat(batch.support), _flat(batch.teacher_logprobs)]
            function = functools.partial(_compare_top_k, divergence, temperature)
        return _targets(scores.map_scores(function, sides, *rest), x)

    return compare


def top_forward(spec: ModelSpec, k: int) -> Callable[[Params, Batch, jax.Array], scores.TopLogprobs]:
    """A function: params, batch, temperature -> log-probs [B, R, ...] of targets, of the k likeliest and of `support`.

    The last are 0 wide where the batch has no `support`.
    """

    def forward(params: Params, batch: Batch, temperature: jax.Array) -> scores.TopLogprobs:
        batch = _over_context(batch)
        x = _heads(params, spec, batch)
        candidates = batch.targets[..., None][..., :0] if batch.support is None else batch.support
        flat = scores.top_logprobs(params, spec, _flat(x), _flat(batch.targets), _flat(candidates), k, temperature)
        return jax.tree.map(lambda a: _targets(a, x), flat)

    return forward


def _compare_whole(divergence: Callable, temperature: jax.Array, student, teacher, live) -> jax.Array:
    """f32[...] for logits [..., V] of both."""
    live = live[..., None]
    sides = renormalise(student, live, temperature), renormalise(teacher, live, temperature)
    return divergences(divergence, *sides, live)


def _compare_top_k(divergence: Callable, temperature: jax.Array, student, live, ids, teacher) -> jax.Array:
    """f32[...] for the student's logits [..., V] and the teacher's log-probs [..., K] of tokens ids."""
    support = jnp.isfinite(teacher) & live[..., None]
    picked = jnp.take_along_axis(student, ids, axis=-1)
    sides = renormalise(picked, support, temperature), renormalise(teacher, support, 1.0)
    return divergences(divergence, *sides, support)


def value_forward(spec: ModelSpec) -> Callable[[critic_model.Critic, Batch], jax.Array]:
    """A function: critic, batch -> values f32[B, R] of the states in which the targets were sampled.

    Of a critic with N bins: their logits f32[B, R, N].
    """

    def forward(critic: critic_model.Critic, batch: Batch) -> jax.Array:
        x = _heads(critic.backbone, spec, _over_context(batch))
        return sharding.whole_rows(critic_model.values(critic, x))

    return forward


def _flat(a: jax.Array) -> jax.Array:
    """[B, R, ...] -> [B * R, ...]."""
    return sharding.merge_places(a)


def _targets(a: jax.Array, like: jax.Array) -> jax.Array:
    """[B * R, ...] -> [B, R, ...], the inverse of `_flat`, each row whole on its devices: what the losses read."""
    return sharding.whole_rows(sharding.split_places(a, like))


def _over_context(batch: Batch) -> Batch:
    """The batch with tokens and targets of a row split over the mesh's context axis, where it has one."""
    return jax.tree.map(sharding.over_context, batch)


def _heads(params: Params, spec: ModelSpec, batch: Batch) -> jax.Array:
    return _replayed_heads(params, spec, batch.replace(experts=None))[0]


def _replayed_heads(params: Params, spec: ModelSpec, batch: Batch, watches: bool = False) -> tuple:
    check_batch(batch)
    places = batch.tokens, batch.positions, batch.segments, batch.head_positions
    return forward_packed(params, spec, *places, batch.ends, batch.longest, batch.experts, watches)
