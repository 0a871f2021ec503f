"""From samples to per-token advantages: runs what `rl.advantage` is.

In: the groups of one rollout batch and their samples. Out: a `Signal` for each sample that takes part: its advantages,
and the critic's targets where there is one.
An episode of several trajectories, by `rl.advantage.multi_trajectory`, when advantages come from groups:

  full        each trajectory has the episode's whole advantage (slime's AgentFlow, MemAgent)
  divide      each has it divided by their number (LMIS's MemAgent)
  statistics  each trajectory counts as an attempt in the group's mean and std (AgentFlow's Flow-GRPO, 2510.05592),
              where one without an action token is none, though the other two count its reward

Advantages over turns read process rewards too, and count an episode as one sequence of turns. `turn_rewards[k]` is what
the environment says of turn k, or of a sub-goal reached in it; the episode's reward comes on top of them, at the end.
Turns are counted over the episode's trajectories, one after the other; missing rewards are 0. Advantages along tokens
are computed for all trajectories of a batch by one program, padded to one shape.
Here is everything around the pure functions: failed attempts, groups without signal, KL in the reward or in the
advantage, whitening. Axis letters: N groups, G samples per group, K turns, T tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import numpy as np

from jaxagent import contract
from jaxagent.algorithms.advantages import GroupAdvantage, alone, whiten, zero_signal
from jaxagent.algorithms.distill import sampled_advantages
from jaxagent.algorithms.estimators import Estimate, TokenAdvantage, TokenPath, TurnAdvantage
from jaxagent.algorithms.policy_loss import kl_estimate
from jaxagent.algorithms.streams import Sample, action_mask, rewards
from jaxagent.config import KLConfig, RLConfig
from jaxagent.types import Episode, Group, StopReason

REWARD_EPSILON = 1e-5  # by which a reward may miss `rl.shaping.min_reward`


@dataclasses.dataclass(frozen=True)
class Signal:
    """What one sample is trained with."""

    advantages: np.ndarray  # float[T], 0 outside action tokens
    returns: np.ndarray | None = None  # float[T] the critic's regression targets; None without a critic
    learnt: np.ndarray | None = None  # f32[T] 1 where the critic learns them

    def plus(self, advantages: np.ndarray) -> Signal:
        """With float[T] added to its advantages."""
        return dataclasses.replace(self, advantages=self.advantages + advantages)


def signals(groups: Sequence[Group], samples: Sequence[Sample], rl: RLConfig) -> list[Signal | None]:
    """One signal per sample; None where it takes no part."""
    if isinstance(rl.advantage, TokenAdvantage):
        by_sample = _along_tokens(groups, samples, rl)
    else:
        by_sample = (_over_turns if isinstance(rl.advantage, TurnAdvantage) else _group_relative)(groups, samples, rl)
    if rl.kl_in("advantage"):
        by_sample = [s and s.plus(-kl_penalty(sample, rl.kl)) for sample, s in zip(samples, by_sample, strict=True)]
    if rl.distill is not None and rl.distill.in_advantage:
        by_sample = [s and s.plus(teacher_advantages(sample, rl)) for sample, s in zip(samples, by_sample, strict=True)]
    if rl.mask_truncated:
        cut = [sample.episode.stop_reason is StopReason.TOKEN_LIMIT for sample in samples]
        by_sample = [None if is_cut else signal for signal, is_cut in zip(by_sample, cut, strict=True)]
    by_sample = _whitened(samples, by_sample) if rl.whiten_advantages else by_sample
    if rl.shaping is not None:
        good = [sample.episode.total_reward >= rl.shaping.min_reward - REWARD_EPSILON for sample in samples]
        extra = [
            sample.mask * rl.shaping.correct_boost * is_good for sample, is_good in zip(samples, good, strict=True)
        ]
        by_sample = [signal and signal.plus(boost) for signal, boost in zip(by_sample, extra, strict=True)]
    return by_sample


def _whitened(samples: Sequence[Sample], signals: Sequence[Signal | None]) -> list[Signal | None]:
    """With advantages of mean 0 and variance 1 over all action tokens of the samples that take part."""
    learnt = [(sample.mask > 0, signal.advantages) for sample, signal in zip(samples, signals, strict=True) if signal]
    if not learnt:
        return list(signals)
    masks, advantages = zip(*learnt, strict=True)
    white = whiten(np.concatenate(advantages), np.concatenate(masks))
    parts = iter(np.split(white, np.cumsum([len(mask) for mask in masks])[:-1]))
    return [signal and dataclasses.replace(signal, advantages=next(parts)) for signal in signals]


def kl_penalty(sample: Sample, kl: KLConfig) -> np.ndarray:
    """f64[T]: coefficient times the KL estimate of each action token, as a number: for rewards and advantages."""
    estimate = kl_estimate(sample.trajectory.logprobs.astype(np.float64), sample.reference, kl.estimator)
    return np.where(sample.mask > 0, kl.coefficient * estimate, 0.0)


def teacher_advantages(sample: Sample, rl: RLConfig) -> np.ndarray:
    """f64[T]: coefficient times log q - log p of each action token; p as recorded when sampling."""
    student = sample.trajectory.logprobs.astype(np.float64)
    return rl.distill.coefficient * sampled_advantages(student, sample.teacher.logprobs, sample.mask > 0)


def _group_relative(groups: Sequence[Group], samples: Sequence[Sample], rl: RLConfig) -> list[Signal | None]:
    """Every action token of an attempt has the attempt's advantage; so has every trajectory of an episode."""
    scores, valid = rewards(groups)
    live = valid & ~(zero_signal(scores, valid)[:, None] & rl.advantage.drop_zero_signal)
    if rl.kl_in("reward"):
        for sample in samples:
            scores[sample.group, sample.attempt] -= kl_penalty(sample, rl.kl).sum()
    estimator: GroupAdvantage = rl.advantage
    places = [(sample.group, sample.attempt) for sample in samples]
    if estimator.multi_trajectory == "statistics":
        advantages = _over_trajectories(estimator, scores, valid, places)
    else:
        of_attempts = compared(estimator, scores, valid, live)
        share = collections.Counter(places if estimator.multi_trajectory == "divide" else set(places))
        advantages = [of_attempts[place] / share[place] for place in places]
    return [
        Signal(sample.mask * advantage) if live[place] else None
        for sample, place, advantage in zip(samples, places, advantages, strict=True)
    ]


def _over_trajectories(
    estimator: GroupAdvantage,
    scores: np.ndarray,
    valid: np.ndarray,
    places: list[tuple[int, int]],
) -> list[float]:
    """Advantages in groups whose members are trajectories, each with the reward of its episode."""
    filled, column = [0] * len(scores), []
    for g, _ in places:
        column.append(filled[g])
        filled[g] += 1
    shape = (len(scores), max(column, default=-1) + 1)
    values, mask = np.zeros(shape), np.zeros(shape, bool)
    for (g, s), c in zip(places, column, strict=True):
        values[g, c], mask[g, c] = scores[g, s], valid[g, s]
    read = mask & ~(zero_signal(values, mask)[:, None] & estimator.drop_zero_signal)
    advantages = compared(estimator, values, mask, read)
    single = (mask.sum(axis=1) == 1) & (scores.shape[1] == 1)  # planned with one attempt: no other has failed
    if single.any():  # beside the rewards of all other trajectories, for what is taken over the batch
        every = np.ones((mask.sum(), 1), bool)
        of_one = compared(estimator, values[mask][:, None], every, every)
        advantages[single, 0] = of_one[single[np.nonzero(mask)[0]], 0]
    advantages = np.where(alone(valid), 0.0, advantages)  # of several trajectories or not
    return [advantages[g, c] for (g, _), c in zip(places, column, strict=True)]


def _over_turns(groups: Sequence[Group], samples: Sequence[Sample], rl: RLConfig) -> list[Signal | None]:
    """Every action token of a turn has the turn's advantage. The episode's reward is in its last turn's."""
    if not samples:
        return []
    _, valid = rewards(groups)
    turns: list[np.ndarray] = []  # i64[T] of each sample: the turn of its episode that an action token is in, or -1
    attempts: dict[tuple[int, int], np.ndarray] = {}
    numbers: dict[bytes, int] = {}  # of states
    for sample in samples:
        place = sample.group, sample.attempt
        if place not in attempts:  # its first trajectory: all of them are numbered together
            of_trajectories, attempts[place] = by_turn(sample.episode)
            attempts[place][-1] += sample.episode.reward
            turns += of_trajectories
    shape = (*valid.shape, max(map(len, attempts.values())))
    steps, live, began = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape, np.int64)
    more = (began,) if rl.advantage.reads_states else branches(groups) if rl.advantage.reads_branches else ()
    for place, rewards_of_turns in attempts.items():
        steps[place][: len(rewards_of_turns)], live[place][: len(rewards_of_turns)] = rewards_of_turns, valid[place]
        began_in = states(groups[place[0]].episodes[place[1]]) if rl.advantage.reads_states else ()
        began[place][: len(began_in)] = [numbers.setdefault(state, len(numbers)) for state in began_in]
    silent = zero_signal(*(x.reshape(len(valid), -1) for x in (steps, live))) | alone(live.any(axis=2))[:, 0]
    if rl.kl_in("reward"):  # behind `silent`, as for groups: whether there is signal is asked of the rewards alone
        for sample, turn in zip(samples, turns, strict=True):
            penalty = kl_penalty(sample, rl.kl)
            np.subtract.at(steps[sample.group, sample.attempt], turn[turn >= 0], penalty[turn >= 0])
    read = live & ~(silent[:, None, None] & rl.advantage.drop_zero_signal)
    advantages = compared(rl.advantage, steps, live, read, *more)
    left_out = rl.advantage.reads_branches and not rl.advantage.learns_forks
    return [
        Signal(np.where(turn >= 0, advantages[sample.group, sample.attempt, turn], 0.0))
        if valid[sample.group, sample.attempt]
        and not (silent[sample.group] and rl.advantage.drop_zero_signal)
        and not (left_out and sample.episode.fork_of is not None)
        else None
        for sample, turn in zip(samples, turns, strict=True)
    ]


def _along_tokens(groups: Sequence[Group], samples: Sequence[Sample], rl: RLConfig) -> list[Signal | None]:
    """Process rewards sit at the ends of turns, the episode's on the last action token of each of its trajectories."""
    process = [reward for group in groups for episode in group.episodes for reward in token_rewards(episode)]
    paths = {
        i: _path(sample, reward, rl)
        for i, (sample, reward) in enumerate(zip(samples, process, strict=True))
        if not sample.episode.stop_reason.is_failure
    }
    signals: list[Signal | None] = [None] * len(samples)
    for i, estimate in zip(paths, estimates(list(paths.values()), rl), strict=True):
        learnt = () if samples[i].values is None else (estimate.returns, estimate.learnt)
        signals[i] = Signal(estimate.advantages, *learnt)
    return signals


def _path(sample: Sample, reward: np.ndarray, rl: RLConfig) -> TokenPath:
    """What an advantage along tokens reads of one sample; `reward` f64[T] is its process reward."""
    zero = np.zeros(len(sample.mask), np.float32)
    reward = reward - (kl_penalty(sample, rl.kl) if rl.kl_in("reward") else 0.0)
    reward[np.flatnonzero(sample.mask)[-1]] += sample.episode.reward
    log_rho = zero if sample.old is None else sample.old - sample.trajectory.logprobs
    values = zero if sample.values is None else sample.values
    return TokenPath(reward, values, sample.mask > 0, sample.trajectory.turns, log_rho)


_DTYPES = TokenPath(np.float32, np.float32, bool, np.int32, np.float32)
_ROWS = 64  # trajectories per call: a static shape, so that nothing compiles twice


def compared(
    advantage: GroupAdvantage | TurnAdvantage, rewards: np.ndarray, mask: np.ndarray, read: np.ndarray, *more: Any
) -> np.ndarray:
    """What an advantage that compares attempts says of them: float as `rewards`, finite where bool `read`.

    `more`: the states of turns, or `branches`, for one that reads them.
    """
    axes = "one number per attempt, [N, G]" if rewards.ndim == 2 else "one number per turn, [N, G, K]"
    expected = contract.Array("advantages", axes, rewards.shape)
    return contract.numbers(advantage, contract.call(advantage, rewards, mask, *more), expected, read, of=[rewards])


def estimated(advantage: TokenAdvantage, path: TokenPath) -> Estimate:
    """What an advantage along tokens says of one trajectory: three arrays [T]."""
    kinds = {"advantages": "f", "returns": "f", "learnt tokens": "bf"}
    expected = [contract.Array(name, "one number per token, [T]", path.mask.shape, kinds[name]) for name in kinds]
    return Estimate(*contract.arrays(advantage, contract.call(advantage, path), *expected))


def warm_up(rl: RLConfig) -> None:
    """Compiles what the advantage runs on the device."""
    if isinstance(rl.advantage, TokenAdvantage):
        zero = np.zeros(1, np.float32)
        estimates([TokenPath(zero, zero, np.zeros(1, bool), np.zeros(1, np.int32), zero)], rl)


@functools.partial(jax.jit, static_argnames="advantage")
def _estimate_rows(rows: TokenPath, advantage: TokenAdvantage) -> Estimate:
    return jax.vmap(functools.partial(estimated, advantage))(rows)


def estimates(paths: list[TokenPath], rl: RLConfig) -> list[Estimate]:
    """Estimates of ragged trajectories, f32[T] each."""
    # One row more than a packed row: the last token of a trajectory is a target, never an input.
    width = rl.batch.row_tokens + 1
    out = []
    for start in range(0, len(paths), _ROWS):
        block = paths[start : start + _ROWS]
        padded = TokenPath(*(np.zeros((_ROWS, width), dtype) for dtype in _DTYPES))
        for row, path in enumerate(block):
            chex.assert_equal_shape(list(path))
            for target, stream in zip(padded, path, strict=True):
                length = min(len(stream), width)  # the tail behind the last action may be longer than a row
                target[row, :length] = stream[:length]
        with jax.transfer_guard("disallow"):
            rows = jax.device_get(_estimate_rows(jax.device_put(padded), advantage=rl.advantage))
        for row, path in enumerate(block):
            full = [np.zeros(len(path.mask), np.float32) for _ in rows]
            length = min(len(path.mask), width)
            for target, row_of in zip(full, rows, strict=True):
                target[:length] = row_of[row, :length]
            out.append(Estimate(*full))
            for name in ("advantages", "returns"):
                numbers, like = (
                    getattr(out[-1], name),
                    contract.Array(name, "one number per token, [T]", path.mask.shape),
                )
                contract.numbers(rl.advantage, numbers, like, path.mask, of=[path.rewards, path.values])
    return out


def by_turn(episode: Episode) -> tuple[list[np.ndarray], np.ndarray]:
    """The episode's turns that have a token the policy is trained on, numbered 0 to K - 1, and their process rewards.

    Returns:
      i64[T] of each trajectory with an action token: the turn of each action token, -1 elsewhere; and f64[K]. A reward
      of a turn without such a token is the turn's before it, also at the end of a trajectory and in one that has none:
      every turn counts of which a token is there, whatever its kind. What a fork has copied is its parent's.
    """
    numbers, start = [], 0
    for trajectory in episode.trajectories:
        mask = action_mask(trajectory) > 0
        if mask.any():
            numbers.append(np.where(mask, start + trajectory.turns.astype(np.int64), -1))
        start += int(trajectory.turns.max(initial=-1)) + 1
    if not numbers:
        return [], np.zeros(0)
    live = np.unique(np.concatenate(numbers))
    live = live[live >= 0]
    rewards = np.zeros(len(live))
    own = np.arange(episode.forked_at, len(episode.turn_rewards))
    at = np.searchsorted(live, own, side="right") - 1
    np.add.at(rewards, np.maximum(at, 0), episode.turn_rewards[episode.forked_at :])
    return [np.where(number < 0, -1, np.searchsorted(live, number)) for number in numbers], rewards


def token_rewards(episode: Episode) -> list[np.ndarray]:
    """f64[T] of each trajectory with an action token: every turn's process reward on the turn's last action token."""
    indices, rewards = by_turn(episode)
    out = []
    for index in indices:
        at = np.flatnonzero(index >= 0)[::-1]
        turns, first = np.unique(index[at], return_index=True)  # first from behind
        out.append(np.zeros(len(index)))
        out[-1][at[first]] = rewards[turns]
    return out


def branches(groups: Sequence[Group]) -> tuple[np.ndarray, np.ndarray]:
    """Of attempts [N, G]: the place in its group of the one that a fork goes on from, else -1; its first own turn."""
    parents = np.full((len(groups), max(len(group.episodes) for group in groups)), -1)
    forked_at = np.zeros_like(parents)
    for g, group in enumerate(groups):
        places = {episode.sample: place for place, episode in enumerate(group.episodes)}
        for place, episode in enumerate(group.episodes):
            if episode.fork_of is not None:
                parents[g, place], forked_at[g, place] = places[episode.fork_of], episode.forked_at
    return parents, forked_at


def states(episode: Episode) -> list[bytes]:
    """The state in which each turn of `by_turn` began: the tokens that the policy was shown since it last spoke.

    Of a trajectory's first turn that is all before it. Two turns of a group began in the same state where these are
    equal, which is what GiGPO calls an anchor state: an environment must show all that matters, and no more, each turn.
    """
    out: list[bytes] = []
    for trajectory in episode.trajectories:
        at = np.flatnonzero(action_mask(trajectory))
        _, first = np.unique(trajectory.turns[at], return_index=True)
        for index in first:
            before = at[index - 1] + 1 if index else 0
            out.append(trajectory.tokens[before : at[index]].tobytes())
    return out
