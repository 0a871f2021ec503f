"""Endless Terminals: an agent that works in a shell, by PPO with a critic (arXiv 2601.16443).

    python -m jaxagent.main --config=configs/endless_terminals.py                       # the laptop default
    python -m jaxagent.main --config=configs/endless_terminals.py:laptop+grpo           # any of algorithms/published.py
    python -m jaxagent.main --config=configs/endless_terminals.py:qwen2.5-7b \
        --config.model.path=Qwen2.5-7B-Instruct --config.data.source=data/endless       # the published recipe, 8 GPUs

Laptop: a policy of about one million parameters, random at first, learns on two CPU cores to do one or two small things
in a real shell in a real sandbox ("Copy the file napkin to frost. Then set the mode of the file sugar to 700."). Its
demonstrations, made from the tasks' oracles, mostly finish after the first of two things; that is what RL has to
unlearn. Held-out tasks are other instructions than those of training.

qwen2.5-7b: the published hyper-parameters. Not run by us: `--dry_run` says what it needs.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+grpo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {"laptop": laptop, "qwen2.5-7b": qwen2_5_7b}
    return parts.chosen("configs/endless_terminals.py", preset, presets)


def terminal() -> ConfigDict:
    """What the terminal's laptop recipes have in common: data, environment, model and warm start."""
    config = parts.laptop()
    config.tokenizer.vocab_size = 1024

    config.data.source = ConfigDict({"name": "terminal", "num_tasks": 4_000, "num_demonstrations": 6_000})
    config.data.source.early_answer_frac = 0.8

    config.env = ConfigDict({"name": "terminal", "tools": "plain"})
    config.env.max_turns = 6
    config.env.turn_tokens = 16
    config.env.observation_tokens = 32
    config.env.context_tokens = 192
    config.env.episode_timeout_s = 120.0
    config.env.max_failed_steps = 3
    config.env.command_timeout_s = 10.0
    config.env.output_chars = 1_000
    config.env.agent_timeout_s = 60.0
    config.env.verifier_timeout_s = 0.0
    config.env.verify_overlong = False
    config.env.initial_test = False  # tasks are checked when they are made; it would cost as much as the final test
    config.env.solved_reward = 1.0
    config.env.sandbox = parts.sandbox()

    config.engine.slots = 64
    config.engine.pages = 320
    config.engine.request_timeout_s = 120.0

    config.warm_start.max_steps = 600  # RL goes on from there; the gate would take longer
    config.warm_start.curriculum = None
    config.warm_start.batch_sequences = 24
    config.warm_start.batch.row_tokens = 192
    config.warm_start.gate_family = "level1"
    config.warm_start.gate_accuracy = 0.9
    config.warm_start.gate_questions = 12

    config.rl.steps = 50
    config.rl.tasks_per_step = 12
    config.rl.group_size = 8
    config.rl.aggregation = ConfigDict({"name": "sequence_mean"})
    config.rl.batch.row_tokens = 192
    config.eval.every = 10
    return config


def laptop() -> ConfigDict:
    """PPO with a critic in a real sandbox; learns in minutes on two CPU cores."""
    config = terminal()
    config.workdir = "runs/endless_terminals"
    config.rl.advantage = parts.gae()
    config.rl.advantage.critic.loss.value_clip = 0.2
    return config


def qwen2_5_7b() -> ConfigDict:
    """The published PPO recipe on Qwen2.5-7B-Instruct; the split over 8 GPUs is ours."""
    config = laptop()
    config.workdir = "runs/endless_terminals_qwen2.5-7b"
    config.mesh.fsdp = 8
    config.numerics = "fast"
    config.checkpoint.replay = "newest"

    # The shape of Qwen2.5-7B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.family = "qwen2"
    config.model.num_layers = 28
    config.model.embed_dim = 3584
    config.model.num_heads = 28
    config.model.num_kv_heads = 4
    config.model.head_dim = 128
    config.model.mlp_dim = 18_944
    config.model.rope_theta = 1_000_000.0
    config.model.tie_embeddings = False
    config.tokenizer.vocab_size = 152_064
    published_scale(config)

    config.data.source = ConfigDict({"name": "files", "path": "data/endless_terminals"})
    config.data.seed = 42
    config.env.tools = "endless"
    config.env.command_timeout_s = 10.0
    config.env.agent_timeout_s = 300.0
    config.env.verifier_timeout_s = 10.0  # the same read limit bounds the published test
    config.env.initial_test = False

    config.rl.steps = 1_351  # 10 epochs over 2,162 tasks
    config.rl.epochs = 2
    config.rl.sampling.temperature = 0.6
    config.rl.optimizer = parts.optimizer(5e-7, warmup_steps=20, b2=0.999, grad_clip=0.1)
    config.rl.advantage.critic.optimizer = parts.optimizer(1e-6, warmup_steps=20, b2=0.999, grad_clip=0.1)
    config.rl.advantage.critic.warmup_updates = 0
    config.rl.advantage.critic.warmup_epochs = 1
    config.eval.every = 50
    return config


def published_scale(config: ConfigDict) -> None:
    """What both published recipes share: 16 tasks x 16 attempts, 16 turns of 2,048 tokens, one update per epoch."""
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.use_chat_template = True
    config.data.num_eval = 100

    config.env.max_turns = 16
    config.env.turn_tokens = 2048
    config.env.observation_tokens = 14_000  # the published cap is 50,000 characters
    config.env.context_tokens = 16_384
    config.env.episode_timeout_s = 1800.0  # a failure; the attempt's own time is env.agent_timeout_s
    config.env.output_chars = 50_000
    config.env.sandbox.warm = 64
    config.env.sandbox.memory_mb = 1024
    config.env.sandbox.disk_mb = 2048
    config.env.sandbox.files = 100_000
    config.env.sandbox.processes = 256

    config.engine.slots = 256
    config.engine.pages = 32_768
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 900.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.tasks_per_step = 16
    config.rl.group_size = 16
    config.rl.updates_per_step = 1
    config.rl.batch.row_tokens = 16_384
    config.rl.batch.micro_rows = 8
    config.rl.batch.targets_multiple = 1024
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.checkpoint.every = 50
