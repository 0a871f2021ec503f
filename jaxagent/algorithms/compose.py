"""An algorithm is a composition of choices, each a field of `rl` with the constants of what it names.

    rl.advantage      what is better than expected     estimators.py: from groups, over turns, or along tokens
    rl.objective      how an advantage moves a policy  objectives.py
    rl.correction     samples of another policy        corrections.py
    rl.kl             the pull to a reference          policy_loss.py, in the loss, the reward or the advantage
    rl.aggregation    how tokens become one number     aggregate.py
    rl.distill        a teacher's judgement            teachers.py, in the advantage or the loss
    rl.echo, ...      auxiliary terms; each is None where it is off

In: the groups of one rollout batch, and what models say of their trajectories (`ModelScores`), as far as a choice
reads it. Out: `Streams` with relative weights; `mini_batches` splits them into optimiser updates and normalises
the weights of each. The learner never knows which algorithm it runs. Known combinations have names in `published.py`;
`checks.py` refuses those that mean nothing.
Axis letters: N groups, G samples per group, T tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import numpy as np

from jaxagent import contract
from jaxagent.algorithms import aggregate, distill, echo, estimate
from jaxagent.algorithms.advantages import zero_signal
from jaxagent.algorithms.corrections import Importance, factors_of_samples
from jaxagent.algorithms.estimate import Signal
from jaxagent.algorithms.estimators import NoReward
from jaxagent.algorithms.streams import NO_SCORES, ModelScores, Sample, Streams, rewards, samples
from jaxagent.config import Config, EntropyControlConfig, RLConfig
from jaxagent.types import Group


def streams(
    groups: Sequence[Group], rl: RLConfig, progress: float, scores: ModelScores = NO_SCORES
) -> tuple[list[Streams], dict[str, float | None]]:
    """Runs the configured algorithm on one rollout batch; `progress` is the steps done over those planned.

    `scores`: what models say of `sampled_trajectories(groups)`, as far as a choice reads it. Returns streams with
    relative weights (only sequences that take part), and counts for the metrics; of no groups neither.
    """
    if not groups:
        return [], {}
    outcomes, valid = rewards(groups)
    batch = samples(groups, scores)
    signals = estimate.signals(groups, batch, rl)
    learnt = [sample for sample, signal in zip(batch, signals, strict=True) if signal]
    factors, counts = [np.ones(len(sample.mask)) for sample in learnt], {}
    if isinstance(rl.correction, Importance):
        factors, counts = factors_of_samples(learnt, rl.correction)
    factor, sequences = iter(factors), []
    for sample, signal in zip(batch, signals, strict=True):
        weights = _auxiliary(sample, rl, progress)
        if signal is not None:
            weights |= _policy(sample, rl, signal, next(factor))
        if weights:
            number, reward = sample.group * outcomes.shape[1] + sample.attempt, sample.episode.total_reward
            sequences.append(Streams.of(sample.trajectory, number, reward=reward, **weights))
    if scores.teacher is not None:
        counts |= distill.metrics([sample.trajectory for sample in batch], scores.teacher)
    silent = zero_signal(outcomes, valid)
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
    update normalises on its own, a token would otherwise weigh the more, the fewer of the former its update has. Empty
    parts are left out. `seed`: of the shuffle, e.g. (run seed, step).
    """
    by_episode = itertools.groupby(enumerate(sequences), lambda at: at[1].episode if at[1].episode >= 0 else -1 - at[0])
    episodes = [[sequence for _, sequence in members] for _, members in by_episode]
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
    sequences = aggregate.normalise(sequences, names, rl.aggregation)
    # VAPO (arXiv 2504.05118), eq. 11: over the tokens of positive examples, whatever the policy term does.
    sequences = aggregate.normalise(sequences, ["nll_weights"], aggregate.TokenMean())
    scales = np.zeros(len(sequences))
    if rl.echo is not None:
        targets = [np.count_nonzero(s.ce_weights) for s in sequences]
        observed = [np.count_nonzero(echo.target_mask(s.trajectory.kinds, "full_observation", 0)) for s in sequences]
        scales = contract.factors(rl.echo.denominator, np.array(targets, np.float64), np.array(observed, np.float64))
    return [
        dataclasses.replace(
            s, ce_weights=(s.ce_weights * scale).astype(np.float32), policy_weights=s.policy_weights * s.corrections
        )
        for s, scale in zip(sequences, scales, strict=True)
    ]


def _policy(sample: Sample, rl: RLConfig, signal: Signal, factor: np.ndarray | None) -> dict[str, np.ndarray]:
    """Policy, KL-in-loss, entropy, z-loss and critic streams of one sample, with relative weights.

    Of a vetoed one (no `factor`) the policy's alone, corrected to 0: it counts in the policy term's denominator.
    """
    mask = sample.mask
    streams = dict(advantages=signal.advantages, policy_weights=mask)
    if factor is None:
        return streams | dict(corrections=np.zeros_like(mask))
    streams |= dict(
        entropy_weights=mask * np.float32(rl.entropy_coefficient),
        z_weights=mask * np.float32(rl.z_loss.coefficient if rl.z_loss else 0.0),
    )
    if rl.kl_in("loss"):
        streams |= dict(reference_logprobs=sample.reference, kl_weights=mask * np.float32(rl.kl.coefficient))
    if getattr(rl.objective, "reads_reference", False):
        streams |= dict(reference_logprobs=sample.reference)
    if sample.old is not None:
        streams |= dict(old_logprobs=sample.old, corrections=factor)
    if rl.distill is not None and not rl.distill.in_advantage:
        streams |= dict(distill_weights=mask * np.float32(rl.distill.coefficient))
        if rl.distill.top_k:
            streams |= dict(support=distill.support_of(rl.distill.loss.support.which, sample.teacher, sample.student))
    if signal.returns is not None:
        streams |= dict(
            returns=signal.returns,
            old_values=sample.values * mask,
            value_weights=signal.learnt * np.float32(rl.critic.value_coefficient),
        )
    return streams


def _auxiliary(sample: Sample, rl: RLConfig, progress: float) -> dict[str, np.ndarray]:
    """Streams of the auxiliary terms, also of attempts in groups without signal; ECHO's of failed ones too."""
    streams, imitated = {}, rl.positive_nll
    if rl.echo is not None:
        coefficient = echo.coefficient(rl.echo.coefficient, rl.echo.schedule, progress)
        kinds = sample.trajectory.kinds
        streams["ce_weights"] = coefficient * echo.target_mask(kinds, rl.echo.targets, rl.echo.max_tokens)
    if imitated and sample.episode.total_reward >= imitated.min_reward and not sample.episode.stop_reason.is_failure:
        streams["nll_weights"] = imitated.coefficient * sample.mask
    return streams


def refresh_due(rl: RLConfig, steps_done: int) -> bool:
    """Whether the reference becomes a copy of the policy now."""
    return rl.kl is not None and rl.kl.refresh_every > 0 and steps_done % rl.kl.refresh_every == 0


_RESULT, _MEASURED = "entropy_coefficient", "policy/entropy"


@dataclasses.dataclass(frozen=True)
class EntropyControl:
    """The controller's state: saved with a bundle, so that a resumed run goes on as if it had not stopped."""

    config: EntropyControlConfig | None  # None: the coefficient stays where it is
    coefficient: float
    active: bool = True  # whether the last measured entropy was at the target or below

    @classmethod
    def start(cls, rl: RLConfig, saved: Mapping[str, float | list[float]]) -> EntropyControl:
        """As a bundle has it, else from `rl.entropy_coefficient`."""
        state = saved.get(_RESULT)
        coefficient, active = state if isinstance(state, list) else (rl.entropy_coefficient, True)
        return cls(rl.entropy_control, float(coefficient), bool(active))

    @property
    def applied(self) -> float:
        """The coefficient of the next step: 0 while the entropy is above the target."""
        return self.coefficient if self.active else 0.0

    def apply(self, rl: RLConfig) -> RLConfig:
        """The config of the next step."""
        return dataclasses.replace(rl, entropy_coefficient=self.applied)

    def after(self, metrics: Mapping[str, float]) -> EntropyControl:
        """The state after a step that measured `metrics["policy/entropy"]`; unchanged when off or nothing measured."""
        if self.config is None or not metrics.get("policy/tokens"):
            return self
        coefficient, active = next_coefficient(self.coefficient, metrics[_MEASURED], self.config)
        return dataclasses.replace(self, coefficient=coefficient, active=active)

    def save(self, results: MutableMapping[str, object]) -> None:
        """Puts the state where `start` finds it; nothing when off."""
        if self.config is not None:
            results[_RESULT] = [self.coefficient, self.active]


def next_coefficient(coefficient: float, entropy: float, config: EntropyControlConfig) -> tuple[float, bool]:
    """c + step where entropy < target, c - step where entropy > target, kept in [0, maximum]; and entropy <= target.

    The entropy is measured in nats per token. The second result is whether the bonus is applied at all.
    """
    change = config.step * ((entropy < config.target) - (entropy > config.target))
    return min(max(coefficient + change, 0.0), config.maximum), entropy <= config.target


def as_opd(cfg: Config) -> Config:
    """The config whose RL stage is this config's stage "opd": the teacher in place of the reward.

    What only holds the policy (KL, entropy, z-loss) stays: KL in the reward, which there is none of, becomes KL in the
    advantage. All attempts are used, since none needs a reward.
    """
    rl, opd = cfg.rl, cfg.opd
    assert opd is not None  # `parse` has refused the stage without its section
    taught = dataclasses.replace(
        rl,
        steps=opd.steps,
        optimizer=dataclasses.replace(rl.optimizer, learning_rate=opd.learning_rate),
        advantage=NoReward(),
        kl=dataclasses.replace(rl.kl, where="advantage") if rl.kl and rl.kl_in("reward") else rl.kl,
        group_reward=None,
        mask_truncated=False,
        shaping=None,
        echo=None,
        positive_nll=None,
        replay=None,
        phases=None,
        branching=None,
        refill=None,
        oversample=None,
        keep_groups_frac=1.0,
        distill=opd.distill,
    )
    return dataclasses.replace(cfg, rl=taught)
