"""On-policy distillation by sampled tokens, without a model: a table of logits comes nearer to its teacher's.

The whole path but the forward pass: sampled tokens -> advantages (`compose.streams`) -> weights of one update
(`mini_batches`) -> the learner's loss -> its gradient on the table. What falls is the exact reverse KL, over all
contexts and the whole vocabulary, and not the estimate that is trained on.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.algorithms import checks, compose
from jaxagent.algorithms.distill import Scores
from jaxagent.algorithms.estimators import NoReward
from jaxagent.algorithms.objectives import OBJECTIVES
from jaxagent.algorithms.streams import ModelScores, sampled_trajectories
from jaxagent.algorithms.teachers import Folder
from jaxagent.config import DistillConfig
from jaxagent.learner import loss as losses
from jaxagent.learner.state import Batch
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

VOCAB, ACTIONS, ATTEMPTS, STEPS = 6, 7, 64, 25
TASK = Task("t", "q", ("x",))


def log_softmax(table: np.ndarray) -> np.ndarray:
    return table - np.log(np.sum(np.exp(table), axis=-1, keepdims=True))


def sample(rng, student: np.ndarray) -> Group:
    """Attempts of a bigram policy: one token of prompt, then `ACTIONS` sampled ones. All earn the same."""
    tokens = [rng.integers(0, VOCAB, ATTEMPTS)]
    for _ in range(ACTIONS):
        noise = rng.gumbel(size=(ATTEMPTS, VOCAB))
        tokens.append(np.argmax(student[tokens[-1]] + noise, axis=1))
    kinds = np.array([TokenKind.PROMPT] + [TokenKind.ACTION] * ACTIONS, np.uint8)
    zero = np.zeros(ACTIONS + 1, np.int32)
    episodes = []
    for i, row in enumerate(np.stack(tokens, axis=1).astype(np.int32)):
        trajectory = Trajectory(row, kinds, scores(student, row), zero, zero)
        episodes.append(Episode(TASK, i, [trajectory], 1.0, {}, StopReason.ANSWER, turns=1))
    return Group(TASK, episodes)


def scores(logprobs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """f32[T] of each token after the one before it; the first has none."""
    return np.append(0, logprobs[tokens[:-1], tokens[1:]]).astype(np.float32)


def batch_of(update) -> Batch:
    """One sequence per row, every token after the first a target."""
    apart = ("trajectory", "episode", "support", "reward")
    names = [f.name for f in dataclasses.fields(update[0]) if f.name not in apart]
    given = {name: np.stack([getattr(s, name)[1:] for s in update]) for name in names if name != "corrections"}
    zero = np.zeros((len(update), ACTIONS), np.int32)
    return Batch(
        tokens=zero, positions=zero, segments=zero, head_positions=zero, offset=zero,
        targets=np.stack([s.trajectory.tokens[1:] for s in update]),
        sequence=zero + np.arange(len(update), dtype=np.int32)[:, None],
        behaviour_logprobs=np.stack([s.trajectory.logprobs[1:] for s in update]),
        **given,
    )  # fmt: skip


@pytest.mark.parametrize("objective, whiten", [("importance_sampling", False), ("ppo_clip", True)])
def test_the_exact_reverse_kl_falls(cfg, objective, whiten):
    rng = np.random.default_rng(0)
    table, teacher = rng.normal(0, 1, (VOCAB, VOCAB)), log_softmax(rng.normal(0, 1.5, (VOCAB, VOCAB)))
    rl = dataclasses.replace(
        cfg.rl, advantage=NoReward(), objective=OBJECTIVES[objective](), whiten_advantages=whiten, updates_per_step=1,
        distill=DistillConfig(Folder("t")),
    )  # fmt: skip
    checks.check(rl)

    @jax.jit
    def gradient(table, before, batch):
        def loss(table):
            logprobs = jax.nn.log_softmax(table)[before, batch.targets]
            return losses.policy_loss_of(rl)(logprobs, jnp.zeros_like(logprobs), batch)[0]

        return jax.grad(loss)(table)

    exact, estimates = [], []
    for step in range(STEPS):
        student = log_softmax(table)
        exact.append(float(np.mean(np.sum(np.exp(student) * (student - teacher), axis=1))))
        group = sample(rng, student)
        told = [
            Scores(scores(teacher, t.tokens), np.zeros((ACTIONS + 1, 1), np.int32), *[np.zeros((ACTIONS + 1, 0))] * 2)
            for t in sampled_trajectories([group])
        ]
        streams, metrics = compose.streams([group], rl, step / STEPS, ModelScores(teacher=told))
        estimates.append(metrics["distill/reverse_kl"])
        (update,) = compose.mini_batches(streams, rl, (0, step))
        before = np.stack([s.trajectory.tokens[:-1] for s in update])
        table = table - 6.0 * np.asarray(gradient(table, before, batch_of(update)), np.float64)
    assert exact[0] > 0.9 and exact[-1] < 0.15 * exact[0], exact
    assert np.mean(estimates[:5]) > 0.5 and abs(np.mean(estimates[-5:])) < 0.2  # and the metric says so
