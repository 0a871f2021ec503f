r"""MemAgent: documents far longer than the window are read chunk by chunk, with a memory (Yu et al., arXiv 2507.02259).

python -m jaxagent.main --config=configs/memagent.py                              # the laptop default
python -m jaxagent.main --config=configs/memagent.py:laptop-reproduction          # the reproduction's variant
python -m jaxagent.evaluate_lengths --config.workdir=runs/memagent --lengths=512,1024,2048 --greedy
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    return parts.chosen("configs/memagent.py", preset, {"laptop": laptop})


def laptop() -> ConfigDict:
    """Documents of eight chunks, a policy of a million parameters; learns in minutes on two CPU cores."""
    config = parts.laptop()
    config.workdir = "runs/memagent"
    config.tokenizer.vocab_size = 2560

    config.data.source = ConfigDict({"name": "long_geography", "num_cities": 600})
    config.data.source.num_curriculum = 8_000
    config.data.source.num_demonstrations = 32_000
    config.data.source.forget_frac = 0.7

    config.env = ConfigDict({"name": "memagent", "prompt": "compact"})
    config.env.max_turns = 9  # eight chunks and the answer
    config.env.chunk_tokens = 64
    config.env.length_tokens = 512
    config.env.turn_tokens = 8
    config.env.question_tokens = 32
    config.env.context_tokens = 128
    config.env.episode_timeout_s = 120.0

    config.warm_start.max_steps = 1_000
    config.warm_start.curriculum_steps = 200
    config.warm_start.curriculum_sequences = 48
    config.warm_start.batch_sequences = 32
    config.warm_start.batch = parts.batch(row_tokens=256, micro_rows=8)
    config.warm_start.gate_every = 2_000  # never: whole episodes fail until RL

    config.rl.steps = 40
    config.rl.tasks_per_step = 16
    config.rl.group_size = 8
    config.rl.advantage = ConfigDict({"name": "group_mean", "drop_zero_signal": True, "multi_trajectory": "full"})
    config.rl.batch.update(row_tokens=256, micro_rows=4, share_prefix=True)
    return config
