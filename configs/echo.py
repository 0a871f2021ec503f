"""ECHO: a terminal agent by GRPO that also learns to predict what the terminal answers (arXiv 2605.24517).

    python -m jaxagent.main --config=configs/echo.py                # GRPO + ECHO, the laptop default
    python -m jaxagent.main --config=configs/echo.py:laptop-grpo    # the same without the prediction: the A/B
    python -m jaxagent.main --config=configs/echo.py:qwen3-8b \
        --config.model.path=Qwen3-8B --config.data.source=data/echo    # the published recipe, 8 GPUs

    python -m launch.sweep --config=configs/echo.py --grid preset=laptop,laptop-grpo --seeds=0,1,2 \
        --workdir=runs/echo_ab

Laptop: tasks, sandbox, policy and warm start of configs/endless_terminals.py. Commands are written in the short
format there; with `--config.env.tools=qwen3_xml` they are ECHO's tool calls, which take longer to learn.

qwen3-8b: the published hyper-parameters. Not run by us: `--dry_run` says what it needs.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts
from jaxagent.configs import endless_terminals


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset.

    Raises:
      ConfigError: unknown preset.
    """
    presets = {"laptop": laptop, "laptop-grpo": laptop_grpo, "qwen3-8b": qwen3_8b, "qwen3-8b-grpo": qwen3_8b_grpo}
    return parts.chosen("configs/echo.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO and ECHO in a real sandbox; learns in minutes on two CPU cores."""
    config = laptop_grpo()
    config.workdir = "runs/echo"
    config.rl.echo = published_echo()
    return config


def published_echo() -> ConfigDict:
    """ECHO's own constants (arXiv 2605.24517)."""
    config = ConfigDict({"coefficient": 0.05, "schedule": "constant", "targets": "env_only", "max_tokens": 0})
    config.denominator = ConfigDict({"name": "full_observation"})
    return config


def laptop_grpo() -> ConfigDict:
    """The same without the prediction of observations."""
    config = endless_terminals.terminal()
    config.workdir = "runs/echo_grpo"
    config.rl.advantage = parts.group_mean_std(drop_zero_signal=True)
    config.rl.objective.clip_high = 0.2
    return config


def qwen3_8b() -> ConfigDict:
    """The published recipe on Qwen3-8B; the split over 8 GPUs is ours."""
    config = qwen3_8b_grpo()
    config.workdir = "runs/echo_qwen3-8b"
    config.rl.echo = published_echo()
    return config


def qwen3_8b_grpo() -> ConfigDict:
    """The published GRPO baseline."""
    config = laptop_grpo()
    config.workdir = "runs/echo_grpo_qwen3-8b"
    config.mesh.fsdp = 8
    config.numerics = "fast"
    config.checkpoint.replay = "newest"

    # The shape of Qwen3-8B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.family = "qwen3"
    config.model.num_layers = 36
    config.model.embed_dim = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.mlp_dim = 12_288
    config.model.rope_theta = 1_000_000.0
    config.model.tie_embeddings = False
    config.tokenizer.vocab_size = 151_936
    endless_terminals.published_scale(config)

    config.data.source = ConfigDict({"name": "files", "path": "data/echo"})
    config.env.context_tokens = 34_096  # of the whole trajectory; longer ones get 0 without verification
    config.env.tools = "qwen3_xml"
    config.env.command_timeout_s = 30.0
    config.env.agent_timeout_s = 600.0
    config.env.verifier_timeout_s = 120.0
    config.env.verify_overlong = False
    config.env.solved_reward = 0.5

    config.engine.pages = 65_536
    config.rl.steps = 1_096  # 2 epochs over 8,770 tasks
    config.rl.epochs = 1
    config.rl.advantage.drop_zero_signal = False
    config.rl.sampling.temperature = 0.8
    config.rl.batch.row_tokens = 34_112  # a multiple of the page
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=20, b2=0.999, grad_clip=0.2)
    config.eval.every = 50
    return config
