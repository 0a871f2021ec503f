"""ToolRL, ReSearch and RAGEN: large presets with the published constants, and the laptop's in runs of seconds."""

import importlib

import pytest

from jaxagent import main as cli
from jaxagent.config import flags
from jaxagent.runs import checks
from tests import tiny_run

# Search-R1's train_grpo.sh (v0.2), whose mini-batches count rows; slime-agentic's agentflow_qwen25_7b_rl.sh, one sample
# per turn; slime's coding_agent_rl script; rlla's run_grpo.sh and its trainer's KL; ReSearch's train_multi_node.sh;
# RAGEN's config/base.yaml, _1_bandit.yaml to _3_frozen_lake.yaml.
STARPO_S = {
    "rl.steps": 200, "rl.tasks_per_step": 8, "rl.group_size": 16, "rl.updates_per_step": 1, "rl.epochs": 1,
    "rl.keep_groups_frac": 0.25, "rl.kl": None, "rl.entropy_coefficient": 0.001, "rl.advantage.name": "gae",
    "rl.advantage.gamma": 1.0, "rl.advantage.lam": 1.0, "rl.objective.clip_low": 0.2, "rl.objective.clip_high": 0.28,
    "rl.optimizer.learning_rate": 1e-6, "rl.optimizer.b2": 0.999, "rl.advantage.critic.optimizer.learning_rate": 1e-5,
    "env.max_turns": 5, "env.max_actions_per_turn": 5, "env.turn_tokens": 400, "env.context_tokens": 3600,
    "env.format_penalty": 0.1, "env.think": True, "env.prompt": "published", "env.pay": "episode",
    "rl.sampling.temperature": 1.0, "data.num_eval": 256,
}  # fmt: skip
PUBLISHED = {
    "search_r1:qwen2.5-3b": {
        "rl.tasks_per_step": 512, "rl.group_size": 5, "rl.updates_per_step": 512 * 5 // 256, "rl.steps": 1005,
        "rl.optimizer.learning_rate": 1e-6, "rl.optimizer.warmup_steps": int(0.285 * 1005 * 10), "rl.kl.where": "loss",
        "rl.kl.coefficient": 0.001, "rl.kl.estimator": "k3", "rl.entropy_coefficient": 0.001, "env.retriever.topk": 3,
    },
    "agentflow:slime_agentic": {
        "rl.tasks_per_step": 8, "rl.group_size": 8, "rl.updates_per_step": 4, "rl.optimizer.learning_rate": 1e-6,
        "rl.aggregation.name": "sequence_mean", "rl.advantage.multi_trajectory": "full",
        "rl.optimizer.weight_decay": 0.1, "rl.objective.clip_low": 0.2, "rl.objective.clip_high": 0.3,
        "rl.kl.coefficient": 0.001,
    },
    "coding_agent:claude_code": {"rl.steps": 100, "rl.tasks_per_step": 8, "rl.group_size": 8, "rl.kl": None},
    "toolrl:qwen2.5-3b": {
        "rl.tasks_per_step": 512, "rl.group_size": 4, "rl.updates_per_step": 4, "rl.optimizer.learning_rate": 1e-6,
        "rl.kl.coefficient": 0.001, "rl.kl.estimator": "k1", "rl.kl.where": "reward",
        "rl.advantage.drop_zero_signal": False, "rl.objective.clip_low": 0.2, "rl.objective.clip_high": 0.2,
        "rl.entropy_coefficient": 0.001, "rl.advantage.name": "group_mean_std",
        "env.turn_tokens": 1024, "env.context_tokens": 2048 + 1024,
        "env.reward.bound": 3.0, "env.reward.detail": "parts", "env.reward.length_words": 0, "mesh.fsdp": 2,
    },
    "research:qwen2.5-7b": {
        "rl.tasks_per_step": 256, "rl.group_size": 5, "rl.updates_per_step": 1, "rl.optimizer.learning_rate": 1e-6,
        "rl.kl.coefficient": 0.001, "rl.kl.estimator": "k3", "rl.kl.where": "loss", "rl.objective.clip_high": 0.2,
        "env.context_tokens": 512 + 8192, "env.retriever.topk": 5, "env.reward.name": "research",
        "env.reward.wrong_score": 0.1, "env.prompt": "research_chat",
    },
    "ragen:sokoban": STARPO_S | {"env.world.name": "sokoban", "env.world.rows": 6, "env.world.boxes": 1},
    "ragen:frozen_lake": STARPO_S | {"env.world.size": 4, "env.world.ice_frac": 0.8, "env.world.slippery": True},
    "ragen:bandit": STARPO_S | {
        "env.world.name": "bandit", "env.max_turns": 1, "env.max_actions_per_turn": 1, "env.turn_tokens": 500,
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_preset_has_the_published_constants(preset):
    file, name = preset.split(":")
    config = importlib.import_module(f"configs.{file}").get_config(name)
    for path, wanted in PUBLISHED[preset].items():
        section, _, field = path.rpartition(".")
        found = config
        for part in section.split("."):
            found = found[part]
        assert found.get(field) == wanted, path
    checks.check(flags.parse_argv(["main", f"--config=configs/{file}.py:{name}"]).config)


@pytest.mark.parametrize("preset", ["toolrl", "research", "ragen", "ragen.py:laptop-bandit"])
def test_the_laptop_preset_is_one(preset):
    file, _, name = preset.partition(".py:")
    checks.check(flags.parse_argv(["main", f"--config=configs/{file}.py:{name or 'laptop'}"]).config)


SMALL = (
    "--config.numerics=fast --config.data.source.num_demonstrations=32 --config.env.turn_tokens=8 "
    "--config.warm_start.curriculum_steps=0 --config.warm_start.max_steps=3 --config.rl.steps=2"
)
WORLDS = f"{SMALL} --config.data.source.num_tasks=120 --config.warm_start.gate_every=9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "preset", "own"),
    [
        ("toolrl", "laptop", f"{SMALL} --config.data.source.num_tasks=120 --config.env.max_turns=1"),
        pytest.param("ragen", "laptop", WORLDS, marks=pytest.mark.nightly),  # the two below are its world and its pay
        ("ragen", "laptop-bandit", f"{WORLDS} --config.env.max_turns=1"),
        ("ragen", "laptop", f"{WORLDS} --config.env.pay=turn --config.rl.advantage=gae_bilevel"),
        ("research", "laptop", f"{SMALL} {tiny_run.SEARCH_FLAGS}"),
    ],
)
def test_a_tiny_run(tmp_path, config, preset, own):
    """Data, warm start, RL and evaluation. A random policy solves next to nothing, but no attempt fails."""
    argv = tiny_run.argv(tmp_path / "run", *own.split(), preset=preset, config=config)
    argv = [flag for flag in argv if "drop_zero_signal" not in flag or "gae" not in own]
    assert cli.main(argv) == 0
    assert tiny_run.ended(tmp_path / "run")[0]["eval/n"] == 8
