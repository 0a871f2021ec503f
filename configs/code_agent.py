"""A code agent: write Python, run it, read the error, revise; hidden tests judge the last program.

    python -m jaxagent.main --config=configs/code_agent.py                        # generated tasks, a laptop
    python -m jaxagent.main --config=configs/code_agent.py:laptop+gspo            # any of algorithms/published.py
    python -m jaxagent.main --config=configs/code_agent.py:qwen2.5-3b \
        --config.model.path=Qwen2.5-3B-Instruct --config.data.source=data/code    # tasks of your own, 2 GPUs of 80 GB

Laptop: a policy of about one million parameters, random at first, learns on two CPU cores to write one small function
on top of a library. Half of the descriptions are out of date (a function has another name, or gives text), which only a
traceback tells; its demonstrations mostly stop there, and RL unlearns that. Held-out tasks are other descriptions than
those of training. About 13 minutes beside another run; held-out tasks solved, greedy: from 0.50 to 0.97.

qwen2.5-3b: GRPO with programs in ```python blocks, on tasks with hidden tests (docs/recipes.md has the layout;
`python -m data_pipelines.python_tasks` writes an example). Not run by us: `--dry_run` says what it needs.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts
from jaxagent.configs import gsm8k_python


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {"laptop": laptop, "qwen2.5-3b": qwen2_5_3b}
    return parts.chosen("configs/code_agent.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO on generated tasks."""
    config = gsm8k_python.laptop_scale()
    config.workdir = "runs/code_agent"
    config.tokenizer.vocab_size = 1536

    config.data.source = ConfigDict({"name": "python_tasks", "num_tasks": 4_000, "num_demonstrations": 12_000})
    config.data.source.early_answer_frac = 0.8

    config.env.max_turns = 4
    config.env.turn_tokens = 40
    config.env.observation_tokens = 32
    config.env.context_tokens = 160
    config.env.judge = "tests"
    config.env.judge_timeout_s = 15.0

    config.warm_start.batch_sequences = 24
    config.warm_start.gate_family = "first"
    config.warm_start.gate_questions = 8
    return config


def qwen2_5_3b() -> ConfigDict:
    """GRPO with Qwen2.5-3B-Instruct on two GPUs; the values are ours, near those of search_r1.py."""
    config = laptop()
    config.workdir = "runs/code_agent_qwen2.5-3b"
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
    config.data.source = ConfigDict({"name": "files", "path": "data/code"})
    gsm8k_python.chat_scale(config)

    config.env.max_turns = 6
    config.env.turn_tokens = 1024
    config.env.observation_tokens = 512
    config.env.context_tokens = 8192
    config.env.judge = "tests"
    config.env.output_chars = 2_000
    config.rl.steps = 200
    config.rl.tasks_per_step = 32
    config.rl.group_size = 8
    config.rl.batch.row_tokens = 8192
    return config
