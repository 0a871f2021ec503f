"""Replay of past successes: a bounded buffer of solved attempts, used while the policy still has something to learn.

WebRL (Qi et al., arXiv 2411.02337, section 3.3): of the past successes those are replayed whose perplexity under the
policy as it is now lies in [1 / 0.95, 1 / 0.5]: neither what it would do anyhow, nor what is too far from it. Its code
has 0.5 < exp(mean token log-prob) <= 0.95, as here; it takes turns one by one (`rl.replay.turns`), at most twice as
many as are new (`rl.replay.times`).

Past successes were sampled by another policy, so they are never in an on-policy group. `rl.replay.use` is

  nll     their negative log-likelihood, a mean over their tokens, times `coefficient`
  policy  the policy objective with the advantage that they had in their own group, times `coefficient` and the
          importance weights of `rl.correction`, from the policy that sampled them to the one before this step;
          attempts without an advantage (their group was solved throughout) are not kept
  reference   the policy objective, which compares with the reference and not with who sampled (objectives.WebRL), with
          the advantage `coefficient`: WebRL's code gives 1 to every turn of a success

NumPy only. The buffer forgets its oldest attempts first, and is saved whole with the checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.algorithms.advantages import zero_signal
from jaxagent.algorithms.corrections import Importance, factors_of
from jaxagent.algorithms.estimate import compared
from jaxagent.algorithms.estimators import GroupAdvantage
from jaxagent.algorithms.streams import Streams, action_mask, rewards
from jaxagent.config import ReplayConfig
from jaxagent.data import codec
from jaxagent.types import Group, TokenKind, Trajectory


@dataclasses.dataclass(frozen=True)
class Success:
    """One attempt that solved its task."""

    task_id: str
    step: int  # when it was sampled
    reward: float
    advantage: float  # in its own group
    trajectories: tuple[Trajectory, ...]  # each with an action token


# An attempt that is to be replayed, with f32[T] log-probs per trajectory under the policy as it is now.
ScoredSuccess = tuple[Success, list[np.ndarray]]
Score = Callable[[list[Trajectory]], list[np.ndarray]]  # f32[T] log-probs of each


class ReplayBuffer:
    """The newest `capacity` successes, oldest first. Owned by the loop; not thread-safe."""

    def __init__(self, cfg: ReplayConfig, seed: int):
        self._cfg, self._seed = cfg, seed
        self._kept: list[Success] = []

    def __len__(self) -> int:
        return len(self._kept)

    def record(self, groups: Sequence[Group], step: int, advantage: Any) -> None:
        """Keeps the successes among all groups of a step, in task order.

        Attempts have an advantage of their own only where `rl.advantage` is one from groups.
        """
        advantages = np.zeros((0, 0))
        if isinstance(advantage, GroupAdvantage) and groups:
            scores, counts = rewards(groups)
            advantages = compared(advantage, scores, counts, counts & ~zero_signal(scores, counts)[:, None])
        solved = [
            (episode, float(advantages[g, s]) if advantages.size else 0.0)
            for g, group in enumerate(groups)
            for s, episode in enumerate(group.episodes)
            if not episode.stop_reason.is_failure and episode.total_reward >= self._cfg.min_reward
        ]
        for episode, worth in solved:
            trajectories = tuple(t for t in episode.trajectories if action_mask(t).any())
            if trajectories and (worth or self._cfg.use != "policy"):
                self._kept.append(Success(episode.task.id, step, float(episode.total_reward), worth, trajectories))
        self._kept = self._kept[-self._cfg.capacity :]

    def candidates(self, step: int) -> list[Success]:
        """All successes that are kept, in this step's random order."""
        order = np.random.default_rng([self._seed, step, len(self._kept)]).permutation(len(self._kept))
        return [self._kept[i] for i in order]

    def replayed(
        self,
        step: int,
        policy: Score,
        correction: Importance | None,
        beside: Sequence[Streams],
        reference: Score | None = None,
    ) -> tuple[list[Streams], dict[str, float]]:
        """Streams of the past successes that a step learns from, `beside` those of its own samples, and metrics.

        `policy`: of the policy before the step's first update; `reference`: of what the objective compares with.
        """
        cfg = self._cfg
        if cfg.times:
            new = [turns_of(s.trajectory) if cfg.turns else [s.episode] for s in beside if s.policy_weights.any()]
            bound = int(cfg.times * (sum(map(len, new)) if cfg.turns else len({number for (number,) in new})))
            cfg = dataclasses.replace(cfg, per_step=min(cfg.per_step, bound))
        chosen, scored = choose(self.candidates(step), policy, cfg) if cfg.per_step else ([], 0)
        unused = 1 + max((s.episode for s in beside), default=-1)
        replayed = streams(chosen, cfg, correction, unused, reference)
        counts = {"replay/used": float(len(chosen)), "replay/scored": float(scored)}
        if cfg.turns:
            counts["replay/turns"] = float(sum(len(turns_of(t)) for s, _ in chosen for t in s.trajectories))
        return replayed, counts

    def get_state(self) -> list[dict[str, Any]]:
        """All successes that are kept, as JSON values."""
        return [
            dataclasses.asdict(dataclasses.replace(s, trajectories=()))
            | {"trajectories": [codec.encode_trajectory(t) for t in s.trajectories]}
            for s in self._kept
        ]

    def set_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from what `get_state` gave."""
        successes = []
        for item in state:
            trajectories = tuple(codec.decode_trajectory(t, "the bundle's replay") for t in item["trajectories"])
            successes.append(Success(**{**item, "trajectories": trajectories}))
        self._kept = successes[-self._cfg.capacity :]


def token_probability(success: Success, logprobs: Sequence[np.ndarray]) -> float:
    """1 / perplexity: exp of the mean log-prob of an attempt's action tokens; f32[T] per trajectory."""
    action_logprobs = [x[action_mask(t) > 0] for t, x in zip(success.trajectories, logprobs, strict=True)]
    return float(np.exp(np.mean(np.concatenate(action_logprobs).astype(np.float64))))


def turns_of(trajectory: Trajectory) -> list[int]:
    """The numbers of its turns that hold an action token."""
    return np.unique(trajectory.turns[action_mask(trajectory) > 0]).tolist()


def within(scored: ScoredSuccess, cfg: ReplayConfig, most: int) -> ScoredSuccess | None:
    """The attempt with its first `most` turns whose own probability is in the window; None where it has no such turn.

    The tokens of its other turns are what these were answered to, and no longer actions.
    """
    success, logprobs = scored
    trajectories = []
    for trajectory, now in zip(success.trajectories, logprobs, strict=True):
        actions, kinds = action_mask(trajectory) > 0, trajectory.kinds.copy()
        for turn in turns_of(trajectory):
            own = actions & (trajectory.turns == turn)
            if most and _inside(math.exp(float(np.mean(now[own].astype(np.float64)))), cfg):
                most -= 1
            else:
                kinds[own] = TokenKind.PROMPT
        trajectories.append(dataclasses.replace(trajectory, kinds=kinds))
    left = [(t, now) for t, now in zip(trajectories, logprobs, strict=True) if action_mask(t).any()]
    return (
        (dataclasses.replace(success, trajectories=tuple(t for t, _ in left)), [x for _, x in left]) if left else None
    )


def _inside(probability: float, cfg: ReplayConfig) -> bool:
    return cfg.low < probability <= cfg.high


def choose(candidates: Sequence[Success], score: Score, cfg: ReplayConfig) -> tuple[list[ScoredSuccess], int]:
    """The first `per_step` candidates with low < 1 / perplexity <= high, and how many were looked at.

    They are scored some at a time, until there are enough: a full buffer costs no more than it must. `score`:
    under the policy as it is now. With `cfg.turns` the first `per_step` turns of which that holds.
    """
    chosen: list[ScoredSuccess] = []
    left, size = cfg.per_step, -(-cfg.per_step // 2) if cfg.turns else 2 * cfg.per_step  # an attempt has several turns
    for start in range(0, len(candidates), size):
        block = candidates[start : start + size]
        scores = iter(score([t for success in block for t in success.trajectories]))
        for one in [(success, [next(scores) for _ in success.trajectories]) for success in block]:
            inside = within(one, cfg, left) if cfg.turns else one if _inside(token_probability(*one), cfg) else None
            if inside is not None and left:
                chosen.append(inside)
                left -= sum(len(turns_of(t)) for t in inside[0].trajectories) if cfg.turns else 1
        if not left:
            return chosen, start + len(block)
    return chosen, len(candidates)


def streams(
    chosen: Sequence[ScoredSuccess],
    cfg: ReplayConfig,
    correction: Importance | None,
    first_episode: int,
    reference: Score | None = None,
) -> list[Streams]:
    """Streams of replayed attempts, with relative weights; log-probs are those before this step's first update.

    `first_episode`: a number that no episode of the rollout batch has, nor any after it.
    """
    out = []
    every = [t for success, _ in chosen for t in success.trajectories]
    of_reference = iter(reference(every) if cfg.use == "reference" and reference and every else ())
    for number, (success, scores) in enumerate(chosen):
        for trajectory, now in zip(success.trajectories, scores, strict=True):
            mask = action_mask(trajectory)
            if cfg.use == "nll":
                weights = mask * np.float32(cfg.coefficient)
                out.append(Streams.of(trajectory, first_episode + number, nll_weights=weights))
                continue
            # What the learner compares with what was sampled is about this step's samples: not about these.
            current = dataclasses.replace(trajectory, logprobs=np.where(mask > 0, now, 0.0).astype(np.float32))
            more: dict[str, Any] = {}
            worth = success.advantage
            if cfg.use == "reference":
                more, worth = {"reference_logprobs": next(of_reference)}, 1.0
            else:
                at = np.flatnonzero(mask)
                assert correction is not None  # strategies.check: "policy" needs one
                if (of_actions := factors_of(correction, now[at], trajectory.logprobs[at])) is None:
                    continue
                more = {"corrections": np.ones(len(mask))}
                more["corrections"][at] = of_actions
            more |= {"policy_weights": mask, "advantages": mask * worth * cfg.coefficient}
            out.append(Streams.of(current, first_episode + number, reward=success.reward, **more))
    return out
