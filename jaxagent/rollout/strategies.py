"""The sampling strategies together: which are on, and what cannot work. Their formulas: docs/algorithms.md."""

from __future__ import annotations

from jaxagent.algorithms.checks import extend
from jaxagent.algorithms.corrections import Importance
from jaxagent.algorithms.estimators import GroupAdvantage, NoReward
from jaxagent.config import ConfigError, RLConfig
from jaxagent.data.curriculum import BySuccess


def selects(rl: RLConfig) -> bool:
    """Whether some of the groups that were sampled may not be learnt from."""
    return rl.refill is not None or rl.keep_groups_frac < 1 or rl.oversample is not None


def check(rl: RLConfig) -> None:
    """Refuses combinations that cannot work, before any device work.

    Raises:
      ConfigError: naming the fields.
    """
    over = rl.oversample
    if over is not None and not (over.extra_tasks or over.extra_attempts):
        raise ConfigError("rl.oversample must have extra_tasks or extra_attempts, or be none.")
    if over is not None and over.min_group > rl.group_size:
        raise ConfigError(
            f"rl.oversample.min_group must be at most rl.group_size ({rl.group_size}), got {over.min_group}."
        )
    if rl.group_size < 2 and (rl.refill or rl.keep_groups_frac < 1):
        raise ConfigError(
            "rl.refill and rl.keep_groups_frac < 1 need rl.group_size of 2 or more: a group of one has no signal and "
            "no std."
        )
    if rl.curriculum is not None:
        extend(rl.curriculum, "rl.curriculum", BySuccess)
    if rl.replay is not None and rl.replay.use == "policy":
        _check_replayed_policy(rl)


def _check_replayed_policy(rl: RLConfig) -> None:
    advantage = rl.advantage
    if not isinstance(rl.correction, Importance) or not isinstance(advantage, GroupAdvantage):
        raise ConfigError(
            "rl.replay.use='policy' needs rl.correction of 'truncate' or 'mask', since past attempts are another "
            "policy's, and an rl.advantage from groups; else use 'nll'."
        )
    changed = rl.whiten_advantages or advantage.multi_trajectory != "full" or (rl.kl and rl.kl.where != "loss")
    if changed or isinstance(advantage, NoReward):
        raise ConfigError(
            "rl.replay.use='policy' keeps the advantage that rewards give in a group: it needs rl.whiten_advantages="
            "False, rl.advantage.multi_trajectory='full', rl.kl.where='loss' and an advantage other than 'no_reward'."
        )
