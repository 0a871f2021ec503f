"""The model seen by the learner: parameters and a `Batch` -> numbers per target. The only learner file on the models.

In: parameters and packed rows. Out: log-probs and entropies of the targets, or the critic's values, f32[B, R].
ONE forward pass scores action tokens and ECHO's observation tokens alike: both are just targets.
Axis letters: B packed rows, T tokens, R target positions per row, E embed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxagent.learner.batch import Batch
from jaxagent.models import critic as critic_model
from jaxagent.models import exact, sharding
from jaxagent.models.logprobs import token_logprobs
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec
from jaxagent.models.transformer import forward_packed


def policy_forward(
    spec: ModelSpec, tiling: exact.Tiling | None = None
) -> Callable[[Params, Batch, jax.Array], tuple[jax.Array, jax.Array]]:
    """A function: params, batch, temperature f32[] (may be traced) -> (log-probs f32[B, R], entropies f32[B, R]).

    Targets with a cross-entropy weight are scored at temperature 1, all others at `temperature`. With a `tiling`, the
    engine's, the log-probs are bit for bit those the engine would record; gradients are those of the ordinary pass.
    """

    def forward(params: Params, batch: Batch, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _heads(params, spec, batch)
        # Logits are linear in x; at temperature 1 this is the identity.
        x = jnp.where((batch.ce_weights != 0)[..., None], x * jnp.asarray(temperature, x.dtype), x)
        b, r, e = x.shape
        scores = token_logprobs(params, spec, x.reshape(b * r, e), batch.targets.reshape(b * r), temperature)
        rows = sharding.out(sharding.row_axes(x), None)
        logprobs, entropy = (score.reshape(b, r, out_sharding=rows) for score in scores)
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

    return forward


def value_forward(spec: ModelSpec) -> Callable[[critic_model.Critic, Batch], jax.Array]:
    """A function: critic, batch -> values f32[B, R] of the states in which the targets were sampled."""

    def forward(critic: critic_model.Critic, batch: Batch) -> jax.Array:
        return critic_model.values(critic, _heads(critic.backbone, spec, batch))

    return forward


def _heads(params: Params, spec: ModelSpec, batch: Batch) -> jax.Array:
    return forward_packed(params, spec, batch.tokens, batch.positions, batch.segments, batch.head_positions)
