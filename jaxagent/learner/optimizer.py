"""AdamW with warm-up, schedule and global-norm clipping, from the config.

In: `OptimizerConfig` and the planned number of updates. Out: an optax transformation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxagent.config import OptimizerConfig

_B1, _EPS = 0.9, 1e-8  # of every published recipe
_WSD_DECAY = 0.2  # the last part of the updates


def make_optimizer(config: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
    """Clips the global gradient norm, then AdamW (decoupled decay, not on norms and biases)."""
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip) if config.grad_clip > 0 else optax.identity(),
        optax.adamw(
            learning_rate(config, total_updates),
            b1=_B1,
            b2=config.b2,
            eps=_EPS,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def learning_rate(config: OptimizerConfig, total_updates: int) -> Callable[[jax.Array], jax.Array]:
    """Update index (0-based) -> learning rate.

    Linear warm-up over `warmup_steps` updates (the first one already moves: (i + 1) / warmup_steps), then constant,
    or falling to 0 at `total_updates` along a cosine or a line. "wsd" (warm-up, stable, decay: MiniCPM, arXiv
    2404.06395) is constant until the last fifth of the updates, over which it falls along a line.
    """
    shapes = {
        "constant": lambda done: jnp.ones_like(done),
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
        "wsd": lambda done: jnp.minimum((1.0 - done) / _WSD_DECAY, 1.0),
    }
    shape = shapes[config.schedule]
    decay_updates = max(total_updates - config.warmup_steps, 1)

    def schedule(count: jax.Array) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        warm = jnp.minimum((count + 1.0) / max(config.warmup_steps, 1), 1.0)
        done = jnp.clip((count - config.warmup_steps) / decay_updates, 0.0, 1.0)
        return config.learning_rate * warm * shape(done)

    return schedule


def decayed(params: Any) -> Any:
    """A tree of bools: True where weight decay applies (matrices and embeddings, not norm scales and biases)."""

    def is_decayed(path: tuple, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not ("norm" in name or name in ("bq", "bk", "bv"))

    return jax.tree_util.tree_map_with_path(is_decayed, params)
