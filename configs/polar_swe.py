"""Polar: software tasks with an unchanged agent program, and groups that count when enough of them have come through.

    python -m jaxagent.main --config=configs/polar_swe.py                          # the laptop default
    python -m jaxagent.main --config=configs/polar_swe.py:qwen3.5-4b \
        --config.model.path=Qwen3.5-4B --config.data.source=data/swe_gym           # the published recipe, 8 GPUs

NVIDIA-NeMo/ProRL-Agent-Server. What sets it apart: the advantage is the reward less the mean of the OTHER attempts,
divided by the standard deviation of the group; every session counts the same, however many trajectories it left; a step
does not wait for the last attempts of a group, and a group is used if a fraction of it came through.

Laptop: the tasks, the program and the policy of configs/coding_agent.py. Groups of 8, of which the slowest is not
waited for, and 5 are enough. Which attempts count depends on which end first, so such a run is not reproducible to the
bit. Two CPU cores, as long as configs/coding_agent.py; what it gains is not measured yet.

qwen3.5-4b: the published hyper-parameters (4 prompts x 8, KL 0.001, 2400 s) and model; qwen3-4b: an older one. Not run
by us; what dry runs say of them: docs/recipes/coding_agent.md.
"""

import math

from ml_collections import ConfigDict

from jaxagent.algorithms import published
from jaxagent.configs import _parts as parts
from jaxagent.configs import coding_agent

MIN_COMPLETE_ACCEPT_FRACTION = 0.6  # of a group's attempts: with fewer the group is dropped


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {"laptop": laptop, "qwen3.5-4b": qwen3_5_4b, "qwen3-4b": qwen3_4b}
    return parts.chosen("configs/polar_swe.py", preset, presets)


def laptop() -> ConfigDict:
    """Polar's algorithm on the laptop's tasks; no KL, which would hold a tiny policy to its bad habit."""
    config = coding_agent.laptop()
    config.workdir = "runs/polar_swe"
    polar(config)
    config.rl.kl = None
    return config


def polar(config: ConfigDict) -> None:
    """Polar's advantage, objective, KL and aggregation, and its partial groups, for `config.rl.group_size` attempts."""
    published.apply(config, "polar", parts.critic())
    attempts = config.rl.group_size
    usable = math.ceil(attempts * MIN_COMPLETE_ACCEPT_FRACTION)
    wanted = min(attempts, usable + 2)  # early_stop_min_usable_sessions: the rest is cancelled
    config.rl.group_size = wanted
    config.rl.oversample = ConfigDict({"extra_tasks": 0, "extra_attempts": attempts - wanted, "min_group": usable})


def qwen3_5_4b() -> ConfigDict:
    """The published recipe, on 8 GPUs."""
    config = qwen3_4b()
    config.workdir = "runs/polar_swe_qwen3.5-4b"
    coding_agent.qwen3_5(config)
    config.model.family = "qwen3_5_text"
    config.model.num_layers = 32
    config.model.embed_dim = 2560
    config.model.num_heads = 16
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 9216
    config.engine.pages = 12_288  # beside a gradient of 50 GB: 12 whole sessions
    return config


def qwen3_4b() -> ConfigDict:
    """The published recipe with an older model of the policy's size, which has attention alone."""
    config = coding_agent.laptop()
    config.workdir = "runs/polar_swe_qwen3-4b"
    config.mesh.fsdp = 4
    config.mesh.tensor = 2
    # The shape of Qwen3-4B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.num_layers = 36
    config.model.embed_dim = 2560
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.mlp_dim = 9728
    coding_agent.agent_scale(config)

    config.data.source.path = "data/swe_gym"
    config.env.agent = ConfigDict({"name": "codex"})
    config.env.context_tokens = 65_536
    config.env.turn_tokens = 16_384
    config.env.run_s = 2400.0
    config.env.verify_s = 600.0
    config.env.episode_timeout_s = 4_200.0
    config.env.verify_empty = False
    config.env.ladder = "swebench"

    config.engine.slots = 32
    config.engine.pages = 16_384  # 16 whole sessions; those that wait for their programs give theirs up
    config.rl.tasks_per_step = 4
    config.rl.group_size = 8
    config.rl.batch.row_tokens = 65_536
    config.rl.batch.micro_rows = 4
    polar(config)
    return config
