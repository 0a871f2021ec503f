"""Named parts of recipes: what a config file puts together, and how it finds the preset that a command names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from jaxagent.algorithms import published
from jaxagent.config import ConfigError, nearest


def chosen(file: str, preset: str, presets: Mapping[str, Callable[[], ConfigDict]]) -> ConfigDict:
    """The config of "laptop", or of "laptop+gspo": a preset with a published algorithm in place of its own.

    Args:
      file: of the recipe, for errors.
      preset: what the command line gives after the colon.
      presets: by name.

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    name, plus, algorithm = preset.partition("+")
    if name not in presets:
        raise ConfigError(f"{file} has no preset '{name}'. {nearest(name, presets)}")
    config = presets[name]()
    if plus:
        published.apply(config, algorithm, critic())
        config.workdir += f"_{algorithm}"
    return config


def optimizer(learning_rate: float, **changes: object) -> ConfigDict:
    """AdamW as the laptop uses it, with changes."""
    config = ConfigDict()
    config.learning_rate = learning_rate
    config.schedule = "constant"
    config.warmup_steps = 10
    config.b2 = 0.98
    config.weight_decay = 0.01
    config.grad_clip = 1.0
    config.update(changes)
    return config


def rate(learning_rate: float, schedule: str = "linear") -> ConfigDict:
    """The warm start's learning rate; the rest of its AdamW is `rl.optimizer`'s."""
    return ConfigDict({"learning_rate": learning_rate, "schedule": schedule, "warmup_steps": 10})


def group_mean_std(drop_zero_signal: bool) -> ConfigDict:
    """GRPO's advantage."""
    return ConfigDict({"name": "group_mean_std", "drop_zero_signal": drop_zero_signal, "multi_trajectory": "full"})


def gae() -> ConfigDict:
    """PPO's advantage."""
    return ConfigDict({"name": "gae", "gamma": 1.0, "lam": 1.0, "critic": critic()})


def critic() -> ConfigDict:
    """How the laptop trains a critic: first, and faster than the policy."""
    config = ConfigDict({"value_coefficient": 1.0, "warmup_updates": 10, "warmup_epochs": 4})
    config.loss = ConfigDict({"name": "squared", "value_clip": 0.5})
    config.optimizer = optimizer(1e-3)
    return config


def sandbox() -> ConfigDict:
    """A small sandbox of the best kind that works here."""
    return ConfigDict({"warm": 16, "memory_mb": 256, "disk_mb": 16, "files": 1_000, "processes": 64, "cpus": 1.0})


def batch(row_tokens: int, micro_rows: int, targets_multiple: int = 32) -> ConfigDict:
    """Packed rows of whole sequences."""
    return ConfigDict(
        {
            "row_tokens": row_tokens,
            "micro_rows": micro_rows,
            "targets_multiple": targets_multiple,
            "share_prefix": False,
        }
    )


def offline_stages(learning_rate: float) -> ConfigDict:
    """Sections of the stages that learn from data; a run keeps those of the stages that it names."""
    config = ConfigDict({"sample": {"steps": 8, "tasks_per_step": 64, "attempts": 8}})
    training = {"updates": 120, "examples": 32, "learning_rate": learning_rate}
    config.sft = ConfigDict(training | {"demonstrations": "", "negatives": "", "negative_frac": 0.1})
    config.sft.update(aggregation="token_mean", updates=100)
    config.rft = ConfigDict(training | {"episodes": "", "min_reward": 1.0, "per_task": 4, "aggregation": "token_mean"})
    config.dpo = ConfigDict(training | {"episodes": "", "pairs_per_task": 2, "min_gap": 0.5, "beta": 0.1})
    config.dpo.update(length_normalised=False, nll_coefficient=0.2, examples=16)
    config.outcome_model = ConfigDict(training | {"episodes": "", "loss": "binary", "min_reward": 1.0})
    config.outcome_model.update(held_out_frac=0.2, updates=100)
    return config


def laptop() -> ConfigDict:
    """What every laptop recipe begins with: all but the workdir, the environment and the source of its tasks.

    A policy of about a million parameters, a warm start on demonstrations, GRPO; minutes on two CPU cores.
    """
    config = ConfigDict()
    config.seed = 0
    config.numerics = "exact"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "tensor": 1, "context": 1})

    config.model = ConfigDict()
    config.model.path = ""
    config.model.family = "qwen3"
    config.model.num_layers = 3
    config.model.embed_dim = 128
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 32
    config.model.mlp_dim = 384
    config.model.vocab_multiple = 64
    config.model.rope_theta = 10_000.0
    config.model.tie_embeddings = True
    config.model.embed_init_std = 0.1
    config.model.param_dtype = "float32"
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.model.logprob_chunk_tokens = 512

    config.tokenizer = ConfigDict({"path": "", "vocab_size": 3072, "use_chat_template": False})

    config.data = ConfigDict({"eval_source": "", "seed": 0, "num_eval": 256})

    config.engine = ConfigDict()
    config.engine.slots = 128
    config.engine.steps_per_dispatch = 4
    config.engine.prefill_tokens = 4096
    config.engine.pages = 640
    config.engine.page_tokens = 64
    config.engine.tile_rows = 64
    config.engine.kv_on_update = "recompute"
    config.engine.cache_dtype = "float32"
    config.engine.request_timeout_s = 60.0

    config.stages = ("warm_start", "rl")
    config.warm_start = ConfigDict()
    config.warm_start.demonstrations = ""
    config.warm_start.max_steps = 1_000
    config.warm_start.batch_sequences = 19
    config.warm_start.optimizer = rate(3e-3)
    config.warm_start.batch = ConfigDict({"row_tokens": 288, "micro_rows": 8, "share_prefix": False})
    config.warm_start.curriculum = ConfigDict({"steps": 200, "sequences": 42})
    config.warm_start.gate_every = 100
    config.warm_start.gate_family = "one_hop"
    config.warm_start.gate_accuracy = 0.95
    config.warm_start.gate_questions = 24

    config.update(offline_stages(3e-4))
    config.dpo.learning_rate = 1e-4
    config.opd = ConfigDict({"steps": 24, "learning_rate": 1e-3})

    config.rl = ConfigDict()
    config.rl.steps = 70
    config.rl.tasks_per_step = 16
    config.rl.group_size = 8
    config.rl.staleness = 0
    config.rl.rescore_every = 1
    config.rl.updates_per_step = 2
    config.rl.epochs = 1
    config.rl.advantage = group_mean_std(drop_zero_signal=True)
    config.rl.whiten_advantages = False
    config.rl.objective = ConfigDict({"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28})
    config.rl.aggregation = ConfigDict({"name": "token_mean"})
    config.rl.entropy_coefficient = 0.0
    config.rl.sampling = ConfigDict({"temperature": 1.0})
    config.rl.keep_groups_frac = 1.0
    config.rl.tool_epsilon = 0.0
    config.rl.optimizer = optimizer(2e-4, schedule="linear")
    config.rl.batch = batch(row_tokens=256, micro_rows=4)

    config.eval = ConfigDict({"every": 10, "sampled": True})
    config.checkpoint = ConfigDict({"every": 10, "keep": 2, "replay": "all"})
    return config
