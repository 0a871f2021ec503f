"""The model seen by the learner: parameters and a `Batch` -> numbers per target. The only learner file on the models.

In: parameters and packed rows. Out: log-probs and entropies of the targets, or the critic's values, f32[B, R].
ONE forward pass scores action tokens and ECHO's observation tokens alike: both are just targets.
Axis letters: B packed rows, T tokens, R target positions per row, E embed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxagent.config import LoraConfig
from jaxagent.learner.batch import Batch
from jaxagent.learner.state import Frozen
from jaxagent.models import critic as critic_model
from jaxagent.models import exact, lora, sharding
from jaxagent.models.logprobs import token_scores
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec
from jaxagent.models.transformer import forward_packed


def policy_forward(
    spec: ModelSpec, tiling: exact.Tiling | None = None, adapters: LoraConfig | None = None, log_z: bool = False
) -> Callable[..., tuple[jax.Array, ...]]:
    """A function: params, batch, temperature f32[] (may be traced)[, frozen] -> (log-probs, entropies), f32[B, R].

    With a `Frozen` as last argument, params are LoRA adapters beside its base, of the config `adapters`.

    Targets with a cross-entropy weight are scored at temperature 1, all others at `temperature`. With a `tiling`, the
    engine's, the log-probs are bit for bit those the engine would record; gradients are those of the ordinary pass.
    With `log_z` there is a third result, f32[B, R]: the log of the softmax's normaliser.
    """

    def forward(
        params: Params | lora.Adapters, batch: Batch, temperature: jax.Array, frozen: Frozen | None = None
    ) -> tuple[jax.Array, ...]:
        served = params if frozen is None else frozen.merged
        params = params if frozen is None else lora.adapt(frozen.base, params, adapters)
        x = _heads(params, spec, batch)
        # Logits are linear in x; at temperature 1 this is the identity.
        x = jnp.where((batch.ce_weights != 0)[..., None], x * jnp.asarray(temperature, x.dtype), x)
        b, r, e = x.shape
        scores = token_scores(params, spec, x.reshape(b * r, e), batch.targets.reshape(b * r), temperature)
        rows = sharding.out(sharding.row_axes(x), None)
        logprobs, *others = (score.reshape(b, r, out_sharding=rows) for score in scores[: 3 if log_z else 2])
        if tiling is None:
            return logprobs, *others
        same = exact.packed_logprobs(
            jax.lax.stop_gradient(served),
            spec,
            tiling,
            batch.tokens,
            batch.positions,
            batch.head_positions,
            batch.targets,
            jnp.where(batch.ce_weights != 0, 1.0, jnp.float32(temperature)),
        )
        return exact.with_value(logprobs, same), *others

    return forward


def value_forward(spec: ModelSpec) -> Callable[[critic_model.Critic, Batch], jax.Array]:
    """A function: critic, batch -> values f32[B, R] of the states in which the targets were sampled.

    Of a critic with N bins: their logits f32[B, R, N].
    """

    def forward(critic: critic_model.Critic, batch: Batch) -> jax.Array:
        return critic_model.values(critic, _heads(critic.backbone, spec, batch))

    return forward


def _heads(params: Params, spec: ModelSpec, batch: Batch) -> jax.Array:
    return forward_packed(params, spec, batch.tokens, batch.positions, batch.segments, batch.head_positions)
