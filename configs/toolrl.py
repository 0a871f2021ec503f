"""ToolRL: a thought and tool calls in one turn, rewarded part by part (Qian et al., arXiv 2504.13958).

    python -m jaxagent.main --config=configs/toolrl.py                    # generated requests, a laptop
    python -m jaxagent.main --config=configs/toolrl.py:laptop+dapo        # any of algorithms/published.py
    python -m jaxagent.main --config=configs/toolrl.py:qwen2.5-3b \
        --config.model.path=Qwen2.5-3B-Instruct --config.data.source=dataset/rlla_4k   # the published recipe, 2 GPUs

Laptop: a policy of about half a million parameters, random at first, learns on two CPU cores to make all the calls that
a request asks for. Its demonstrations of requests for two tools mostly call the first one alone; RL unlearns that.
Held-out requests were never seen in training.

About two minutes. Held-out requests that are answered in full, greedy: from 0.50 to 0.91.

qwen2.5-3b: the published GRPO run on the published data, train.parquet and test.parquet of `dataset/rlla_4k` in
qiancheng0/ToolRL: 512 rows x 4, four updates per rollout, learning rate 1e-6, KL in the reward. Not run by us:
`--dry_run` says what it needs.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+dapo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    return parts.chosen("configs/toolrl.py", preset, {"laptop": laptop, "qwen2.5-3b": qwen2_5_3b})


def laptop() -> ConfigDict:
    """GRPO on generated requests."""
    config = parts.laptop()
    config.workdir = "runs/toolrl"
    config.model.embed_dim = 96
    config.model.num_heads = 3
    config.model.num_kv_heads = 1
    config.model.mlp_dim = 256
    config.tokenizer.vocab_size = 768

    config.data.source = ConfigDict({"name": "tool_calls", "num_tasks": 6_000, "num_demonstrations": 12_000})
    config.data.source.first_only_frac = 0.75
    config.data.num_eval = 96

    config.env = ConfigDict({"name": "toolrl", "max_turns": 1, "turn_tokens": 72})
    config.env.observation_tokens = 1
    config.env.context_tokens = 160
    config.env.episode_timeout_s = 60.0
    config.env.max_failed_steps = 3
    config.env.reward = ConfigDict({"bound": 3.0, "detail": "parts", "length_words": 0})

    config.engine.slots = 96
    config.engine.pages = 320

    config.warm_start.max_steps = 400
    config.warm_start.curriculum = None
    config.warm_start.batch_sequences = 40
    config.warm_start.batch.row_tokens = 256
    config.warm_start.gate_family = "one_call"
    config.warm_start.gate_every = 50
    config.warm_start.gate_accuracy = 0.9
    config.warm_start.gate_questions = 8

    config.rl.steps = 40
    config.rl.tasks_per_step = 12
    config.rl.group_size = 8
    config.rl.optimizer = parts.optimizer(4e-4, schedule="linear")
    config.rl.batch.row_tokens = 256
    config.eval.every = 0
    return config


def qwen2_5_3b() -> ConfigDict:
    """The published GRPO run on Qwen2.5-3B-Instruct (examples/grpo_trainer/run_grpo.sh), on 2 GPUs."""
    config = laptop()
    config.workdir = "runs/toolrl_qwen2.5-3b"
    config.mesh.fsdp = 2
    config.numerics = "fast"
    config.checkpoint.replay = "newest"

    # The shape of Qwen2.5-3B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.family = "qwen2"
    config.model.num_layers = 36
    config.model.embed_dim = 2048
    config.model.num_heads = 16
    config.model.num_kv_heads = 2
    config.model.head_dim = 128
    config.model.mlp_dim = 11_008
    config.model.rope_theta = 1_000_000.0
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.vocab_size = 151_936
    config.tokenizer.use_chat_template = True

    config.data.source = ConfigDict({"name": "files", "path": "data/rlla_4k"})
    config.data.num_eval = 80  # all held-out rows
    config.env.turn_tokens = 1024
    config.env.context_tokens = 3072  # prompts of up to 2048 tokens
    config.env.episode_timeout_s = 600.0

    config.engine.slots = 256
    config.engine.pages = 8192
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 300.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.steps = 105  # 15 epochs of 3,920 rows in whole batches of 512
    config.rl.tasks_per_step = 512
    config.rl.group_size = 4
    config.rl.updates_per_step = 4  # mini-batches of 128 rows
    config.rl.objective.clip_high = 0.2
    config.rl.advantage.drop_zero_signal = False
    # The trainer takes KL off the reward whenever it is not in the loss. It alone trains groups of equal rewards.
    config.rl.kl = ConfigDict({"coefficient": 0.001, "estimator": "k1", "where": "reward"})
    config.rl.entropy_coefficient = 0.001  # the trainer's default
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=0, b2=0.999)
    config.rl.batch.row_tokens = 4096
    config.rl.batch.micro_rows = 4
    config.rl.batch.targets_multiple = 256
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval.every = 5
    config.checkpoint.every = 15
    return config
