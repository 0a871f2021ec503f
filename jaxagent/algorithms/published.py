"""Published algorithms by name: the choices of `rl` that make each, and where they come from.

A config file applies one to its config and may change fields afterwards; what then stands in the config is the whole
truth, and no code knows the name any more. An algorithm replaces every choice of the one before it: what it does not
name is GRPO's, or off. What belongs to a run and not to an algorithm (learning rate, group size, steps, the critic) is
left alone, but for one thing: an objective without a ratio is right for a step's first update alone, so `apply` sets
one update per step. Where published code differs from the paper: docs/algorithms.md. No jax.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ml_collections import ConfigDict

from jaxagent.algorithms.agent_q import UCB
from jaxagent.algorithms.aggregate import Aggregation, Constant, RolloutMean, SequenceMean, TokenMean
from jaxagent.algorithms.branching import Planned
from jaxagent.algorithms.corrections import OPSM, Importance, Mask
from jaxagent.algorithms.estimators import (
    GAE,
    AdaptiveGAE,
    BranchPairs,
    GroupMean,
    GroupMeanStd,
    LeaveOneOut,
    LeaveOneOutStd,
    MaxAtK,
    MixedTurns,
    PassAtK,
    Return,
    TreeRL,
    TreeValues,
    TurnMeanStd,
    VinePPO,
    VTrace,
)
from jaxagent.algorithms.objectives import (
    CISPO,
    GSPO,
    DualClip,
    ImportanceSampling,
    NoObjective,
    PPOClip,
    Reinforce,
    SoftGate,
    WebRL,
)
from jaxagent.config import ConfigError, EchoConfig, KLConfig, PositiveNLLConfig, RefillConfig, RLConfig, nearest
from jaxagent.config.parse import hints, plain
from jaxagent.config.run import PhasesConfig, ReplayConfig


@dataclasses.dataclass(frozen=True)
class PublishedAlgorithm:
    """One algorithm: the fields of `rl` that it sets."""

    source: str
    advantage: Any = dataclasses.field(default_factory=GroupMeanStd)
    objective: Any = dataclasses.field(default_factory=PPOClip)
    aggregation: Aggregation = dataclasses.field(default_factory=SequenceMean)
    whiten_advantages: bool = False
    keep_groups_frac: float = 1.0
    correction: Any = None
    kl: KLConfig | None = None
    echo: EchoConfig | None = None
    positive_nll: PositiveNLLConfig | None = None
    refill: RefillConfig | None = None
    phases: PhasesConfig | None = None
    replay: ReplayConfig | None = None
    branching: Any = None
    distill: None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Each field as a config has it."""
        types = hints(RLConfig)
        names = [field.name for field in dataclasses.fields(self) if field.name != "source"]
        return {name: plain(types[name], getattr(self, name)) for name in names}


_SIGNAL = GroupMeanStd(drop_zero_signal=True)
_HIGHER = PPOClip(clip_low=0.2, clip_high=0.28)
_TEN_ROUNDS = RefillConfig(max_rounds=10)  # the bound of generation batches in DAPO's recipe
_K1_IN_REWARD = functools.partial(KLConfig, estimator="k1", where="reward")
_on_dapo = functools.partial(
    PublishedAlgorithm, advantage=_SIGNAL, objective=_HIGHER, aggregation=TokenMean(), refill=_TEN_ROUNDS
)
_starpo = functools.partial(PublishedAlgorithm, advantage=GAE(), whiten_advantages=True, aggregation=TokenMean())

PUBLISHED: dict[str, PublishedAlgorithm] = {
    "grpo": PublishedAlgorithm(
        "DeepSeekMath, arXiv 2402.03300, section 4.1, with verl's dual clip", objective=DualClip(), kl=KLConfig(0.04)
    ),
    "dapo": _on_dapo("DAPO, arXiv 2503.14476"),
    "dr_grpo": PublishedAlgorithm(
        "Understanding R1-Zero-Like Training, arXiv 2503.20783", advantage=GroupMean(), aggregation=Constant()
    ),
    "rloo": PublishedAlgorithm(
        "Back to Basics, arXiv 2402.14740", advantage=LeaveOneOut(), objective=Reinforce(), kl=_K1_IN_REWARD(0.05),
        aggregation=Constant(),  # an attempt is one action: a sum over its tokens
    ),
    "reinforce_pp": PublishedAlgorithm(
        "REINFORCE++, arXiv 2501.03262", advantage=Return(), whiten_advantages=True, kl=_K1_IN_REWARD(0.01),
        aggregation=TokenMean(),
    ),
    "reinforce_pp_baseline": PublishedAlgorithm(
        "REINFORCE++ with a group baseline, arXiv 2501.03262, as OpenRLHF's scripts set it", advantage=GroupMean(),
        whiten_advantages=True, kl=KLConfig(1e-5, estimator="k2"), aggregation=TokenMean(),
    ),
    "gspo": PublishedAlgorithm("Group Sequence Policy Optimization, arXiv 2507.18071", objective=GSPO()),
    "cispo": _on_dapo("MiniMax-M1, arXiv 2506.13585", objective=CISPO()),
    "sapo": PublishedAlgorithm("Soft Adaptive Policy Optimization, arXiv 2511.20347", objective=SoftGate()),
    "grpo_process": PublishedAlgorithm(
        "GRPO with process supervision, DeepSeekMath, arXiv 2402.03300, section 4.1.3; a step is a turn",
        advantage=TurnMeanStd(), objective=DualClip(), kl=KLConfig(0.04),
    ),
    "pkpo": PublishedAlgorithm(
        "Pass@K Policy Optimization, arXiv 2505.15201", advantage=MaxAtK(k=4), objective=Reinforce(),
        aggregation=Constant(),
    ),
    "pass_at_k": _on_dapo(
        "Pass@k Training, arXiv 2508.10751, on DAPO", advantage=PassAtK(k=4, drop_zero_signal=True)
    ),
    "tis": _on_dapo("Truncated importance sampling, Yao et al. 2025, on DAPO", correction=Importance()),
    "icepop": _on_dapo("IcePop, arXiv 2510.18855, on DAPO", correction=Mask(low=0.5, high=5.0)),
    "mis": _on_dapo(
        "Masked importance sampling as slime's mis.yaml sets it, on DAPO",
        correction=Mask(low=0.5, high=2.0, veto=1e-4, normalise=True),
    ),
    "opsm": PublishedAlgorithm(
        "Off-policy sequence masking as slime has it, after DeepSeek-V3.2 (arXiv 2512.02556), on GRPO",
        correction=OPSM(),
    ),
    "flow_grpo": PublishedAlgorithm(
        "Flow-GRPO of AgentFlow, arXiv 2510.05592: every turn is a sample, and the group's statistics are over turns",
        advantage=GroupMeanStd(multi_trajectory="statistics"), objective=DualClip(clip_high=0.3), kl=KLConfig(0.001),
        aggregation=TokenMean(),
    ),
    "memagent": PublishedAlgorithm(
        "MemAgent, arXiv 2507.02259: no std; every turn is a sample with the episode's whole advantage",
        advantage=GroupMean(), objective=DualClip(), kl=KLConfig(0.001), aggregation=TokenMean(),
    ),
    "polar": PublishedAlgorithm(
        "NVIDIA-NeMo/ProRL-Agent-Server, bridge to the trainer", advantage=LeaveOneOutStd(), objective=_HIGHER,
        kl=KLConfig(0.001), aggregation=RolloutMean(),
    ),
    "ppo": PublishedAlgorithm(
        "PPO, arXiv 1707.06347, as Search-R1 (arXiv 2503.09516) sets it", advantage=GAE(), whiten_advantages=True,
        kl=_K1_IN_REWARD(0.001), aggregation=TokenMean(),  # k1: verl's default for KL in the reward
    ),
    "vapo": PublishedAlgorithm(
        "VAPO, arXiv 2504.05118; its value pre-training is the critic's warmup_updates", advantage=AdaptiveGAE(),
        objective=_HIGHER, positive_nll=PositiveNLLConfig(0.1), aggregation=TokenMean(),
    ),
    "ragen": _starpo(
        "StarPO of RAGEN (arXiv 2504.20073) with PPO, as the base of its train_all.sh sets it", objective=DualClip(),
        kl=_K1_IN_REWARD(0.001),
    ),
    "starpo_s": _starpo(
        "StarPO-S of RAGEN (arXiv 2504.20073) with PPO: clip higher, no KL, a filter of groups",
        objective=DualClip(clip_high=0.28), keep_groups_frac=0.25,
    ),
    "vtrace": PublishedAlgorithm(
        "IMPALA's V-trace (arXiv 1802.01561) over tokens", advantage=VTrace(), objective=ImportanceSampling(),
        aggregation=TokenMean(),
    ),
    "vine_ppo": PublishedAlgorithm(
        "VinePPO, arXiv 2410.01679, as its configs set it but for the number of continuations", advantage=VinePPO(),
        whiten_advantages=True, kl=KLConfig(1e-4), aggregation=TokenMean(), branching=Planned(),
    ),
    "tree": PublishedAlgorithm(
        "Monte-Carlo values of a tree of attempts, each without its own outcome; ours, after TreeRL and VinePPO",
        advantage=TreeValues(), aggregation=Constant(), branching=Planned(),
    ),
    "tree_rl": PublishedAlgorithm(
        "The process rewards of TreeRL, arXiv 2506.11902, on turns; its forks begin where the policy is least certain",
        advantage=TreeRL(), aggregation=TokenMean(), branching=Planned(),
    ),
    "agentq": PublishedAlgorithm(
        "Agent Q, arXiv 2408.07199, by visits alone; its search as sentient-engineering/agent-q has it",
        advantage=BranchPairs(), objective=Reinforce(), aggregation=TokenMean(), branching=UCB(),
    ),
    "raft": PublishedAlgorithm(
        "RAFT (arXiv 2304.06767): likelihood of the best attempts alone", objective=NoObjective(),
        positive_nll=PositiveNLLConfig(1.0),
    ),
    "webrl": PublishedAlgorithm(
        "WebRL, arXiv 2411.02337, and its released code; a phase is 5 steps", advantage=MixedTurns(),
        objective=WebRL(), aggregation=TokenMean(), kl=KLConfig(1.0, where="objective", refresh_every=5),
        phases=PhasesConfig(steps=5),
        replay=ReplayConfig(per_step=4096, turns=True, times=2.0, use="reference", coefficient=1.0),
    ),
    "echo": PublishedAlgorithm("ECHO, arXiv 2605.24517", echo=EchoConfig(0.05)),
}  # fmt: skip


def apply(config: ConfigDict, name: str, critic: ConfigDict) -> None:
    """Makes the `rl` section of a run's config that of `PUBLISHED[name]`. Raises ConfigError for an unknown name.

    Dr. GRPO's constant is the most tokens that an episode can sample. `critic`: for an algorithm that has one, where
    `config` has none.
    """
    if name not in PUBLISHED:
        raise ConfigError(f"No published algorithm '{name}'. {nearest(name, PUBLISHED)}")
    rl: Any = config.rl
    env: Any = config.env
    fields = PUBLISHED[name].fields
    if "critic" in fields["advantage"]:
        loss = fields["advantage"]["critic"]["loss"]
        fields["advantage"]["critic"] = ConfigDict(rl.advantage.get("critic", critic))
        if loss["name"] != "squared":  # what a critic learns is a part of such an algorithm
            fields["advantage"]["critic"].loss = ConfigDict(loss)
    if fields["aggregation"]["name"] == "constant":
        turns = env.max_turns + int(env.get("final_turn", False))
        fields["aggregation"]["constant"] = float(turns * env.turn_tokens)
    for field, value in fields.items():
        rl[field] = ConfigDict(value) if isinstance(value, dict) else value
    if rl.objective.name == "reinforce":
        rl.updates_per_step = rl.epochs = 1
