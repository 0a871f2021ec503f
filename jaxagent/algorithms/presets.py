"""An algorithm is a composition of choices, each a field of `rl` that names a pure function.

    rl.advantage      what is better than expected     advantages.py, best_of_k.py (from groups), process.py (over
                                                       turns), token_advantages.py (along tokens)
    rl.objective      how an advantage moves a policy  policy_loss.py
    rl.correction     samples of another policy        corrections.py
    rl.kl             the pull to a reference          kl.py, in the loss, the reward or the advantage
    rl.aggregation    how tokens become one number     aggregate.py
    rl.distill        a teacher's judgement            distill.py, in the advantage or the loss
    rl.echo, ...      auxiliary terms: on where their coefficient is not 0

In: the groups of one rollout batch (and, where a choice asks, critic values and reference log-probs of their
trajectories). Out: `Streams` with relative weights; `mini_batches` splits them into optimiser updates and normalises
the weights of each. The learner never knows which algorithm it runs. Known combinations have names in `published.py`;
`checks.py` refuses those that mean nothing, `needs.py` says what the learner has to bring.
Axis letters: N groups, G samples per group, T tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxagent.algorithms import aggregate, corrections, distill, echo, estimate
from jaxagent.algorithms.advantages import zero_signal
from jaxagent.algorithms.checks import check
from jaxagent.algorithms.distill import Scores
from jaxagent.algorithms.estimate import Signal
from jaxagent.algorithms.needs import (
    needs_critic,
    needs_old,
    needs_reference,
    needs_student_top_k,
    needs_support,
    needs_teacher,
    needs_whole_teacher,
)
from jaxagent.algorithms.rollout import Rollout, action_mask, rewards, trajectories, walk
from jaxagent.algorithms.streams import Streams
from jaxagent.config import OPDConfig, RLConfig
from jaxagent.types import Episode, Group, Trajectory

__all__ = ["check", "mini_batches", "most_targets", "needs_critic", "needs_old", "needs_reference",
           "needs_student_top_k", "needs_support", "needs_teacher", "needs_whole_teacher", "streams",
           "trajectories", "warm_up"]  # fmt: skip

warm_up = estimate.warm_up


def distillation_alone(rl: RLConfig, opd: OPDConfig) -> RLConfig:
    """The stage's config with the teacher in place of the reward, and of whatever else the algorithm trains on.

    What only holds the policy (KL, entropy, z-loss) stays: KL in the reward, which there is none of, becomes KL in the
    advantage. All attempts are used, since none needs a reward.
    """
    where = "advantage" if rl.kl.where == "reward" else rl.kl.where
    return dataclasses.replace(
        rl,
        steps=opd.steps,
        optimizer=dataclasses.replace(rl.optimizer, learning_rate=opd.learning_rate),
        advantage="no_reward",
        kl=dataclasses.replace(rl.kl, where=where),
        drop_zero_signal=False,
        echo=dataclasses.replace(rl.echo, coefficient=0.0),
        positive_nll=dataclasses.replace(rl.positive_nll, coefficient=0.0),
        replay=dataclasses.replace(rl.replay, per_step=0),
        refill=dataclasses.replace(rl.refill, max_rounds=1),
        keep_groups_frac=1.0,
        distill=dataclasses.replace(rl.distill, coefficient=opd.coefficient),
    )


def refresh_due(rl: RLConfig, steps_done: int) -> bool:
    """Whether the reference becomes a copy of the policy now."""
    return needs_reference(rl) and rl.kl.refresh_every > 0 and steps_done % rl.kl.refresh_every == 0


def most_targets(rl: RLConfig, action_tokens: int, context_tokens: int) -> int:
    """Most tokens of one trajectory that the loss can need: fixes the shape of a batch before the first one exists.

    Args:
      rl: the stage's config.
      action_tokens: most tokens the policy can sample in one trajectory.
      context_tokens: most tokens of one trajectory.
    """
    if rl.echo.coefficient == 0:
        return min(action_tokens, context_tokens)
    return min(action_tokens + rl.echo.max_tokens, context_tokens) if rl.echo.max_tokens else context_tokens


def streams(
    groups: Sequence[Group],
    rl: RLConfig,
    progress: float,
    reference: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
    old: Sequence[np.ndarray] | None = None,
    teacher: Sequence[Scores] | None = None,
    students: Sequence[np.ndarray] | None = None,
) -> tuple[list[Streams], dict[str, float]]:
    """Runs the configured algorithm on one rollout batch.

    Args:
      groups: finished groups.
      rl: the stage's config.
      progress: steps done / steps planned.
      reference, values, old: f32[T] per trajectory of `trajectories(groups)`, where needed.
      teacher: its scores, one per trajectory; students: i32[T, K] the policy's most likely tokens, where needed.

    Returns:
      Streams with relative weights (only sequences that take part), and counts for the metrics; of no groups neither.
    """
    if not groups:
        return [], {}
    scores, counted = rewards(groups)
    rollout = Rollout(groups, progress, reference, old, values, teacher, students)
    signals = estimate.signals(rollout, rl)
    factors, vetoed, counts = _corrections(rollout, rl, list(signals))
    sequences = []
    for i, (g, s, episode, trajectory) in enumerate(walk(groups)):
        signal, auxiliary = signals.get(i), _auxiliary(rollout, rl, episode, trajectory)
        if signal is not None or auxiliary:
            policy = {} if signal is None else _policy(rollout, rl, i, trajectory, signal, factors[i], i in vetoed)
            sequences.append(Streams.of(trajectory, g * scores.shape[1] + s, **policy, **auxiliary))
    if teacher is not None:
        counts |= distill.metrics(trajectories(groups), teacher)
    silent = zero_signal(scores, counted)
    return sequences, counts | {
        "groups/zero_signal": float(np.sum(silent)),
        "groups/zero_signal_frac": float(np.mean(silent)),
        "groups/failed_episodes": float(sum(len(group.episodes) - len(group.valid) for group in groups)),
        "groups/sequences_trained": float(len(sequences)),
    }


def mini_batches(sequences: Sequence[Streams], rl: RLConfig, seed: Sequence[int]) -> Iterator[list[Streams]]:
    """Yields the optimiser updates of one rollout batch: `epochs` times `updates_per_step` even, shuffled parts.

    The trajectories of an episode stay together. Episodes that the policy term learns from and those that are there for
    an auxiliary term alone (ECHO's of silent groups, replayed successes) are parted evenly each for itself: since every
    update normalises on its own, a token would otherwise weigh the more, the fewer of the former its update has.

    Args:
      sequences: what `streams` gave.
      rl: the stage's config.
      seed: of the shuffle, e.g. (run seed, step).

    Yields:
      Sequences whose weights are normalised over that update. Empty parts are left out.
    """
    whole = itertools.groupby(enumerate(sequences), lambda at: at[1].episode if at[1].episode >= 0 else -1 - at[0])
    episodes = [[sequence for _, sequence in members] for _, members in whole]
    learnt = np.array([any(s.policy_weights.any() for s in episode) for episode in episodes], bool)
    for epoch in range(rl.epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(len(episodes))
        main = np.array_split(order[learnt[order]], rl.updates_per_step)
        beside = np.array_split(order[~learnt[order]], rl.updates_per_step)[::-1]  # the longer parts to the shorter
        for part in map(np.concatenate, zip(main, beside, strict=True)):
            if len(part):
                yield _normalise([sequence for i in part for sequence in episodes[i]], rl)


def _normalise(sequences: list[Streams], rl: RLConfig) -> list[Streams]:
    names = ("policy_weights", "kl_weights", "entropy_weights", "z_weights", "distill_weights", "value_weights")
    sequences = aggregate.normalise(sequences, names, rl.aggregation, rl.aggregation_constant)
    # VAPO (arXiv 2504.05118), eq. 11: over the tokens of positive examples, whatever the policy term does.
    sequences = aggregate.normalise(sequences, ["nll_weights"], "token_mean", 0.0)
    scales = echo.world_scales(
        [np.count_nonzero(s.ce_weights) for s in sequences],
        [np.count_nonzero(echo.target_mask(s.trajectory.kinds, "full_observation", 0)) for s in sequences],
        rl.echo.denominator,
        rl.aggregation_constant,
    )
    return [
        dataclasses.replace(
            s, ce_weights=(s.ce_weights * scale).astype(np.float32), policy_weights=s.policy_weights * s.corrections
        )
        for s, scale in zip(sequences, scales, strict=True)
    ]


def _policy(
    rollout: Rollout, rl: RLConfig, i: int, trajectory: Trajectory, signal: Signal, factor: np.ndarray, vetoed: bool
) -> dict[str, np.ndarray]:
    """Policy, KL-in-loss, entropy, z-loss and critic streams of one trajectory, with relative weights.

    Of a vetoed one the policy's alone, whose factors are 0: it counts in the policy term's denominator.
    """
    mask = action_mask(trajectory)
    if vetoed:
        return dict(advantages=signal.advantages, policy_weights=mask, corrections=factor)
    given = dict(
        advantages=signal.advantages,
        policy_weights=mask,
        entropy_weights=mask * np.float32(rl.entropy_coefficient),
        z_weights=mask * np.float32(rl.z_coefficient),
    )
    if rl.kl.coefficient != 0 and rl.kl.where == "loss":
        given |= dict(reference_logprobs=rollout.reference[i], kl_weights=mask * np.float32(rl.kl.coefficient))
    if rollout.old is not None:
        given |= dict(old_logprobs=rollout.old[i], corrections=factor)
    if rollout.teacher is not None and rl.distill.loss != "sampled":
        given |= dict(distill_weights=mask * np.float32(rl.distill.coefficient))
        if needs_support(rl):
            student = None if rollout.students is None else rollout.students[i]
            given |= dict(support=distill.support_of(rl.distill.support, rollout.teacher[i], student))
    if signal.returns is not None:
        given |= dict(
            returns=signal.returns,
            old_values=rollout.values[i] * mask,
            value_weights=signal.learnt * np.float32(rl.critic.value_coefficient),
        )
    return given


def _corrections(
    rollout: Rollout, rl: RLConfig, taking_part: list[int]
) -> tuple[dict[int, np.ndarray], set[int], dict[str, float | None]]:
    """Factors f64[T] of trajectories by index, which of these are vetoed (factors 0), and counts for the metrics."""
    every = trajectories(rollout.groups)
    factors = {i: np.ones(len(every[i])) for i in taking_part}
    if rl.correction.name not in corrections.IMPORTANCE:
        return factors, set(), {}
    choice = rl.correction
    bounds = (choice.name, choice.level, choice.low, choice.high)
    places = {i: np.flatnonzero(action_mask(every[i])) for i in taking_part}
    old = {i: rollout.old[i][at] for i, at in places.items()}
    behaviour = {i: every[i].logprobs[at] for i, at in places.items()}
    vetoed = {i for i in taking_part if corrections.vetoed(old[i], behaviour[i], choice.veto)}
    for i, at in places.items():
        factors[i][at] = 0.0 if i in vetoed else corrections.importance_weights(old[i], behaviour[i], *bounds)
    used = np.concatenate([factors[i][at] for i, at in places.items()]) if places else np.zeros(0)
    counts = {
        "correction/weight_mean": float(np.mean(used)) if len(used) else None,
        "correction/zero_frac": float(np.mean(used == 0)) if len(used) else None,
        "correction/vetoed": float(len(vetoed)),
    }
    if choice.normalise:
        mean = corrections.batch_mean(list(old.values()), list(behaviour.values()), *bounds)
        factors = {i: factor / mean for i, factor in factors.items()}
    return factors, vetoed, counts


def _auxiliary(rollout: Rollout, rl: RLConfig, episode: Episode, trajectory: Trajectory) -> dict[str, np.ndarray]:
    """Streams of the auxiliary terms, also of attempts in groups without signal; ECHO's of failed ones too."""
    given = {}
    if rl.echo.coefficient != 0:
        coefficient = echo.coefficient(rl.echo.coefficient, rl.echo.schedule, rollout.progress)
        given["ce_weights"] = coefficient * echo.target_mask(trajectory.kinds, rl.echo.targets, rl.echo.max_tokens)
    positive = episode.reward >= rl.positive_nll.min_reward and not episode.stop_reason.is_failure
    if rl.positive_nll.coefficient != 0 and positive:
        given["nll_weights"] = rl.positive_nll.coefficient * action_mask(trajectory)
    return given
