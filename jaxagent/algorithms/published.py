"""Published algorithms by name: the fields of `rl` that make each, and where they come from.

A config file applies one to its `rl` section and may change fields afterwards; what then stands in the config is the
whole truth, and no code knows the name any more. Every preset sets the same fields, so that it means the same on top of
any other. What belongs to a run and not to an algorithm (learning rate, group size, steps) is left alone, but for one
thing: an objective without a ratio is right for a step's first update alone, so `apply` sets one update per step.
Where published code differs from the paper: docs/algorithms.md. No jax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxagent.config import ConfigError, nearest


class Published(NamedTuple):
    """One algorithm."""

    source: str
    fields: dict[str, Any]  # dotted path under `rl` -> value


_GRPO = {
    "advantage": "group_mean_std",
    "best_of": 4,
    "multi_trajectory": "full",
    "whiten_advantages": False,
    "drop_zero_signal": False,
    "objective": "ppo_clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "clip_dual": 3.0,  # verl's default; read by "dual_clip" alone
    "tau_positive": 1.0,
    "tau_negative": 1.05,
    "correction.name": "none",
    "correction.level": "token",
    "correction.low": 0.0,
    "correction.high": 2.0,
    "correction.veto": 0.0,
    "correction.normalise": False,
    "correction.opsm_delta": 1e-4,
    "kl.coefficient": 0.0,
    "kl.estimator": "k3",
    "kl.where": "loss",
    "kl.refresh_every": 0,
    "aggregation": "sequence_mean",
    "critic.gamma": 1.0,
    "critic.lam": 1.0,
    "critic.returns_lam": 1.0,
    "critic.adaptive_alpha": 0.05,
    "critic.turn_gamma": 1.0,
    "echo.coefficient": 0.0,
    "echo.schedule": "constant",
    "echo.targets": "env_only",
    "echo.denominator": "full_observation",
    "echo.max_tokens": 0,
    "positive_nll.coefficient": 0.0,
    "positive_nll.min_reward": 1.0,
    "distill.coefficient": 0.0,
    "refill.max_rounds": 1,
    "refill.tasks_per_round": 0,
    "keep_groups_frac": 1.0,
}
_CLIP_HIGHER = _GRPO | {"clip_high": 0.28, "drop_zero_signal": True, "aggregation": "token_mean"}
_DAPO = _CLIP_HIGHER | {"refill.max_rounds": 10}  # its recipe's bound of generation batches
_DUAL_CLIP = _GRPO | {"objective": "dual_clip"}  # verl's default loss, and that of code built on it
_STARPO = _DUAL_CLIP | {"advantage": "gae", "whiten_advantages": True, "aggregation": "token_mean"}

PUBLISHED: dict[str, Published] = {
    "grpo": Published(
        "DeepSeekMath, arXiv 2402.03300, section 4.1, with verl's dual clip", _DUAL_CLIP | {"kl.coefficient": 0.04}
    ),
    "dapo": Published("DAPO, arXiv 2503.14476", _DAPO),
    "dr_grpo": Published(
        "Understanding R1-Zero-Like Training, arXiv 2503.20783",
        _GRPO | {"advantage": "group_mean", "aggregation": "constant"},  # rl.aggregation_constant: most sampled tokens
    ),
    "rloo": Published(
        "Back to Basics, arXiv 2402.14740",
        _GRPO | {"advantage": "leave_one_out", "objective": "reinforce", "kl.coefficient": 0.05, "kl.estimator": "k1",
                 "kl.where": "reward", "aggregation": "constant"},  # an attempt is one action: a sum over its tokens
    ),
    "reinforce_pp": Published(
        "REINFORCE++, arXiv 2501.03262",
        _GRPO | {"advantage": "return", "whiten_advantages": True, "kl.coefficient": 0.01, "kl.estimator": "k1",
                 "kl.where": "reward", "aggregation": "token_mean"},
    ),
    "reinforce_pp_baseline": Published(
        "REINFORCE++ with a group baseline, arXiv 2501.03262, as OpenRLHF's scripts set it",
        _GRPO | {"advantage": "group_mean", "whiten_advantages": True, "kl.coefficient": 1e-5, "kl.estimator": "k2",
                 "aggregation": "token_mean"},
    ),
    "gspo": Published(
        "Group Sequence Policy Optimization, arXiv 2507.18071",
        _GRPO | {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "cispo": Published(
        "MiniMax-M1, arXiv 2506.13585",
        _DAPO | {"objective": "cispo", "clip_low": 1.0},  # no lower bound; its upper one is not given in the paper
    ),
    "sapo": Published("Soft Adaptive Policy Optimization, arXiv 2511.20347", _GRPO | {"objective": "sapo"}),
    "grpo_process": Published(
        "GRPO with process supervision, DeepSeekMath, arXiv 2402.03300, section 4.1.3; a step is a turn",
        _DUAL_CLIP | {"advantage": "turn_mean_std", "kl.coefficient": 0.04},
    ),
    "pkpo": Published(
        "Pass@K Policy Optimization, arXiv 2505.15201; rl.best_of is its k",
        _GRPO | {"advantage": "max_at_k", "objective": "reinforce", "aggregation": "constant"},
    ),
    "pass_at_k": Published(
        "Pass@k Training, arXiv 2508.10751, on DAPO; rl.best_of is its k", _DAPO | {"advantage": "pass_at_k"}
    ),
    "tis": Published(
        "Truncated importance sampling, Yao et al. 2025, on DAPO", _DAPO | {"correction.name": "truncate"}
    ),
    "icepop": Published(
        "IcePop, arXiv 2510.18855, on DAPO",
        _DAPO | {"correction.name": "mask", "correction.low": 0.5, "correction.high": 5.0},
    ),
    "mis": Published(
        "Masked importance sampling as slime's mis.yaml sets it, on DAPO",
        _DAPO | {"correction.name": "mask", "correction.low": 0.5, "correction.veto": 1e-4,
                 "correction.normalise": True},
    ),
    "opsm": Published(
        "Off-policy sequence masking as slime has it, after DeepSeek-V3.2 (arXiv 2512.02556), on GRPO",
        _GRPO | {"correction.name": "opsm"},
    ),
    "flow_grpo": Published(
        "Flow-GRPO of AgentFlow, arXiv 2510.05592: every turn is a sample, and the group's statistics are over turns",
        _DUAL_CLIP | {"clip_high": 0.3, "multi_trajectory": "statistics", "kl.coefficient": 0.001,
                 "aggregation": "token_mean"},
    ),
    "memagent": Published(
        "MemAgent, arXiv 2507.02259: no std; every turn is a sample with the episode's whole advantage",
        _DUAL_CLIP | {"advantage": "group_mean", "kl.coefficient": 0.001, "aggregation": "token_mean"},
    ),
    "polar": Published(
        "NVIDIA-NeMo/ProRL-Agent-Server, bridge to the trainer",
        _GRPO | {"advantage": "leave_one_out_std", "clip_high": 0.28, "kl.coefficient": 0.001,
                 "aggregation": "rollout_mean"},
    ),
    "ppo": Published(
        "PPO, arXiv 1707.06347, as Search-R1 (arXiv 2503.09516) sets it",
        _GRPO | {"advantage": "gae", "whiten_advantages": True, "kl.coefficient": 0.001, "kl.estimator": "k1",
                 "kl.where": "reward", "aggregation": "token_mean"},  # k1: verl's default for KL in the reward
    ),
    "vapo": Published(
        "VAPO, arXiv 2504.05118; its value pre-training is rl.critic.warmup_updates",
        _CLIP_HIGHER | {"advantage": "gae_adaptive", "drop_zero_signal": False, "positive_nll.coefficient": 0.1},
    ),
    "ragen": Published(
        "StarPO of RAGEN (arXiv 2504.20073) with PPO, as the base of its train_all.sh sets it",
        _STARPO | {"kl.coefficient": 0.001, "kl.estimator": "k1", "kl.where": "reward"},
    ),
    "starpo_s": Published(
        "StarPO-S of RAGEN (arXiv 2504.20073) with PPO: clip higher, no KL, a filter of groups",
        _STARPO | {"clip_high": 0.28, "keep_groups_frac": 0.25},
    ),
    "vtrace": Published(
        "IMPALA's V-trace (arXiv 1802.01561) over tokens",
        _GRPO | {"advantage": "vtrace", "objective": "importance_sampling", "aggregation": "token_mean"},
    ),
    "raft": Published(
        "RAFT (arXiv 2304.06767): likelihood of the best attempts alone",
        _GRPO | {"objective": "none", "positive_nll.coefficient": 1.0},
    ),
    "echo": Published(
        "ECHO, arXiv 2605.24517", _GRPO | {"echo.coefficient": 0.05}
    ),
}  # fmt: skip


def apply(rl: ConfigDict, name: str) -> None:
    """Sets the fields of `PUBLISHED[name]` in the `rl` section of a config file.

    Raises:
      ConfigError: unknown name.
    """
    if name not in PUBLISHED:
        raise ConfigError(f"No published algorithm '{name}'. {nearest(name, PUBLISHED)}")
    rl.update_from_flattened_dict(PUBLISHED[name].fields)
    if rl.objective == "reinforce":
        rl.updates_per_step = rl.epochs = 1
