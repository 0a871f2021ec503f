"""The algorithms: how groups of episodes become per-token streams. An algorithm is ONE function, listed at the end.

In: the groups of one rollout batch (and, where the algorithm asks, critic values and reference log-probs of their
trajectories). Out: `Streams` with relative weights; `mini_batches` splits them into optimiser updates and normalises
the weights of each. The learner never knows which algorithm it runs. NumPy, except for the jitted GAE.
Axis letters: N groups, G samples per group, T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxagent.algorithms import aggregate, echo
from jaxagent.algorithms.advantages import group_advantages, whiten, zero_signal
from jaxagent.algorithms.gae import gae
from jaxagent.algorithms.kl import kl_estimate
from jaxagent.algorithms.streams import Streams
from jaxagent.config import ConfigError, RLConfig
from jaxagent.types import Episode, Group, TokenKind, Trajectory


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What an algorithm sees: one batch of groups. Lists run in the order of `trajectories(groups)`."""

    groups: Sequence[Group]
    progress: float  # of the stage, in [0, 1)
    reference: Sequence[np.ndarray] | None  # f32[T] each: log-probs under the frozen reference, when one is kept
    values: Sequence[np.ndarray] | None  # f32[T] each: the critic's values, when the algorithm has a critic


def grpo(rollout: Rollout, rl: RLConfig) -> list[Streams]:
    """Group-relative policy optimisation: every action token of an attempt has the attempt's group advantage.

    With several trajectories per episode each gets the full advantage. Groups without signal are left out when
    `rl.drop_zero_signal`. Presets of it: DAPO, Dr. GRPO (rl.advantage, rl.aggregation, rl.clip_high).
    """
    return list(_group_relative(rollout, rl).values())


def ppo(rollout: Rollout, rl: RLConfig) -> list[Streams]:
    """Proximal policy optimisation: GAE over action tokens with a learnt critic; the reward sits on the last one."""
    chosen, rewards = [], []
    for i, (_, _, episode, trajectory) in enumerate(_walk(rollout.groups)):
        if not episode.stop_reason.is_failure:
            mask = _action_mask(trajectory)
            reward = -_kl_penalty(rollout, rl, i, trajectory)
            reward[np.flatnonzero(mask)[-1]] += episode.reward
            chosen.append((i, trajectory, mask))
            rewards.append(reward)
    if not chosen:
        return []
    masks, values = [mask > 0 for _, _, mask in chosen], [rollout.values[i] for i, _, _ in chosen]
    advantages, returns = _gae(rewards, values, masks, rl)
    if rl.critic.whiten_advantages:
        lengths = np.cumsum([len(mask) for mask in masks])[:-1]
        advantages = np.split(whiten(np.concatenate(advantages), np.concatenate(masks)), lengths)
    return [
        dataclasses.replace(
            _with_policy(rollout, rl, i, trajectory, mask, advantage),
            returns=ret.astype(np.float32),
            old_values=(value * mask).astype(np.float32),
            value_weights=mask * np.float32(rl.critic.value_coefficient),
        )
        for (i, trajectory, mask), advantage, ret, value in zip(chosen, advantages, returns, values, strict=True)
    ]


def grpo_with_echo(rollout: Rollout, rl: RLConfig) -> list[Streams]:
    """GRPO, plus cross-entropy on what the environment said, in every attempt: also those of groups without signal and
    those that failed, whose policy weights are 0."""
    policy = _group_relative(rollout, rl)
    coefficient = echo.coefficient(rl.echo.coefficient, rl.echo.schedule, rollout.progress)
    streams = []
    for i, trajectory in enumerate(trajectories(rollout.groups)):
        mask = echo.target_mask(trajectory.kinds, rl.echo.targets, rl.echo.max_tokens)
        sequence = policy.get(i) or Streams.of(trajectory)
        streams.append(dataclasses.replace(sequence, ce_weights=(coefficient * mask).astype(np.float32)))
    return streams


ALGORITHMS: dict[str, Callable[[Rollout, RLConfig], list[Streams]]] = {
    "grpo": grpo,
    "ppo": ppo,
    "echo": grpo_with_echo,
}


def needs_critic(rl: RLConfig) -> bool:
    """Whether the algorithm reads `Rollout.values`."""
    return rl.algorithm == "ppo"


def needs_reference(rl: RLConfig) -> bool:
    """Whether a frozen reference is kept and `Rollout.reference` filled."""
    return rl.kl.coefficient != 0


def check(rl: RLConfig) -> None:
    """Refuses combinations that cannot mean anything, before any device work.

    Raises:
      ConfigError: naming the fields.
    """
    if rl.algorithm == "echo" and rl.echo.coefficient <= 0:
        raise ConfigError("rl.algorithm='echo' needs rl.echo.coefficient > 0 (published: 0.05).")
    constant = [rl.aggregation] + [rl.echo.denominator] * (rl.algorithm == "echo")
    if "constant" in constant and rl.aggregation_constant <= 0:
        raise ConfigError("Aggregation 'constant' needs rl.aggregation_constant > 0 (tokens).")
    if rl.updates_per_step < 1 or rl.epochs < 1:
        raise ConfigError("rl.updates_per_step and rl.epochs must be at least 1.")


def most_targets(rl: RLConfig, action_tokens: int, context_tokens: int) -> int:
    """Most tokens of one trajectory that the loss can need: fixes the shape of a batch before the first one exists.

    Args:
      rl: the stage's config.
      action_tokens: most tokens the policy can sample in one trajectory.
      context_tokens: most tokens of one trajectory.
    """
    if rl.algorithm != "echo":
        return min(action_tokens, context_tokens)
    return min(action_tokens + rl.echo.max_tokens, context_tokens) if rl.echo.max_tokens else context_tokens


def trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories that algorithms see, in their order: those with at least one action token."""
    return [trajectory for _, _, _, trajectory in _walk(groups)]


def streams(
    groups: Sequence[Group],
    rl: RLConfig,
    progress: float,
    reference: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
) -> tuple[list[Streams], dict[str, float]]:
    """Runs the configured algorithm on one rollout batch.

    Args:
      groups: finished groups.
      rl: the stage's config.
      progress: steps done / steps planned.
      reference, values: f32[T] per trajectory of `trajectories(groups)`, where needed.

    Returns:
      Streams with relative weights (only sequences that take part), and counts for the metrics.
    """
    out = ALGORITHMS[rl.algorithm](Rollout(groups, progress, reference, values), rl)
    rewards, counted = _rewards(groups)
    silent = zero_signal(rewards, counted)
    return out, {
        "groups/zero_signal": float(np.sum(silent)),
        "groups/zero_signal_frac": float(np.mean(silent)),
        "groups/failed_episodes": float(sum(len(group.episodes) - len(group.valid) for group in groups)),
        "groups/sequences_trained": float(len(out)),
    }


def mini_batches(sequences: Sequence[Streams], rl: RLConfig, seed: Sequence[int]) -> Iterator[list[Streams]]:
    """Yields the optimiser updates of one rollout batch: `epochs` times `updates_per_step` even, shuffled parts.

    Args:
      sequences: what `streams` gave.
      rl: the stage's config.
      seed: of the shuffle, e.g. (run seed, step).

    Yields:
      Sequences whose weights are normalised over that update. Empty parts are left out.
    """
    for epoch in range(rl.epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(len(sequences))
        for part in np.array_split(order, rl.updates_per_step):
            if len(part):
                yield _normalise([sequences[i] for i in part], rl)


def _normalise(sequences: list[Streams], rl: RLConfig) -> list[Streams]:
    names = ("policy_weights", "kl_weights", "entropy_weights", "value_weights")
    sequences = aggregate.normalise(sequences, names, rl.aggregation, rl.aggregation_constant)
    scales = echo.world_scales(
        [np.count_nonzero(s.ce_weights) for s in sequences],
        [np.count_nonzero(echo.target_mask(s.trajectory.kinds, "full_observation", 0)) for s in sequences],
        rl.echo.denominator,
        rl.aggregation_constant,
    )
    return [
        dataclasses.replace(s, ce_weights=(s.ce_weights * scale).astype(np.float32))
        for s, scale in zip(sequences, scales, strict=True)
    ]


def _walk(groups: Sequence[Group]) -> Iterator[tuple[int, int, Episode, Trajectory]]:
    """(group index, index inside the group, episode, trajectory) of every trajectory with an action token."""
    for g, group in enumerate(groups):
        for s, episode in enumerate(group.episodes):
            for trajectory in episode.trajectories:
                if _action_mask(trajectory).any():
                    yield g, s, episode, trajectory


def _action_mask(trajectory: Trajectory) -> np.ndarray:
    """f32[T]: 1 for tokens the policy is trained on."""
    mask = (trajectory.kinds == TokenKind.ACTION).astype(np.float32)
    mask[:1] = 0.0  # nothing predicts the first token
    return mask


def _rewards(groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards f64[N, G] and the mask bool[N, G] of attempts that did not fail."""
    shape = (len(groups), max((len(group.episodes) for group in groups), default=0))
    rewards, counted = np.zeros(shape), np.zeros(shape, bool)
    for g, group in enumerate(groups):
        for s, episode in enumerate(group.episodes):
            rewards[g, s], counted[g, s] = episode.reward, not episode.stop_reason.is_failure
    return rewards, counted


def _group_relative(rollout: Rollout, rl: RLConfig) -> dict[int, Streams]:
    """Streams of the trajectories that take part, by their index in `trajectories(groups)`."""
    rewards, counted = _rewards(rollout.groups)
    live = counted & ~(zero_signal(rewards, counted)[:, None] & rl.drop_zero_signal)
    for i, (g, s, _, trajectory) in enumerate(_walk(rollout.groups)):
        rewards[g, s] -= _kl_penalty(rollout, rl, i, trajectory).sum()
    advantages = group_advantages(rewards, counted, rl.advantage == "group_mean_std")
    streams = {}
    for i, (g, s, _, trajectory) in enumerate(_walk(rollout.groups)):
        if live[g, s]:
            mask = _action_mask(trajectory)
            streams[i] = _with_policy(rollout, rl, i, trajectory, mask, mask * advantages[g, s])
    return streams


def _kl_penalty(rollout: Rollout, rl: RLConfig, i: int, trajectory: Trajectory) -> np.ndarray:
    """f64[T]: what KL-in-reward takes from the reward at each action token; 0 in the other variants."""
    mask = _action_mask(trajectory)
    if rl.kl.coefficient == 0 or rl.kl.where != "reward":
        return np.zeros(len(trajectory))
    estimate = kl_estimate(trajectory.logprobs.astype(np.float64), rollout.reference[i], rl.kl.estimator)
    return np.where(mask > 0, rl.kl.coefficient * estimate, 0.0)


def _with_policy(
    rollout: Rollout, rl: RLConfig, i: int, trajectory: Trajectory, mask: np.ndarray, advantages: np.ndarray
) -> Streams:
    """Policy, KL-in-loss and entropy streams of one trajectory, with relative weights."""
    given = dict(
        advantages=advantages,
        policy_weights=mask,
        entropy_weights=mask * np.float32(rl.entropy_coefficient),
    )
    if rl.kl.coefficient != 0 and rl.kl.where == "loss":
        given |= dict(reference_logprobs=rollout.reference[i], kl_weights=mask * np.float32(rl.kl.coefficient))
    return Streams.of(trajectory, **given)


def warm_up(rl: RLConfig) -> None:
    """Compiles what the algorithm itself runs on the device."""
    if needs_critic(rl):
        one = [np.zeros(1, np.float32)]
        _gae(one, one, [np.zeros(1, bool)], rl)


_GAE_ROWS = 64  # trajectories per call: a static shape, so that nothing compiles twice


@functools.partial(jax.jit, static_argnames=("gamma", "lam"))
def _gae_rows(rewards: jax.Array, values: jax.Array, masks: jax.Array, gamma: float, lam: float) -> tuple:
    return jax.vmap(lambda r, v, m: gae(r, v, m, gamma, lam))(rewards, values, masks)


def _gae(
    rewards: list[np.ndarray], values: list[np.ndarray], masks: list[np.ndarray], rl: RLConfig
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantages and returns, f32[T] each, of ragged trajectories."""
    # One row more than a packed row: the last token of a trajectory is a target, never an input.
    width = rl.batch.row_tokens + 1
    advantages, returns = [], []
    for start in range(0, len(rewards), _GAE_ROWS):
        block = range(start, min(start + _GAE_ROWS, len(rewards)))
        padded = [np.zeros((_GAE_ROWS, width), dtype) for dtype in (np.float32, np.float32, bool)]
        for row, i in enumerate(block):
            for out, stream in zip(padded, (rewards[i], values[i], masks[i]), strict=True):
                used = min(len(stream), width)  # the tail behind the last action may be longer than a row
                out[row, :used] = stream[:used]
        a, r = jax.device_get(_gae_rows(*padded, gamma=rl.critic.gamma, lam=rl.critic.lam))
        for row, i in enumerate(block):
            full = [np.zeros(len(masks[i]), np.float32) for _ in range(2)]
            used = min(len(masks[i]), width)
            full[0][:used], full[1][:used] = a[row, :used], r[row, :used]
            advantages.append(full[0])
            returns.append(full[1])
    return advantages, returns
