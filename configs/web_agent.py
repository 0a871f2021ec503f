"""Web agents: buy the right thing in a web shop, through a real browser (WebShop's shape, arXiv 2207.01206).

    python -m jaxagent.main --config=configs/web_agent.py                # a small generated shop, a laptop
    python -m jaxagent.main --config=configs/web_agent.py:laptop+gspo    # any of algorithms/published.py
    python -m jaxagent.main --config=configs/web_agent.py:qwen2.5-1.5b --config.model.path=Qwen2.5-1.5B-Instruct
                                                                         # a large generated shop, 4 GPUs
    python -m jaxagent.main --config=configs/web_agent.py:webrl --config.model.path=Llama-3.1-8B-Instruct \
        --config.rl.group_reward.folder=webrl-orm-llama-3.1-8b           # WebRL's constants, 8 GPUs

All need playwright and a Chromium (docs/browser.md).

Laptop: a policy of about one million parameters, random at first, learns on two CPU cores to buy what it is told ("Buy
2 lamp Alto, red."): it searches for all that it was told, selects the options, and orders. Most demonstrations search
for any lamp and take the first result, and nearly half leave the options as they are; RL unlearns both. Held-out goals
want things that were never wanted in training, and each task has a shop of its own. Held-out goals met, greedy, on
seeds 0, 1 and 2: 0.16, 0.15 and 0.15 before RL, 0.97, 0.99 and 1.0 after it (docs/recipes/web_agent.md).

qwen2.5-1.5b: GRPO with the constants that verl-agent has for WebShop (examples/grpo_trainer/run_webshop.sh; GiGPO,
arXiv 2505.10978): 16 tasks x 8 attempts, at most 15 actions, 512 tokens each, lr 1e-6, two updates of 64 attempts, KL
0.01 in the loss, 150 steps, evaluation every 5 steps on 128 tasks. What differs: the shop is generated and seen
through Chromium, a conversation keeps all its pages where the published prompt has the last few, an order is right or
wrong where WebShop also scores a near miss, and an action that cannot be done costs a turn, not 0.1 of reward. Not run
by us: `--dry_run` says what it needs.

laptop+webrl and webrl: phases of five or twenty steps, the tasks of each begotten by those that the last one has failed
at, an objective that holds to the policy of the last phase, and replayed turns of past successes (docs/algorithms.md).
webrl has as its reward what a released model says of an episode, with the shop's own check beside it (`reward/solved`),
and laptop+webrl the check; a model of the laptop's own: docs/recipes/web_agent.md.
"""

from ml_collections import ConfigDict

from jaxagent.algorithms import published
from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {"laptop": laptop, "qwen2.5-1.5b": qwen2_5_1_5b, "webrl": webrl}
    return parts.chosen("configs/web_agent.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO in Chromium on a small shop; learns in minutes on two CPU cores."""
    config = parts.laptop()
    config.workdir = "runs/web_agent"
    config.tokenizer.vocab_size = 832  # every name, number and mark of a page's lines is one token

    config.data.source = ConfigDict({"name": "web_shop", "scale": "compact", "num_tasks": 2_400})
    config.data.source.num_demonstrations = 10_000
    config.data.source.num_curriculum = 4_000
    config.data.source.hasty_frac = 0.6
    config.data.source.careless_frac = 0.45
    config.data.num_eval = 96

    config.env = ConfigDict({"name": "browser", "instructions": ""})
    config.env.site = ConfigDict({"name": "shop"})
    config.env.max_turns = 9
    config.env.turn_tokens = 10
    config.env.observation_tokens = 64
    config.env.context_tokens = 384
    config.env.episode_timeout_s = 120.0
    config.env.max_failed_steps = 3
    config.env.concurrent_episodes = 24  # more open pages are no faster on two cores

    config.engine.slots = 96
    config.engine.pages = 640
    config.engine.request_timeout_s = 120.0

    config.warm_start.max_steps = 340  # RL goes on from there; the gate would take longer
    config.warm_start.curriculum = ConfigDict({"steps": 100, "sequences": 40})
    config.warm_start.batch_sequences = 32
    config.warm_start.batch.row_tokens = 384
    config.warm_start.gate_every = 1_000
    config.warm_start.gate_family = "maker"
    config.warm_start.gate_questions = 12

    config.rl.steps = 15
    config.rl.tasks_per_step = 12
    config.rl.group_size = 8
    config.rl.optimizer = parts.optimizer(4e-4, schedule="linear")
    config.rl.batch.row_tokens = 384
    config.eval = ConfigDict({"every": 0, "sampled": False})  # before and after
    return config


def qwen2_5_1_5b() -> ConfigDict:
    """GRPO as verl-agent has it for WebShop, on the large shop; the split over 4 GPUs and the engine are ours."""
    config = parts.laptop()
    config.workdir = "runs/web_agent_qwen2.5-1.5b"
    published_scale(config)
    config.model.family = "qwen2"
    config.model.num_layers = 28
    config.model.embed_dim = 1536
    config.model.num_heads = 12
    config.model.num_kv_heads = 2
    config.model.head_dim = 128
    config.model.mlp_dim = 8960
    config.model.rope_theta = 1_000_000.0
    config.tokenizer.vocab_size = 151_936

    config.rl.steps = 150
    config.rl.tasks_per_step = 16
    config.rl.group_size = 8
    config.rl.updates_per_step = 2
    config.rl.kl = ConfigDict({"coefficient": 0.01, "estimator": "k3", "where": "loss"})
    config.rl.advantage = parts.group_mean_std(drop_zero_signal=False)
    config.rl.objective.clip_high = 0.2
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=0, b2=0.999)
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval = ConfigDict({"every": 5, "sampled": True})
    return config


def webrl() -> ConfigDict:
    """WebRL as released (scripts/config/main): Llama 3.1 8B; what a phase is here, and the split, are ours."""
    config = parts.laptop()
    config.workdir = "runs/web_agent_webrl_llama-3.1-8b"
    published_scale(config)
    published.apply(config, "webrl", parts.critic())
    config.mesh.fsdp = 8
    config.model.family = "llama"
    config.model.num_layers = 32
    config.model.embed_dim = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.mlp_dim = 14_336
    config.model.rope_theta = 500_000.0
    config.model.tie_embeddings = False
    config.tokenizer.vocab_size = 128_256

    config.rl.steps = 200
    config.rl.tasks_per_step = 64
    config.rl.group_size = 1  # there is no group: a critic says what was to be expected
    config.rl.updates_per_step = 1
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=0, b2=0.999)
    config.rl.advantage.critic.optimizer = parts.optimizer(1e-6, warmup_steps=0, b2=0.999)
    config.rl.advantage.critic.update(warmup_updates=20, warmup_epochs=1)
    config.rl.phases.steps = config.rl.kl.refresh_every = 20
    config.rl.replay.capacity = 100_000
    config.rl.group_reward = ConfigDict({"name": "outcome_model", "folder": "webrl-orm-llama-3.1-8b", "tokens": 16_384})
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval = ConfigDict({"every": 20, "sampled": False})
    return config


def published_scale(config: ConfigDict) -> None:
    """What recipes for pretrained models on the large shop share; a model.path must agree with the model's shape."""
    config.mesh.fsdp = 4
    config.numerics = "fast"
    config.checkpoint.replay = "newest"
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.use_chat_template = True

    config.data.source = ConfigDict({"name": "web_shop", "scale": "full", "num_tasks": 6_000, "num_demonstrations": 0})
    config.data.source.num_curriculum = 0
    config.data.num_eval = 128

    config.env = ConfigDict({"name": "browser", "site": ConfigDict({"name": "shop"})})
    config.env.max_turns = 15
    config.env.turn_tokens = 512
    config.env.observation_tokens = 1024
    config.env.context_tokens = 16_384
    config.env.episode_timeout_s = 1800.0
    config.env.max_failed_steps = 3

    config.engine.slots = 128
    config.engine.pages = 8_192
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 600.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.batch = parts.batch(row_tokens=16_384, micro_rows=4, targets_multiple=256)
    config.checkpoint.every = 20
