"""The sampling strategies together: which are on, and what cannot work. Their formulas: docs/algorithms.md."""

from __future__ import annotations

from jaxagent.algorithms.advantages import GROUP_ADVANTAGES
from jaxagent.config import ConfigError, RLConfig

_WEIGHTS = ("truncate", "mask")  # corrections that are importance weights


def oversamples(rl: RLConfig) -> bool:
    """Whether more attempts are started than needed: then WHICH are used depends on timing."""
    return rl.oversample.extra_tasks > 0 or rl.oversample.extra_attempts > 0


def selects(rl: RLConfig) -> bool:
    """Whether some of the groups that were sampled may not be learnt from."""
    return rl.refill.max_rounds > 1 or rl.keep_groups_frac < 1 or oversamples(rl)


def check(rl: RLConfig) -> None:
    """Refuses combinations that cannot work, before any device work.

    Raises:
      ConfigError: naming the fields.
    """
    _check_groups(rl)
    _check_replay(rl)


def _check_groups(rl: RLConfig) -> None:
    refill, over = rl.refill, rl.oversample
    if oversamples(rl) and over.min_group > rl.group_size:
        raise ConfigError(
            f"rl.oversample.min_group must be at most rl.group_size ({rl.group_size}), got {over.min_group}."
        )
    if rl.group_size < 2 and (refill.max_rounds > 1 or rl.keep_groups_frac < 1):
        raise ConfigError(
            "rl.refill.max_rounds > 1 and rl.keep_groups_frac < 1 need rl.group_size of 2 or more: a group of one has "
            "no signal and no std."
        )


def _check_replay(rl: RLConfig) -> None:
    cfg = rl.replay
    if not cfg.per_step:
        return
    if cfg.coefficient == 0:
        raise ConfigError("config.rl.replay.coefficient must be more than 0 with rl.replay.per_step > 0, got 0.")
    if cfg.use == "policy" and (rl.correction.name not in _WEIGHTS or rl.advantage not in GROUP_ADVANTAGES):
        raise ConfigError(
            "rl.replay.use='policy' needs rl.correction.name of 'truncate' or 'mask', since past attempts are another "
            f"policy's, and rl.advantage from groups ({', '.join(GROUP_ADVANTAGES)}); else use 'nll'."
        )
    changed = rl.whiten_advantages or rl.multi_trajectory != "full" or (rl.kl.coefficient and rl.kl.where != "loss")
    if cfg.use == "policy" and (changed or rl.advantage == "no_reward"):
        raise ConfigError(
            "rl.replay.use='policy' keeps the advantage that rewards give in a group: it needs rl.whiten_advantages="
            "False, rl.multi_trajectory='full', rl.kl.where='loss' and an advantage other than 'no_reward'."
        )
