"""Refuses algorithms that cannot mean anything: choices that contradict or disable each other.

In: the `rl` section. Out: nothing, or one line that names the fields and says what to do. No device is touched.
"""

from __future__ import annotations

import inspect
from typing import Any

from jaxagent.algorithms import estimators
from jaxagent.algorithms.advantages import BestOfK, GroupAdvantage, MaxRL, NoReward
from jaxagent.algorithms.aggregate import Aggregation, RolloutMean, SequenceMean
from jaxagent.algorithms.branching import Branching
from jaxagent.algorithms.corrections import OPSM, Importance, Mask
from jaxagent.algorithms.echo import Denominator
from jaxagent.algorithms.estimators import BilevelGAE, TokenAdvantage, TurnAdvantage
from jaxagent.algorithms.objectives import GMPO, GSPO, NoObjective, Reinforce
from jaxagent.algorithms.teachers import Divergence, Folder, SampledLogRatio, Server, Vocabulary
from jaxagent.algorithms.value_losses import Categorical, Squared
from jaxagent.config import ConfigError, RLConfig
from jaxagent.contract import name_of

_NO_KL_IN_REWARD = {  # what it would do
    BilevelGAE: "would lose the KL of a turn's tokens for the turns before it with rl.advantage='gae_bilevel', which "
    "reads the rewards at ends of turns",
    MaxRL: "would make rewards negative, of which rl.advantage='maxrl' makes nothing",
    NoReward: "does nothing with rl.advantage='no_reward'",
}


def check(rl: RLConfig) -> None:
    """Raises ConfigError for combinations that cannot mean anything, before any device work; it names the fields."""
    advantage = rl.advantage
    _check_own(rl)
    if isinstance(advantage, BestOfK) and advantage.k > rl.group_size:
        raise ConfigError(f"rl.advantage.k must be 1 to rl.group_size ({rl.group_size}), got {advantage.k}.")
    _check_correction(rl)
    _check_on_policy(rl)
    for kind, what in _NO_KL_IN_REWARD.items():
        if rl.kl_in("reward") is not None and isinstance(advantage, kind):
            raise ConfigError(f"rl.kl.where='reward' {what}: use 'loss' or 'advantage'.")
    if bool(rl.kl_in("objective")) != getattr(rl.objective, "reads_reference", False):
        raise ConfigError(
            "rl.kl.where='objective' and an rl.objective that compares with the reference itself, such as 'webrl', "
            "need each other: set both, or neither."
        )
    if isinstance(rl.objective, NoObjective):
        _check_auxiliary(rl)
    if rl.positive_nll and rl.replay and rl.replay.use == "nll":
        raise ConfigError("rl.positive_nll and rl.replay.use='nll' would share one mean over tokens: use one of them.")
    if rl.distill:
        _check_distill(rl)
    _check_branching(rl)


def _check_own(rl: RLConfig) -> None:
    """Refuses a class of the user's own that the code which reads its field could not use, or would not notice."""
    extend(rl.advantage, "rl.advantage", GroupAdvantage, TurnAdvantage, TokenAdvantage, module=estimators.__name__)
    extend(rl.aggregation, "rl.aggregation", Aggregation)
    if rl.critic:
        extend(rl.critic.loss, "rl.advantage.critic.loss", Squared, Categorical)
    if rl.correction:
        extend(rl.correction, "rl.correction", Importance, OPSM)
    if rl.echo:
        extend(rl.echo.denominator, "rl.echo.denominator", Denominator)
    if rl.distill:
        extend(rl.distill.teacher, "rl.distill.teacher", Folder, Server)
        extend(rl.distill.loss, "rl.distill.loss", SampledLogRatio, Divergence)
    _takes(rl.objective, "rl.objective", "tokens")
    if rl.group_reward is not None:
        _takes(rl.group_reward, "rl.group_reward", "group")
    arguments = ("path",) if isinstance(rl.advantage, TokenAdvantage) else ("rewards", "mask")
    arguments += ("states",) * getattr(rl.advantage, "reads_states", False)
    arguments += ("parents", "forked_at") * getattr(rl.advantage, "reads_branches", False)
    _takes(rl.advantage, "rl.advantage", *arguments)


def extend(chosen: Any, field: str, *bases: type, module: str = "") -> None:
    """Raises ConfigError for what is none of `bases`, which one `module` has: the first one's where none is named."""
    if not isinstance(chosen, bases):
        *others, last = [base.__qualname__ for base in bases]
        names = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"{field}='{name_of(chosen)}' must extend {names} of {module or bases[0].__module__}.")


def _takes(chosen: Any, field: str, *arguments: str) -> None:
    try:
        inspect.signature(chosen).bind(*arguments)
        there = type(chosen).__call__ not in (GroupAdvantage.__call__, TurnAdvantage.__call__, TokenAdvantage.__call__)
    except (TypeError, ValueError):  # it is not callable, or by other arguments
        there = False
    if not there:
        raise ConfigError(f"{field}='{name_of(chosen)}' needs a method __call__(self, {', '.join(arguments)}).")


def _check_auxiliary(rl: RLConfig) -> None:
    if not (rl.positive_nll or rl.echo or rl.distill or rl.replay):
        raise ConfigError(
            "rl.objective='none' trains on rl.positive_nll, rl.echo, rl.distill or rl.replay, and all of them are off: "
            "nothing would be learnt."
        )
    if rl.kl and rl.kl.where != "loss":
        raise ConfigError(f"rl.kl.where='{rl.kl.where}' does nothing with rl.objective='none': use 'loss'.")
    if rl.distill and rl.distill.in_advantage:
        raise ConfigError("rl.distill.loss='sampled' is an advantage, which rl.objective='none' does not read.")


def _check_branching(rl: RLConfig) -> None:
    reads = getattr(rl.advantage, "reads_branches", False)
    if rl.branching is None:
        if reads:
            raise ConfigError(f"rl.advantage='{name_of(rl.advantage)}' reads forks: set rl.branching=planned or ucb.")
        return
    extend(rl.branching, "rl.branching", Branching)
    if not reads:
        raise ConfigError(
            "rl.branching makes attempts that go on from one another, and rl.advantage takes them for independent: use "
            "'vine_ppo', 'tree', 'tree_rl' or 'branch_pairs', or rl.branching=none."
        )
    if rl.branching.roots >= rl.group_size:
        raise ConfigError(
            f"rl.branching.roots ({rl.branching.roots}) must be less than rl.group_size ({rl.group_size}): the others "
            "are forks."
        )
    if rl.advantage.learns_forks and isinstance(rl.aggregation, (SequenceMean, RolloutMean)):
        raise ConfigError(
            "rl.aggregation must be 'constant' or 'token_mean' where forks are learnt from: each attempt with the same "
            "weight, a fork of one turn would weigh as much as all turns of its parent."
        )
    off = {"oversample": None, "group_reward": None, "keep_groups_frac": 1.0, "tool_epsilon": 0.0}
    for name, value in off.items():  # they compare attempts, stop some, or begin a turn for an attempt
        if getattr(rl, name) != value:
            raise ConfigError(f"rl.branching needs rl.{name}={'none' if value is None else value}.")


def _check_correction(rl: RLConfig) -> None:
    own_weights = getattr(rl.advantage, "reads_old", False)
    if own_weights and isinstance(rl.correction, OPSM):
        raise ConfigError(
            "rl.correction='opsm' with an rl.advantage that holds importance weights would measure the drift from the "
            "policy before the step and not from the one that sampled: use 'none'."
        )
    if own_weights and rl.correction:
        raise ConfigError("rl.advantage holds importance weights already: rl.correction must be none.")
    if isinstance(rl.objective, (GSPO, GMPO)) and isinstance(rl.correction, Mask):
        raise ConfigError(
            "rl.correction='mask' would take tokens out of the sequences that rl.objective="
            f"'{type(rl.objective).__name__.lower()}' averages over: use 'truncate'."
        )


def _check_on_policy(rl: RLConfig) -> None:
    if not isinstance(rl.objective, Reinforce):
        return
    if rl.updates_per_step * rl.epochs > 1:
        raise ConfigError(
            f"rl.objective='reinforce' has no ratio to the policy that sampled, and of rl.updates_per_step="
            f"{rl.updates_per_step} times rl.epochs={rl.epochs} updates only the first is on-policy: set both to 1, or "
            "rl.objective='importance_sampling'."
        )
    if rl.staleness > 0 and not isinstance(rl.correction, Importance):
        raise ConfigError(
            "rl.objective='reinforce' has no ratio to the policy that sampled, which is rl.staleness="
            f"{rl.staleness} steps old: set rl.correction to 'truncate' or 'mask', or "
            "rl.objective='importance_sampling'."
        )


def _check_distill(rl: RLConfig) -> None:
    distill = rl.distill
    assert distill is not None
    if isinstance(distill.teacher, Folder) and not distill.teacher.path:
        raise ConfigError("distill.teacher must name a model folder, or be 'http' with the url of a server.")
    if isinstance(distill.teacher, Folder) and distill.teacher.path.startswith(("http://", "https://")):
        raise ConfigError(
            f"distill.teacher.path='{distill.teacher.path}' is an address: a server is given as "
            f"distill.teacher=http with distill.teacher.url={distill.teacher.path}."
        )
    if not isinstance(rl.advantage, TokenAdvantage) and rl.advantage.drop_zero_signal:
        raise ConfigError(
            "distill needs rl.advantage.drop_zero_signal=False: where rewards are equal the teacher still judges."
        )
    if rl.refill or rl.keep_groups_frac < 1:
        raise ConfigError(
            "distill needs rl.refill=none and rl.keep_groups_frac=1: groups that these leave out could be distilled "
            "too."
        )
    if isinstance(distill.loss.support, Vocabulary) and not isinstance(distill.teacher, Folder):
        raise ConfigError(
            "distill.loss.support='vocabulary' needs the teacher's weights, not its address: name a folder, or a "
            "top-k support, or loss='sampled'."
        )
