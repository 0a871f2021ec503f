"""From a rollout batch to per-token advantages: runs the function that `rl.advantage` names.

In: a `Rollout`. Out: per trajectory that takes part, its advantages, and the critic's targets where there is one.
An episode of several trajectories, by `rl.multi_trajectory`, when advantages come from groups:

  full        each trajectory has the episode's whole advantage (slime's AgentFlow, MemAgent)
  divide      each has it divided by their number (LMIS's MemAgent)
  statistics  each trajectory counts as an attempt in the group's mean and std (AgentFlow's Flow-GRPO, 2510.05592),
              where one without an action token is none, though the other two count its reward

Advantages over turns read process rewards too (`process.py`) and count an episode as one sequence of turns.
Here is everything around the pure functions: failed attempts, groups without signal, KL in the reward or in the
advantage, whitening, padding. Axis letters: N groups, G samples per group, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import numpy as np

from jaxagent.algorithms.advantages import GROUP_ADVANTAGES, alone, whiten, zero_signal
from jaxagent.algorithms.best_of_k import BEST_OF_K
from jaxagent.algorithms.distill import sampled_advantages
from jaxagent.algorithms.kl import kl_estimate
from jaxagent.algorithms.process import TURN_ADVANTAGES, by_turn, token_rewards
from jaxagent.algorithms.rollout import Rollout, action_mask, rewards, walk
from jaxagent.algorithms.token_advantages import TOKEN_ADVANTAGES, Estimate, Path
from jaxagent.config import CriticConfig, RLConfig
from jaxagent.types import Trajectory


class Signal(NamedTuple):
    """What one trajectory is trained with."""

    advantages: np.ndarray  # float[T], 0 outside action tokens
    returns: np.ndarray | None = None  # float[T] the critic's regression targets; None without a critic
    learnt: np.ndarray | None = None  # f32[T] 1 where the critic learns them


def signals(rollout: Rollout, rl: RLConfig) -> dict[int, Signal]:
    """The signal of every trajectory that takes part, by its index in `trajectories(rollout.groups)`."""
    if rl.advantage in TOKEN_ADVANTAGES:
        found = _along_tokens(rollout, rl)
    else:
        found = _over_turns(rollout, rl) if rl.advantage in TURN_ADVANTAGES else _group_relative(rollout, rl)
    masks = {i: action_mask(t) > 0 for i, (*_, t) in enumerate(walk(rollout.groups)) if i in found}
    if rl.kl.where == "advantage":
        penalties = {i: kl_penalty(rollout, rl, i, t) for i, (*_, t) in enumerate(walk(rollout.groups)) if i in found}
        found = {i: s._replace(advantages=s.advantages - penalties[i]) for i, s in found.items()}
    if rollout.teacher is not None and rl.distill.loss == "sampled":
        told = {
            i: teacher_advantages(rollout, rl, i, t) for i, (*_, t) in enumerate(walk(rollout.groups)) if i in found
        }
        found = {i: s._replace(advantages=s.advantages + told[i]) for i, s in found.items()}
    if rl.whiten_advantages and found:
        lengths = np.cumsum([len(mask) for mask in masks.values()])[:-1]
        joined = np.concatenate([s.advantages for s in found.values()])
        white = np.split(whiten(joined, np.concatenate(list(masks.values()))), lengths)
        found = {i: s._replace(advantages=w) for (i, s), w in zip(found.items(), white, strict=True)}
    return found


def kl_penalty(rollout: Rollout, rl: RLConfig, i: int, trajectory: Trajectory) -> np.ndarray:
    """f64[T]: coefficient times the KL estimate of each action token, as a number: for rewards and advantages."""
    mask = action_mask(trajectory)
    if rl.kl.coefficient == 0:
        return np.zeros(len(trajectory))
    estimate = kl_estimate(trajectory.logprobs.astype(np.float64), rollout.reference[i], rl.kl.estimator)
    return np.where(mask > 0, rl.kl.coefficient * estimate, 0.0)


def teacher_advantages(rollout: Rollout, rl: RLConfig, i: int, trajectory: Trajectory) -> np.ndarray:
    """f64[T]: coefficient times log q - log p of each action token; p as recorded when sampling."""
    mask = action_mask(trajectory) > 0
    student = trajectory.logprobs.astype(np.float64)
    return rl.distill.coefficient * sampled_advantages(student, rollout.teacher[i].logprobs, mask)


def _group_relative(rollout: Rollout, rl: RLConfig) -> dict[int, Signal]:
    """Every action token of an attempt has the attempt's advantage; so has every trajectory of an episode."""
    scores, counted = rewards(rollout.groups)
    live = counted & ~(zero_signal(scores, counted)[:, None] & rl.drop_zero_signal)
    if rl.kl.where == "reward":
        for i, (g, s, _, trajectory) in enumerate(walk(rollout.groups)):
            scores[g, s] -= kl_penalty(rollout, rl, i, trajectory).sum()
    if rl.advantage in BEST_OF_K:
        estimator = functools.partial(BEST_OF_K[rl.advantage], k=rl.best_of)
    else:
        estimator = GROUP_ADVANTAGES[rl.advantage]
    members = [(g, s, action_mask(trajectory)) for g, s, _, trajectory in walk(rollout.groups)]
    share = np.ones_like(scores)
    if rl.multi_trajectory == "divide":
        share = np.zeros_like(scores)
        np.add.at(share, ([g for g, _, _ in members], [s for _, s, _ in members]), 1.0)
    if rl.multi_trajectory == "statistics":
        advantages = _over_trajectories(estimator, scores, counted, [(g, s) for g, s, _ in members])
    else:
        whole = estimator(scores, counted)
        advantages = [whole[g, s] / share[g, s] for g, s, _ in members]
    return {i: Signal(mask * advantages[i]) for i, (g, s, mask) in enumerate(members) if live[g, s]}


def _over_trajectories(
    estimator: Callable[[np.ndarray, np.ndarray], np.ndarray],
    scores: np.ndarray,
    counted: np.ndarray,
    members: list[tuple[int, int]],
) -> list[float]:
    """Advantages in groups whose members are trajectories, each with the reward of its episode."""
    filled, column = [0] * len(scores), []
    for g, _ in members:
        column.append(filled[g])
        filled[g] += 1
    shape = (len(scores), max(column, default=-1) + 1)
    values, mask = np.zeros(shape), np.zeros(shape, bool)
    for (g, s), c in zip(members, column, strict=True):
        values[g, c], mask[g, c] = scores[g, s], counted[g, s]
    advantages = estimator(values, mask)
    single = (mask.sum(axis=1) == 1) & (scores.shape[1] == 1)  # planned with one attempt: no other has failed
    if single.any():
        advantages[single, :1] = estimator(values[single, :1], mask[single, :1])
    advantages = np.where(alone(counted), 0.0, advantages)  # of several trajectories or not
    return [advantages[g, c] for (g, _), c in zip(members, column, strict=True)]


def _over_turns(rollout: Rollout, rl: RLConfig) -> dict[int, Signal]:
    """Every action token of a turn has the turn's advantage. The episode's reward is in its last turn's."""
    _, counted = rewards(rollout.groups)
    members = list(walk(rollout.groups))
    if not members:
        return {}
    indices: dict[int, np.ndarray] = {}
    attempts: dict[tuple[int, int], np.ndarray] = {}
    for i, (g, s, episode, _) in enumerate(members):
        if (g, s) not in attempts:  # its first trajectory: all of them are numbered together
            of_trajectories, attempts[g, s] = by_turn(episode)
            attempts[g, s][-1] += episode.reward
            indices |= dict(enumerate(of_trajectories, start=i))
    if rl.kl.where == "reward":
        for i, (g, s, _, trajectory) in enumerate(members):
            mask = indices[i] >= 0
            np.subtract.at(attempts[g, s], indices[i][mask], kl_penalty(rollout, rl, i, trajectory)[mask])
    shape = (*counted.shape, max(map(len, attempts.values())))
    steps, live = np.zeros(shape), np.zeros(shape, bool)
    for (g, s), found in attempts.items():
        steps[g, s, : len(found)], live[g, s, : len(found)] = found, counted[g, s]
    silent = zero_signal(*(x.reshape(len(counted), -1) for x in (steps, live))) | alone(live.any(axis=2))[:, 0]
    advantages = TURN_ADVANTAGES[rl.advantage](steps, live)
    return {
        i: Signal(np.where(indices[i] >= 0, advantages[g, s, indices[i]], 0.0))
        for i, (g, s, _, _) in enumerate(members)
        if counted[g, s] and not (silent[g] and rl.drop_zero_signal)
    }


def _along_tokens(rollout: Rollout, rl: RLConfig) -> dict[int, Signal]:
    """Process rewards sit at the ends of turns, the episode's on the last action token of each of its trajectories."""
    paths = {}
    process = [given for group in rollout.groups for episode in group.episodes for given in token_rewards(episode)]
    for i, (_, _, episode, trajectory) in enumerate(walk(rollout.groups)):
        if not episode.stop_reason.is_failure:
            mask = action_mask(trajectory)
            reward = process[i] - (kl_penalty(rollout, rl, i, trajectory) if rl.kl.where == "reward" else 0.0)
            reward[np.flatnonzero(mask)[-1]] += episode.reward
            values = np.zeros(len(mask), np.float32) if rollout.values is None else rollout.values[i]
            log_rho = np.zeros(len(mask)) if rollout.old is None else rollout.old[i] - trajectory.logprobs
            paths[i] = Path(reward, values, mask > 0, trajectory.turns, log_rho)
    estimates = _estimates(list(paths.values()), rl)
    critic = rollout.values is not None
    return {
        i: Signal(e.advantages, e.returns, e.learnt) if critic else Signal(e.advantages)
        for i, e in zip(paths, estimates, strict=True)
    }


def warm_up(rl: RLConfig) -> None:
    """Compiles what the advantage runs on the device."""
    if rl.advantage in TOKEN_ADVANTAGES:
        zero = np.zeros(1, np.float32)
        _estimates([Path(zero, zero, np.zeros(1, bool), np.zeros(1, np.int32), zero)], rl)


_DTYPES = Path(np.float32, np.float32, bool, np.int32, np.float32)
_ROWS = 64  # trajectories per call: a static shape, so that nothing compiles twice


@functools.partial(jax.jit, static_argnames=("name", "critic"))
def _estimate_rows(rows: Path, name: str, critic: CriticConfig) -> Estimate:
    return jax.vmap(lambda path: TOKEN_ADVANTAGES[name](path, critic))(rows)


def _estimates(paths: list[Path], rl: RLConfig) -> list[Estimate]:
    """Estimates of ragged trajectories, f32[T] each."""
    # One row more than a packed row: the last token of a trajectory is a target, never an input.
    width = rl.batch.row_tokens + 1
    out = []
    for start in range(0, len(paths), _ROWS):
        block = paths[start : start + _ROWS]
        padded = Path(*(np.zeros((_ROWS, width), dtype) for dtype in _DTYPES))
        for row, path in enumerate(block):
            chex.assert_equal_shape(list(path))
            for target, stream in zip(padded, path, strict=True):
                used = min(len(stream), width)  # the tail behind the last action may be longer than a row
                target[row, :used] = stream[:used]
        with jax.transfer_guard("disallow"):
            rows = jax.device_get(_estimate_rows(jax.device_put(padded), name=rl.advantage, critic=rl.critic))
        for row, path in enumerate(block):
            full = [np.zeros(len(path.mask), np.float32) for _ in rows]
            used = min(len(path.mask), width)
            for target, found in zip(full, rows, strict=True):
                target[:used] = found[row, :used]
            out.append(Estimate(*full))
    return out
