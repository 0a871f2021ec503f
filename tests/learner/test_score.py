"""Scoring gives each token the log-prob it has in its own sequence alone, wherever packing put it."""

import jax
import numpy as np
import pytest

from jaxagent.algorithms.value_losses import Squared
from jaxagent.learner.forward import policy_forward, value_forward
from jaxagent.learner.score import policy_scorer, value_scorer
from jaxagent.models import critic as critic_model
from jaxagent.models.attention import packed
from jaxagent.models.logprobs import logits
from jaxagent.models.transformer import hidden


@pytest.mark.slow
def test_policy_scores_equal_the_unpacked_model(spec, make_mesh, make_params, make_packer, make_streams):
    mesh = make_mesh()
    params, trajectories = make_params(mesh), [s.trajectory for s in make_streams(5)]
    scorer = policy_scorer(policy_forward(spec), 0.7, make_packer(longest_targets=20), mesh)
    scorer.warm_up(params)
    logprobs, entropies = scorer(params, trajectories)
    trajectory = trajectories[2]
    n = len(trajectory)
    with jax.set_mesh(mesh):
        x, _ = hidden(params, spec, trajectory.tokens, np.arange(n), packed(np.ones((1, n), np.int32)), unroll=True)
        scores = np.asarray(logits(params, spec, x), np.float64)
        table = np.asarray(jax.nn.log_softmax(logits(params, spec, x) / 0.7), np.float64)
    expected = np.append(0.0, table[np.arange(n - 1), trajectory.tokens[1:]])
    np.testing.assert_allclose(logprobs[2], np.where(trajectory.action_mask, expected, 0), atol=2e-6)
    hotter = scorer(params, trajectories, 1.9)[0][2]  # a step's own temperature: the same program
    total = np.log(np.exp(scores / 1.9).sum(axis=1))
    expected = np.append(0.0, (scores[np.arange(n - 1), trajectory.tokens[1:]] / 1.9 - total[:-1]))
    np.testing.assert_allclose(hotter, np.where(trajectory.action_mask, expected, 0), atol=2e-6)
    plogp = np.append(0.0, -np.sum(np.exp(table) * np.maximum(table, -80), axis=1)[:-1])
    np.testing.assert_allclose(entropies[2], np.where(trajectory.action_mask, plogp, 0), atol=1e-5)
    assert scorer.program._cache_size() == 1
    assert scorer(params, []) == ([], [])


def test_a_new_critic_values_everything_at_zero(spec, make_mesh, make_params, make_packer, make_streams):
    mesh = make_mesh(data=2)
    with jax.set_mesh(mesh):
        critic = critic_model.from_policy(make_params(mesh))
    scorer = value_scorer(value_forward(spec), make_packer(longest_targets=20, row_shards=2), mesh, Squared())
    (values,) = scorer(critic, [s.trajectory for s in make_streams(3)])
    assert len(values) == 3 and not any(v.any() for v in values)
