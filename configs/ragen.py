"""RAGEN, StarPO-S: text worlds of several turns, several actions per turn (Wang et al., arXiv 2504.20073).

    python -m jaxagent.main --config=configs/ragen.py                    # FrozenLake, a laptop
    python -m jaxagent.main --config=configs/ragen.py:laptop-bandit      # the bandit of two arms, a laptop
    python -m jaxagent.main --config=configs/ragen.py:sokoban --config.model.path=Qwen2.5-0.5B-Instruct   # 1 GPU
    python -m jaxagent.main --config=configs/ragen.py:frozen_lake --config.model.path=Qwen2.5-0.5B-Instruct
    python -m jaxagent.main --config=configs/ragen.py:bandit --config.model.path=Qwen2.5-0.5B-Instruct

Laptop: a policy of about half a million parameters, random at first, learns on two CPU cores to cross a frozen lake in
two turns. Its demonstrations mostly take one step per turn and run out of turns; RL unlearns that in favour of
"Down || Down || Right". Held-out lakes were never seen in training; from 0 to about 0.8 of them are crossed, in about
three minutes. laptop-bandit: most demonstrations pull the arm that pays a little for certain; RL finds the other one,
since StarPO-S keeps the groups whose rewards vary most.

sokoban, frozen_lake, bandit: the published runs on Qwen2.5-0.5B-Instruct with all of StarPO-S: PPO with a critic,
8 worlds x 16 attempts of which the 2 groups of largest standard deviation are trained on, the clip 0.8 to 1.28, no KL.
Two levels of GAE, which the published code has, over rewards paid turn by turn: `--config.rl.advantage=gae_bilevel
--config.rl.advantage.turn_gamma=0.95 --config.env.pay=turn`. Not run by us: `--dry_run` says what they need.
"""

from ml_collections import ConfigDict

from jaxagent.algorithms import published
from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+dapo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {
        "laptop": laptop,
        "laptop-bandit": laptop_bandit,
        "sokoban": sokoban,
        "frozen_lake": frozen_lake,
        "bandit": bandit,
    }
    return parts.chosen("configs/ragen.py", preset, presets)


def laptop() -> ConfigDict:
    """StarPO-S without a critic on FrozenLake without slipping."""
    config = laptop_scale()
    config.workdir = "runs/ragen"
    config.tokenizer.vocab_size = 320
    config.data.source = text_worlds(8_000, 24_000)
    config.env.world = ConfigDict({"name": "frozen_lake", "size": 4, "ice_frac": 0.8, "slippery": False})
    config.env.prompt = "plain"
    config.env.max_turns = 2
    config.env.max_actions_per_turn = 5
    config.env.turn_tokens = 14
    config.env.observation_tokens = 24
    config.env.context_tokens = 96
    config.warm_start.max_steps = 500
    config.warm_start.gate_family = "frozen_lake"
    return config


def laptop_bandit() -> ConfigDict:
    """StarPO-S without a critic on the bandit, with the published prompt."""
    config = laptop_scale()
    config.workdir = "runs/ragen_bandit"
    config.tokenizer.vocab_size = 512
    config.data.source = text_worlds(2_000, 2_000)
    config.env.world = ConfigDict({"name": "bandit"})
    config.env.prompt = "published"
    config.env.max_turns = 1
    config.env.max_actions_per_turn = 1
    config.env.turn_tokens = 8
    config.env.observation_tokens = 1
    config.env.context_tokens = 256
    config.warm_start.max_steps = 60
    config.warm_start.gate_family = "bandit"
    config.warm_start.batch_sequences = 16
    config.warm_start.batch.row_tokens = 512
    config.rl.steps = 20
    config.rl.batch.row_tokens = 512
    # The high arm pays in a quarter of the groups: their standard deviation is largest, and the mean alone is taken
    # off, so that a group in which it does not pay says little.
    config.rl.advantage = ConfigDict({"name": "group_mean", "drop_zero_signal": True, "multi_trajectory": "full"})
    return config


def laptop_scale() -> ConfigDict:
    """What both laptop presets have in common."""
    config = parts.laptop()
    config.model.embed_dim = 96
    config.model.num_heads = 3
    config.model.num_kv_heads = 1
    config.model.mlp_dim = 256
    config.data.num_eval = 96

    config.env = ConfigDict({"name": "ragen", "think": False, "format_penalty": 0.1, "pay": "episode"})
    config.env.episode_timeout_s = 60.0
    config.env.max_failed_steps = 3

    config.engine.slots = 128
    config.engine.pages = 320

    config.warm_start.curriculum = None
    config.warm_start.batch_sequences = 64
    config.warm_start.batch.row_tokens = 256
    config.warm_start.gate_every = 1_000  # never: most demonstrations fail on purpose

    config.rl.steps = 160
    config.rl.tasks_per_step = 24
    config.rl.group_size = 8
    config.rl.keep_groups_frac = 0.25
    config.rl.updates_per_step = 1
    config.rl.optimizer = parts.optimizer(4e-4, schedule="linear")
    config.eval.every = 0
    return config


def text_worlds(tasks: int, demonstrations: int) -> ConfigDict:
    """Seeds of the environment's world; three of four demonstrations are flawed."""
    return ConfigDict(
        {"name": "text_worlds", "num_tasks": tasks, "num_demonstrations": demonstrations, "flawed_frac": 0.75}
    )


def sokoban() -> ConfigDict:
    """The published run on SimpleSokoban (config/base.yaml, config/_2_sokoban.yaml), on one GPU."""
    config = qwen2_5_0_5b("sokoban")
    config.env.world = ConfigDict({"name": "sokoban", "rows": 6, "columns": 6, "boxes": 1})
    return config


def frozen_lake() -> ConfigDict:
    """The published run on slippery FrozenLake (config/_3_frozen_lake.yaml), on one GPU."""
    config = qwen2_5_0_5b("frozen_lake")
    config.env.world = ConfigDict({"name": "frozen_lake", "size": 4, "ice_frac": 0.8, "slippery": True})
    return config


def bandit() -> ConfigDict:
    """The published run on the bandit (config/_1_bandit.yaml), on one GPU."""
    config = qwen2_5_0_5b("bandit")
    config.env.world = ConfigDict({"name": "bandit"})
    config.env.max_turns = 1
    config.env.max_actions_per_turn = 1
    config.env.turn_tokens = 500
    return config


def qwen2_5_0_5b(world: str) -> ConfigDict:
    """What the published runs have in common: Qwen2.5-0.5B-Instruct and StarPO-S."""
    config = laptop_scale()
    config.workdir = f"runs/ragen_qwen2.5-0.5b_{world}"
    config.numerics = "fast"
    config.checkpoint.replay = "newest"

    # The shape of Qwen2.5-0.5B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.family = "qwen2"
    config.model.num_layers = 24
    config.model.embed_dim = 896
    config.model.num_heads = 14
    config.model.num_kv_heads = 2
    config.model.head_dim = 64
    config.model.mlp_dim = 4864
    config.model.rope_theta = 1_000_000.0
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.vocab_size = 151_936
    config.tokenizer.use_chat_template = True

    config.data.source = text_worlds(4_000, 0)
    config.data.num_eval = 256
    config.env.prompt = "published"
    config.env.think = True
    config.env.max_turns = 5
    config.env.max_actions_per_turn = 5
    config.env.turn_tokens = 400
    config.env.observation_tokens = 400
    config.env.context_tokens = 3600
    config.env.episode_timeout_s = 600.0

    config.engine.pages = 4096
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 300.0
    config.stages = ("rl",)

    critic = parts.critic()
    critic.update(warmup_updates=0, warmup_epochs=1)
    critic.optimizer = parts.optimizer(1e-5, warmup_steps=0, b2=0.999)
    published.apply(config, "starpo_s", critic)
    config.rl.rescore_every = 10
    config.rl.steps = 200
    config.rl.tasks_per_step = 8
    config.rl.group_size = 16
    config.rl.updates_per_step = 1  # a mini-batch of 32 attempts: all that the filter leaves
    config.rl.entropy_coefficient = 0.001
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=0, b2=0.999)
    config.rl.batch = parts.batch(row_tokens=4096, micro_rows=4, targets_multiple=256)
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval.every = 10
    config.checkpoint.every = 50
    return config
