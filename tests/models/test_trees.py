"""Attention along the paths of trees equals attention under the whole mask, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models import attention, trees


def random_ends(rng: np.random.Generator, t: int, live: int, longest: int) -> np.ndarray:
    """Ends of a row filled depth first: a new leaf hangs at some place of the last one's path."""
    ends, path, used = np.full(t, t), np.zeros(0, int), 0
    while used < live:
        kept = int(rng.integers(0, len(path) + 1)) if rng.random() < 0.8 else 0
        new = np.arange(used, min(used + int(rng.integers(1, longest - kept + 1)), live))
        if not len(new):
            continue
        ends[path[kept:]] = used
        path, used = np.concatenate([path[:kept], new]), new[-1] + 1
    ends[path] = used
    return ends


@pytest.mark.parametrize(
    ("t", "longest", "block"), [(40, 14, 8), pytest.param(500, 90, attention.QUERY_BLOCK, marks=pytest.mark.slow)]
)
def test_equals_the_whole_mask(t: int, longest: int, block: int, monkeypatch) -> None:
    monkeypatch.setattr(trees, "QUERY_BLOCK", block)
    rng, live = np.random.default_rng(t), t - t // 20
    ends = np.stack([random_ends(rng, t, live, longest) for _ in range(2)]).astype(np.int32)
    column = np.arange(t)
    mask = (column <= column[:, None]) & (column[:, None] < ends[:, None])
    assert mask[:, :live].sum(axis=2).max() <= longest < t - block
    q, weigh = (jnp.asarray(rng.normal(size=(2, t, 4, 8)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(2, t, 2, 8)), jnp.float32) for _ in range(2))

    def dense(q, k, v):
        return attention.attend_dense(q, k, v, mask)

    def along_paths(q, k, v):
        flat = (x.reshape(2 * t, *x.shape[2:]) for x in (q, k, v))
        return trees.shared(jnp.asarray(ends), longest)(None, *flat)[0].reshape(q.shape)

    real = jnp.asarray(column < live)[None, :, None, None]  # what padding gets is anything finite
    graded = [jax.jit(jax.value_and_grad(lambda *x, f=f: jnp.where(real, weigh * f(*x), 0.0).sum(), argnums=(0, 1, 2)))
              for f in (dense, along_paths)]  # fmt: skip
    expected, got = (g(q, k, v) for g in graded)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    assert np.isfinite(jax.jit(along_paths)(q, k, v)).all()
