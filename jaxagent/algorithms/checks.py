"""Refuses algorithms that cannot mean anything: names that do not exist, choices that contradict or disable each other.

In: the `rl` section. Out: nothing, or one line that names the fields and says what to do. No device is touched.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxagent.algorithms import aggregate, corrections
from jaxagent.algorithms.advantages import GROUP_ADVANTAGES
from jaxagent.algorithms.best_of_k import BEST_OF_K
from jaxagent.algorithms.kl import KL_ESTIMATORS
from jaxagent.algorithms.needs import needs_support, needs_teacher, needs_whole_teacher
from jaxagent.algorithms.policy_loss import OBJECTIVES
from jaxagent.algorithms.process import TURN_ADVANTAGES
from jaxagent.algorithms.token_advantages import TOKEN_ADVANTAGES, WITH_OLD
from jaxagent.config import ConfigError, RLConfig, nearest


def check(rl: RLConfig) -> None:
    """Refuses names that do not exist and combinations that cannot mean anything, before any device work.

    Raises:
      ConfigError: naming the fields.
    """
    _known("rl.advantage", rl.advantage, (*GROUP_ADVANTAGES, *BEST_OF_K, *TURN_ADVANTAGES, *TOKEN_ADVANTAGES))
    _known("rl.objective", rl.objective, OBJECTIVES)
    _known("rl.correction.name", rl.correction.name, corrections.NAMES)
    _known("rl.correction.level", rl.correction.level, corrections.LEVELS)
    _known("rl.kl.estimator", rl.kl.estimator, KL_ESTIMATORS)
    _known("rl.aggregation", rl.aggregation, aggregate.MODES)
    constant = [rl.aggregation] + [rl.echo.denominator] * (rl.echo.coefficient != 0)
    if {"constant", "constant_sum"}.intersection(constant) and rl.aggregation_constant <= 0:
        raise ConfigError("Aggregation 'constant' needs rl.aggregation_constant > 0 (tokens).")
    if rl.advantage in BEST_OF_K and not 1 <= rl.best_of <= rl.group_size:
        raise ConfigError(f"rl.best_of must be 1 to rl.group_size ({rl.group_size}), got {rl.best_of}.")
    if rl.objective == "sapo" and min(rl.tau_positive, rl.tau_negative) <= 0:
        raise ConfigError("rl.tau_positive and rl.tau_negative must be above 0 for objective 'sapo'.")
    if rl.critic.loss != "squared" and (rl.critic.bins < 2 or rl.critic.low >= rl.critic.high):
        raise ConfigError(f"rl.critic.loss '{rl.critic.loss}' needs rl.critic.bins >= 2 and rl.critic.low < high.")
    if rl.critic.loss == "hl_gauss" and rl.critic.sigma <= 0:
        raise ConfigError("rl.critic.loss 'hl_gauss' needs rl.critic.sigma > 0 (bin widths).")
    _check_correction(rl)
    _check_on_policy(rl)
    if rl.advantage not in (*GROUP_ADVANTAGES, *BEST_OF_K) and rl.multi_trajectory != "full":
        raise ConfigError(
            f"rl.multi_trajectory='{rl.multi_trajectory}' does nothing with rl.advantage='{rl.advantage}', which gives "
            "no number per attempt: use 'full'."
        )
    if rl.advantage == "gae_bilevel" and rl.kl.coefficient != 0 and rl.kl.where == "reward":
        raise ConfigError(
            "rl.kl.where='reward' would lose the KL of a turn's tokens for the turns before it with "
            "rl.advantage='gae_bilevel', which reads the rewards at ends of turns: use 'loss' or 'advantage'."
        )
    if rl.advantage == "no_reward" and rl.kl.coefficient != 0 and rl.kl.where == "reward":
        raise ConfigError("rl.kl.where='reward' does nothing with rl.advantage='no_reward': use 'loss' or 'advantage'.")
    if rl.objective == "none":
        if rl.kl.coefficient != 0 and rl.kl.where != "loss":
            raise ConfigError(f"rl.kl.where='{rl.kl.where}' does nothing with rl.objective='none': use 'loss'.")
        if needs_teacher(rl) and rl.distill.loss == "sampled":
            raise ConfigError("rl.distill.loss='sampled' is an advantage, which rl.objective='none' does not read.")
    if rl.positive_nll.coefficient != 0 and rl.replay.per_step > 0 and rl.replay.use == "nll":
        raise ConfigError("rl.positive_nll and rl.replay.use='nll' would share one mean over tokens: use one of them.")
    if needs_teacher(rl):
        _check_distill(rl)
    if rl.staleness < 0:
        raise ConfigError(f"rl.staleness must be 0 (on-policy) or more steps, got {rl.staleness}.")
    if rl.updates_per_step < 1 or rl.epochs < 1:
        raise ConfigError("rl.updates_per_step and rl.epochs must be at least 1.")


def _check_correction(rl: RLConfig) -> None:
    choice = rl.correction
    if choice.name not in corrections.IMPORTANCE:
        if choice.veto or choice.normalise:
            raise ConfigError(
                f"rl.correction.veto and .normalise do nothing with rl.correction.name='{choice.name}': they need "
                f"{' or '.join(corrections.IMPORTANCE)}."
            )
        if choice.name == "opsm" and rl.advantage in WITH_OLD:
            raise ConfigError(
                f"rl.correction.name='opsm' with rl.advantage='{rl.advantage}' would measure the drift from the policy "
                "before the step and not from the one that sampled: use 'none'."
            )
        return
    if rl.advantage in WITH_OLD:
        raise ConfigError(
            f"rl.advantage='{rl.advantage}' holds importance weights already: rl.correction.name must be none."
        )
    if rl.objective == "gspo" and choice.name == "mask":
        raise ConfigError(
            "rl.correction.name='mask' would take tokens out of the sequences that rl.objective='gspo' averages over: "
            "use 'truncate'."
        )


def _check_on_policy(rl: RLConfig) -> None:
    if rl.objective != "reinforce":
        return
    if rl.updates_per_step * rl.epochs > 1:
        raise ConfigError(
            f"rl.objective='reinforce' has no ratio to the policy that sampled, and of rl.updates_per_step="
            f"{rl.updates_per_step} times rl.epochs={rl.epochs} updates only the first is on-policy: set both to 1, or "
            "rl.objective='importance_sampling'."
        )
    if rl.staleness > 0 and rl.correction.name not in corrections.IMPORTANCE:
        raise ConfigError(
            "rl.objective='reinforce' has no ratio to the policy that sampled, which is rl.staleness="
            f"{rl.staleness} steps old: set rl.correction.name to {' or '.join(corrections.IMPORTANCE)}, or "
            "rl.objective='importance_sampling'."
        )


def _check_distill(rl: RLConfig) -> None:
    given = rl.distill
    if not given.teacher:
        raise ConfigError("rl.distill.coefficient is not 0: rl.distill.teacher must name a model folder or a server.")
    if rl.drop_zero_signal and rl.advantage not in TOKEN_ADVANTAGES:
        raise ConfigError(
            "rl.distill needs rl.drop_zero_signal=False: where rewards are equal the teacher still judges."
        )
    if rl.refill.max_rounds > 1 or rl.keep_groups_frac < 1:
        raise ConfigError(
            "rl.distill needs rl.refill.max_rounds=1 and rl.keep_groups_frac=1: groups that these leave out could be "
            "distilled too."
        )
    if needs_support(rl) and given.top_k < 1:
        raise ConfigError(f"rl.distill.top_k must be at least 1, got {given.top_k}.")
    if given.loss == "jsd" and not 0 < given.jsd_beta < 1:
        raise ConfigError(f"rl.distill.jsd_beta must be between 0 and 1, got {given.jsd_beta}.")
    if needs_whole_teacher(rl) and given.teacher.startswith(("http://", "https://")):
        raise ConfigError(
            "rl.distill.support='vocabulary' needs the teacher's weights, not its address: name a folder, or a top-k "
            "support, or loss='sampled'."
        )
    if given.timeout_s <= 0 or given.retries < 0 or given.request_tokens < 1:
        raise ConfigError("rl.distill needs timeout_s > 0, retries >= 0 and request_tokens >= 1.")


def _known(field: str, name: str, valid: Iterable[str]) -> None:
    if name not in valid:
        raise ConfigError(f"config.{field} has no choice '{name}'. {nearest(name, valid)}")
