"""Word problems with a Python tool: write a program, read what it prints, answer (GSM8K, arXiv 2110.14168).

    python -m jaxagent.main --config=configs/gsm8k_python.py                      # generated problems, a laptop
    python -m jaxagent.main --config=configs/gsm8k_python.py:laptop+gspo          # any of algorithms/published.py
    python -m jaxagent.main --config=configs/gsm8k_python.py:smollm2              # a real pretrained model, a laptop
    python -m data_pipelines.gsm8k --train=train.jsonl --test=test.jsonl --out=data/gsm8k
    python -m jaxagent.main --config=configs/gsm8k_python.py:qwen2.5-1.5b \
        --config.model.path=Qwen2.5-1.5B-Instruct --config.data.source=data/gsm8k # the real problems, 1 GPU of 80 GB

Laptop: a policy of about one million parameters, random at first, learns on two CPU cores to solve problems whose
numbers are too large for its head. Its demonstrations of problems of two steps mostly answer from the head, with an
estimate; RL unlearns that in favour of the tool. Held-out problems have numbers that training never saw together. About
9 minutes beside another run; held-out problems solved, greedy: from 0.49 to 0.96.

smollm2: the same problems with SmolLM2-135M-Instruct in its own chat template, on two CPU cores and 8 GB of memory, in
at most 40 minutes. The model first (once): `python -m data_pipelines.smollm2 --out=runs/smollm2`. What it reaches:
docs/recipes.md.

qwen2.5-1.5b: GRPO on GSM8K itself, programs in ```python blocks and the answer in \\boxed{}. Not run by us: `--dry_run`
says what it needs.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts
from jaxagent.configs import search_r1


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {"laptop": laptop, "smollm2": smollm2, "qwen2.5-1.5b": qwen2_5_1_5b}
    return parts.chosen("configs/gsm8k_python.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO on generated problems."""
    config = laptop_scale()
    config.workdir = "runs/gsm8k_python"
    config.tokenizer.vocab_size = 2560  # every number of three digits is one token

    config.data.source = ConfigDict({"name": "arithmetic", "num_tasks": 6_000, "num_demonstrations": 24_000})
    config.data.source.early_answer_frac = 0.8

    config.env.max_turns = 3
    config.env.turn_tokens = 24
    config.env.observation_tokens = 24
    config.env.context_tokens = 96
    config.env.judge = "answer"

    config.warm_start.batch_sequences = 48
    config.warm_start.gate_family = "one_step"
    config.warm_start.gate_questions = 12
    return config


def laptop_scale() -> ConfigDict:
    """What the laptop presets of both Python recipes have in common; the rest is the search recipe's."""
    config = parts.laptop()
    config.data.num_eval = 96

    config.env = ConfigDict({"name": "python", "format": "plain", "judge": "answer", "system": ""})
    config.env.episode_timeout_s = 120.0
    config.env.max_failed_steps = 3
    config.env.run_timeout_s = 15.0  # takes milliseconds, unless the machine is very busy
    config.env.output_chars = 80
    config.env.traceback = "message"
    config.env.judge_timeout_s = 15.0
    config.env.sandbox = parts.sandbox()

    config.engine.slots = 64
    config.engine.pages = 320
    config.engine.request_timeout_s = 120.0

    config.warm_start.max_steps = 600
    config.warm_start.curriculum = None
    config.warm_start.batch.row_tokens = 192
    config.warm_start.gate_every = 50
    config.warm_start.gate_accuracy = 0.9

    config.rl.steps = 40
    config.rl.tasks_per_step = 12
    config.rl.group_size = 8
    config.rl.optimizer = parts.optimizer(4e-4, schedule="linear")
    config.rl.batch.row_tokens = 192
    config.eval.every = 0
    config.checkpoint.every = 10
    return config


def smollm2() -> ConfigDict:
    """GRPO on a real pretrained model, SmolLM2-135M-Instruct, in its own chat template, on two CPU cores.

    Programs in ```python blocks. The warm start is short, and its demonstrations of problems of two steps mostly answer
    from the head; RL unlearns that. Half of a step's eight problems are of one step, so that what is solved already
    is not forgotten.
    """
    config = laptop()
    config.workdir = "runs/gsm8k_python_smollm2"
    search_r1.smollm2_scale(config)
    config.data.source.num_tasks = 3_000

    config.env.format = "fenced"
    # The format's own message would be half of an episode's tokens.
    config.env.system = (
        "To compute, write a ```python block; you are shown what it prints. Then write the answer as \\boxed{...}."
    )
    config.env.turn_tokens = 56
    config.env.observation_tokens = 48
    config.env.context_tokens = 288
    config.env.run_timeout_s = 60.0
    config.env.sandbox.memory_mb = 128  # 64 attempts run at once
    config.warm_start.gate_questions = 4  # of each of three kinds
    return config


def qwen2_5_1_5b() -> ConfigDict:
    """GRPO on GSM8K with Qwen2.5-1.5B-Instruct on one GPU; the values are ours, near those of search_r1.py."""
    config = laptop()
    config.workdir = "runs/gsm8k_python_qwen2.5-1.5b"
    config.numerics = "fast"
    config.checkpoint.replay = "newest"

    # The shape of Qwen2.5-1.5B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.family = "qwen2"
    config.model.num_layers = 28
    config.model.embed_dim = 1536
    config.model.num_heads = 12
    config.model.num_kv_heads = 2
    config.model.head_dim = 128
    config.model.mlp_dim = 8960
    config.model.rope_theta = 1_000_000.0
    config.data.source = ConfigDict({"name": "files", "path": "data/gsm8k"})
    chat_scale(config)

    config.env.judge = "answer"
    config.rl.steps = 200
    config.rl.tasks_per_step = 64
    config.rl.group_size = 8
    return config


def chat_scale(config: ConfigDict) -> None:
    """What recipes with a chat model have in common: its tokenizer, longer turns, a larger engine, small RL steps."""
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.vocab_size = 151_936
    config.tokenizer.use_chat_template = True
    config.data.num_eval = 500

    config.env.max_turns = 4
    config.env.turn_tokens = 512
    config.env.observation_tokens = 256
    config.env.context_tokens = 4096
    config.env.episode_timeout_s = 600.0
    config.env.format = "fenced"
    config.env.run_timeout_s = 10.0
    config.env.output_chars = 1_000
    config.env.traceback = "whole"
    config.env.judge_timeout_s = 30.0
    config.env.sandbox.warm = 64
    config.env.sandbox.memory_mb = 1024
    config.env.sandbox.disk_mb = 64

    config.engine.slots = 256
    config.engine.pages = 8192
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 300.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.updates_per_step = 2
    config.rl.optimizer = parts.optimizer(1e-6, b2=0.999)
    config.rl.batch.row_tokens = 4096
    config.rl.batch.micro_rows = 4
    config.rl.batch.targets_multiple = 256
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval.every = 20
    config.checkpoint.every = 50
