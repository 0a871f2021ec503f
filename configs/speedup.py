"""Make functions faster: the policy writes a function, which is checked and measured beside a reference.

    python -m jaxagent.main --config=configs/speedup.py                         # small NumPy tasks, a laptop
    python -m jaxagent.main --config=configs/speedup.py:laptop+gspo             # any of algorithms/published.py
    python -m jaxagent.main --config=configs/speedup.py:qwen2.5-1.5b \
        --config.model.path=Qwen2.5-Coder-1.5B-Instruct                         # all families, 1 GPU of 80 GB

Laptop: a policy of 0.6 million parameters, random at first, learns on two CPU cores to write vectors where the
reference has a loop. Its demonstrations are mostly content with a correct program that is not faster, or hardly; that
is what RL has to unlearn. Held-out tasks are families in shapes that training never saw together: their gain, greedy,
goes from 0.45, 0.46 and 0.46 to 1.0 on each of seeds 0, 1 and 2, in 9 to 13 minutes beside other work.

qwen2.5-1.5b: all families of data_pipelines/speedup_tasks.py, NumPy and C, in ``` blocks, with four revisions. Not run
by us: `--dry_run` says what it needs.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts
from jaxagent.configs import gsm8k_python


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {"laptop": laptop, "qwen2.5-1.5b": qwen2_5_1_5b}
    return parts.chosen("configs/speedup.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO on folds of two vectors."""
    config = parts.laptop()
    config.workdir = "runs/speedup"
    config.tokenizer.vocab_size = 512
    config.data.num_eval = 64
    config.data.source = ConfigDict({"name": "speedup_tasks", "num_demonstrations": 6_000, "slow_frac": 0.8})

    config.env = ConfigDict({"name": "speedup", "format": "plain"})
    config.env.max_turns = 3
    config.env.turn_tokens = 32
    config.env.observation_tokens = 24
    config.env.context_tokens = 192
    config.env.episode_timeout_s = 300.0
    config.env.max_failed_steps = 3
    config.env.rounds = 3
    config.env.timed_calls = 3
    config.env.sandbox = parts.sandbox()
    config.env.sandbox.warm = 0

    config.engine.slots = 64
    config.engine.pages = 320
    config.engine.request_timeout_s = 120.0

    config.warm_start.max_steps = 250
    config.warm_start.curriculum = None
    config.warm_start.batch_sequences = 32
    config.warm_start.batch.row_tokens = 192
    config.warm_start.gate_every = 50
    config.warm_start.gate_family = "folds"
    config.warm_start.gate_accuracy = 0.9  # it is content with less than that: max_steps ends it
    config.warm_start.gate_questions = 12

    config.rl.steps = 20
    config.rl.tasks_per_step = 8
    config.rl.group_size = 8
    config.rl.optimizer = parts.optimizer(4e-4, schedule="linear")
    config.rl.batch.row_tokens = 192
    config.eval.every = 0
    config.checkpoint.every = 10
    return config


def qwen2_5_1_5b() -> ConfigDict:
    """GRPO on all families with Qwen2.5-Coder-1.5B-Instruct on one GPU; the values are ours, near gsm8k_python's."""
    config = gsm8k_python.qwen2_5_1_5b()
    config.workdir = "runs/speedup_qwen2.5-1.5b"
    config.data.source = ConfigDict({"name": "speedup_tasks", "families": "all", "num_demonstrations": 0})
    config.data.num_eval = 128

    config.env = ConfigDict({"name": "speedup", "format": "fenced"})
    config.env.max_turns = 4
    config.env.turn_tokens = 1024
    config.env.observation_tokens = 256
    config.env.context_tokens = 6144
    config.env.episode_timeout_s = 600.0
    config.env.correct_reward = 0.2
    config.env.rounds = 4
    config.env.timed_calls = 4
    config.env.stations = 4
    config.env.sandbox = parts.sandbox()
    config.env.sandbox.warm = 0
    config.env.sandbox.memory_mb = 1024
    config.env.sandbox.disk_mb = 64

    config.rl.tasks_per_step = 32
    config.rl.batch.row_tokens = 6144
    return config
