"""The large presets of ToolRL, ReSearch and RAGEN have the published constants, read from the released scripts."""

import importlib

import pytest

from jaxagent.config import flags
from jaxagent.runs import checks

# rlla's run_grpo.sh; ReSearch's train_multi_node.sh; RAGEN's config/base.yaml, _1_bandit.yaml to _3_frozen_lake.yaml.
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
    "toolrl:qwen2.5-3b": {
        "rl.tasks_per_step": 512, "rl.group_size": 4, "rl.updates_per_step": 4, "rl.optimizer.learning_rate": 1e-6,
        "rl.kl": None, "rl.objective.clip_low": 0.2, "rl.objective.clip_high": 0.2, "rl.entropy_coefficient": 0.001,
        "rl.advantage.name": "group_mean_std", "env.turn_tokens": 1024, "env.context_tokens": 2048 + 1024,
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
