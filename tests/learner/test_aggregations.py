"""Every aggregation with every rule for several trajectories: micro-batched, packed and sharded equals the definition.

The definition is written out in float64 over episodes, trajectories and tokens, and its gradient is taken through a
plain batch of one unpacked sequence per row, on one device.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxagent.algorithms import compose
from jaxagent.algorithms.aggregate import AGGREGATIONS
from jaxagent.algorithms.estimators import GroupMeanStd
from jaxagent.algorithms.objectives import PPOClip
from jaxagent.algorithms.streams import Streams, sampled_trajectories
from jaxagent.learner import loss as losses
from jaxagent.learner.forward import policy_forward
from jaxagent.learner.state import Batch
from jaxagent.learner.update import shard
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory

RULES = ("full", "divide", "statistics")
CONSTANT, VOCAB = 7.0, 61
# Trajectories of each attempt and its reward, group by group; lengths are drawn.
GROUPS = (((1, 1.0), (3, 0.0), (2, 0.5)), ((2, 0.0), (1, 0.0), (2, 1.0)))


def draw_trajectory(rng) -> Trajectory:
    length = int(rng.integers(5, 20))
    kinds = rng.choice([TokenKind.ACTION, TokenKind.OBSERVATION], length).astype(np.uint8)
    kinds[:2], kinds[-1] = TokenKind.PROMPT, TokenKind.ACTION
    actions = kinds == TokenKind.ACTION
    # About what a model of random weights gives, so that some ratios are inside the clip range and some outside.
    logprobs = np.where(actions, rng.normal(-np.log(VOCAB), 0.3, length), 0).astype(np.float32)
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    return Trajectory(tokens, kinds, logprobs, np.where(actions, 0, -1).astype(np.int32), np.zeros(length, np.int32))


def draw_groups() -> list[Group]:
    rng, task = np.random.default_rng(0), Task("t", "q", ("x",))
    made = [
        [([draw_trajectory(rng) for _ in range(count)], reward) for count, reward in attempts] for attempts in GROUPS
    ]
    return [
        Group(task, [Episode(task, i, ts, r, {}, StopReason.ANSWER, 1) for i, (ts, r) in enumerate(attempts)])
        for attempts in made
    ]


def advantages(groups: list[Group], rule: str) -> list[float]:
    """Of every trajectory, in order: (R - mean) / (std + 1e-6)."""
    out = []
    for group in groups:
        counts, rewards = [len(e.trajectories) for e in group.episodes], [e.reward for e in group.episodes]
        population = [r for r, n in zip(rewards, counts, strict=True) for _ in range(n if rule == "statistics" else 1)]
        mean, std = statistics.mean(population), statistics.stdev(population) + 1e-6
        for reward, n in zip(rewards, counts, strict=True):
            out += [(reward - mean) / std / (n if rule == "divide" else 1)] * n
    return out


def factors(groups: list[Group], aggregation: str) -> list[float]:
    """What each token's loss is multiplied with, of every trajectory in order."""
    episodes = [[int(t.action_mask.sum()) for t in e.trajectories] for group in groups for e in group.episodes]
    tokens, sequences = sum(map(sum, episodes)), sum(map(len, episodes))
    by_name = {
        "token_mean": lambda n, episode: 1 / tokens,
        "sequence_mean": lambda n, episode: 1 / (n * sequences),
        "rollout_mean": lambda n, episode: 1 / (n * len(episode) * len(episodes)),
        "constant": lambda n, episode: 1 / (CONSTANT * sequences),
    }
    return [by_name[aggregation](n, episode) for episode in episodes for n in episode]


@dataclasses.dataclass(frozen=True)
class Plain:
    """One sequence per row, on one device: log-probs, and gradients of any weighted sum of them."""

    program: Callable  # cotangent f32[n, R] -> log-probs f32[n, R], gradients
    batch: Batch
    logprobs: np.ndarray  # f64[n, R]

    def loss_and_gradient(self, advantage: list[float], factor: list[float]) -> tuple[float, object]:
        """PPO's clipped loss, token by token in float64."""
        total, cotangent = 0.0, np.zeros(self.logprobs.shape, np.float32)
        for i, at in np.argwhere(self.batch.policy_weights != 0):
            a, ratio = advantage[i], np.exp(self.logprobs[i, at] - float(self.batch.behaviour_logprobs[i, at]))
            plain, clipped = -ratio * a, -min(max(ratio, 0.8), 1.28) * a
            total += factor[i] * max(plain, clipped)
            cotangent[i, at] = 0.0 if clipped > plain else factor[i] * plain
        return total, jax.device_get(self.program(cotangent)[1])


@pytest.fixture(scope="module")
def groups():
    return draw_groups()


@pytest.fixture(scope="module")
def plain(spec, make_mesh, make_params, make_packer, groups):
    mesh, forward = make_mesh(), policy_forward(spec)
    packer = make_packer(micro_rows=1, longest_targets=20)
    rows = [
        packer.pack([Streams.of(t, policy_weights=t.action_mask.astype(np.float32))])
        for t in sampled_trajectories(groups)
    ]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *(row for (row,) in rows))

    @jax.jit
    def compiled(params, batch, cotangent):
        logprobs, pull = jax.vjp(lambda params: forward(params, batch, 1.0)[0], params)
        return logprobs, pull(cotangent)[0]

    params = make_params(mesh)

    def program(cotangent):
        with jax.set_mesh(mesh):
            return compiled(params, shard(batch, mesh), shard(cotangent, mesh))

    logprobs, _ = program(np.zeros(batch.targets.shape, np.float32))
    return Plain(program, batch, np.asarray(logprobs, np.float64))


@pytest.fixture(scope="module")
def sharded(spec, make_mesh, make_params):
    """A function: micro-batches -> summed loss and gradient on eight devices; compiled once."""
    mesh, forward = make_mesh(2, 2, 2), policy_forward(spec)
    objective = PPOClip(clip_low=0.2, clip_high=0.28)

    @jax.jit
    def program(params, batch):
        loss = lambda params: losses.policy_loss(*forward(params, batch, 1.0), batch, objective=objective)[0]  # noqa: E731
        return jax.value_and_grad(loss)(params)

    params = make_params(mesh)

    def run(batches):
        with jax.set_mesh(mesh):
            parts = [jax.device_get(program(params, shard(batch, mesh))) for batch in batches]
        assert program._cache_size() == 1
        return jax.tree.map(lambda *x: np.sum([np.asarray(a, np.float64) for a in x], axis=0), *parts)

    return run


@pytest.mark.parametrize("aggregation, rule", list(itertools.product(AGGREGATIONS, RULES)))
def test_equals_the_definition(cfg, groups, plain, sharded, make_packer, aggregation, rule):
    rl = dataclasses.replace(
        cfg.rl,
        advantage=GroupMeanStd(multi_trajectory=rule),
        aggregation=AGGREGATIONS[aggregation](*[CONSTANT] * (aggregation == "constant")),
        updates_per_step=1,
        epochs=1,
    )
    (update,) = compose.mini_batches(compose.streams(groups, rl, 0.0)[0], rl, (0, 0))
    batches = make_packer(micro_rows=4, longest_targets=20, row_shards=4).pack(update)
    assert len(batches) > 1 and max(b.segments.max() for b in batches) > 1  # micro-batched, and packed
    loss, gradient = sharded(batches)
    expected, expected_gradient = plain.loss_and_gradient(advantages(groups, rule), factors(groups, aggregation))
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        error = np.linalg.norm(got - np.asarray(wanted, np.float64))
        assert error <= 1e-5 * max(np.linalg.norm(wanted), 1e-6)


def test_the_case_is_not_trivial(groups, plain):
    """Some tokens are clipped and some are not, and no two of the twelve weight the tokens alike."""
    live = plain.batch.policy_weights != 0
    ratio = np.exp(plain.logprobs - plain.batch.behaviour_logprobs)[live]
    assert 0.1 < np.mean((ratio < 0.8) | (ratio > 1.28)) < 0.9
    products = [
        np.multiply(advantages(groups, rule), factors(groups, aggregation))
        for aggregation, rule in itertools.product(AGGREGATIONS, RULES)
    ]
    for a, b in itertools.combinations(products, 2):
        assert np.abs(a - b).max() > 1e-3
