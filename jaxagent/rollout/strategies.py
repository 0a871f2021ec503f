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
    """Refuses numbers that mean nothing and combinations that cannot work, before any device work.

    Raises:
      ConfigError: naming the fields.
    """
    _check_groups(rl)
    _check_curriculum(rl)
    _check_replay(rl)
    _require(0 <= rl.tool_epsilon <= 1, "rl.tool_epsilon", "a probability", rl.tool_epsilon)
    _require(rl.temperature.final > 0, "rl.temperature.final", "more than 0", rl.temperature.final)


def _check_groups(rl: RLConfig) -> None:
    refill, over = rl.refill, rl.oversample
    _require(refill.max_rounds >= 1, "rl.refill.max_rounds", "1 (off) or more", refill.max_rounds)
    _require(refill.tasks_per_round >= 0, "rl.refill.tasks_per_round", "0 or more", refill.tasks_per_round)
    frac = rl.keep_groups_frac
    _require(0 < frac <= 1, "rl.keep_groups_frac", "in (0, 1]", frac)
    _require(over.extra_tasks >= 0, "rl.oversample.extra_tasks", "0 or more", over.extra_tasks)
    _require(over.extra_attempts >= 0, "rl.oversample.extra_attempts", "0 or more", over.extra_attempts)
    if oversamples(rl) and not 2 <= over.min_group <= rl.group_size:
        raise ConfigError(
            f"rl.oversample.min_group must be from 2 to rl.group_size ({rl.group_size}), got {over.min_group}: an "
            "attempt alone has nothing to compare with."
        )
    if rl.group_size < 2 and (refill.max_rounds > 1 or frac < 1):
        raise ConfigError(
            "rl.refill.max_rounds > 1 and rl.keep_groups_frac < 1 need rl.group_size of 2 or more: a group of one has "
            "no signal and no std."
        )


def _check_curriculum(rl: RLConfig) -> None:
    cfg = rl.curriculum
    for name in ("target", "explore", "prior"):
        value = getattr(cfg, name)
        _require(0 <= value <= 1, f"rl.curriculum.{name}", "in [0, 1]", value)
    _require(0 < cfg.decay <= 1, "rl.curriculum.decay", "in (0, 1]", cfg.decay)
    for name in ("width", "prior_attempts"):
        value = getattr(cfg, name)
        _require(value > 0, f"rl.curriculum.{name}", "more than 0", value)


def _check_replay(rl: RLConfig) -> None:
    cfg = rl.replay
    _require(cfg.per_step >= 0, "rl.replay.per_step", "0 (off) or more", cfg.per_step)
    _require(cfg.capacity >= 1, "rl.replay.capacity", "at least 1", cfg.capacity)
    _require(0 <= cfg.low < cfg.high <= 1, "rl.replay.low and high", "0 <= low < high <= 1", (cfg.low, cfg.high))
    if not cfg.per_step:
        return
    _require(cfg.coefficient > 0, "rl.replay.coefficient", "more than 0 with rl.replay.per_step > 0", cfg.coefficient)
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


def _require(fine: bool, field: str, must: str, value: object) -> None:
    if not fine:
        raise ConfigError(f"config.{field} must be {must}, got {value!r}.")
