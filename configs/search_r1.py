"""Search-R1: an agent that searches, reads, searches again, and answers (Jin et al., arXiv 2503.09516).

    python -m jaxagent.main --config=configs/search_r1.py                  # GRPO, the laptop default
    python -m jaxagent.main --config=configs/search_r1.py:laptop-ppo       # PPO with a critic
    python -m jaxagent.main --config=configs/search_r1.py:laptop-echo      # GRPO + prediction of observations
    python -m jaxagent.main --config=configs/search_r1.py:laptop-lora      # GRPO on low-rank adapters
    python -m jaxagent.main --config=configs/search_r1.py:laptop-dpo       # preferences among its own attempts
    python -m jaxagent.main --config=configs/search_r1.py:laptop-rft       # imitation of its own successes
    python -m jaxagent.main --config=configs/search_r1.py:laptop-opd       # a smaller student of a finished laptop run
    python -m jaxagent.main --config=configs/search_r1.py:laptop-moe       # a mixture of experts, 2 of 8 active
    python -m jaxagent.main --config=configs/search_r1.py:laptop-hybrid    # three gated delta nets to one attention
    python -m jaxagent.main --config=configs/search_r1.py:laptop+gspo      # any of algorithms/published.py
    python -m jaxagent.main --config=configs/search_r1.py:smollm2          # a real pretrained model (see below)
    python -m jaxagent.main --config=configs/search_r1.py:qwen2.5-3b \
        --config.model.path=Qwen2.5-3B --config.data.source=data/nq_hotpotqa   # the published recipe, 4 GPUs

Laptop presets: a policy of about one million parameters, random at first, learns on two CPU cores to answer real
questions about the world's countries and cities with a search engine over short passages. Held-out questions are about
countries and cities of which training never states a fact. About nine minutes; held-out exact match goes from about
0.5 (it searches once and stops) to about 0.9 (it searches again); laptop-moe 0.79 to 0.95, laptop-hybrid 0.90 to 0.96.

smollm2: SmolLM2-135M-Instruct in its own chat template, on two CPU cores and 8 GB of memory, in at most 40 minutes. The
model first (once): `python -m data_pipelines.smollm2 --out=runs/smollm2`. What it reaches: docs/recipes.md.

qwen2.5-3b: the published hyper-parameters (GRPO, 512 questions x 5, learning rate 1e-6, KL 0.001 in the loss), on 4
GPUs of 80 GB. Make the data with `python -m data_pipelines.nq_hotpotqa`, serve a retriever at env.retriever.url. Not
run by us: `--dry_run` says what it needs.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {
        "laptop": laptop,
        "laptop-ppo": laptop_ppo,
        "laptop-echo": laptop_echo,
        "laptop-lora": laptop_lora,
        "laptop-dpo": laptop_dpo,
        "laptop-rft": laptop_rft,
        "laptop-opd": laptop_opd,
        "laptop-moe": laptop_moe,
        "laptop-hybrid": laptop_hybrid,
        "smollm2": smollm2,
        "qwen2.5-3b": qwen2_5_3b,
    }
    return parts.chosen("configs/search_r1.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO on the geography world; learns in minutes on two CPU cores."""
    config = parts.laptop()
    config.workdir = "runs/search_r1"

    config.data.source = ConfigDict({"name": "geography", "num_cities": 600})
    config.data.source.num_curriculum = 8_000
    config.data.source.num_demonstrations = 24_000
    config.data.source.early_answer_frac = 0.8

    config.env = ConfigDict({"name": "search", "prompt": "plain"})
    config.env.max_turns = 3
    config.env.final_turn = False
    config.env.turn_tokens = 12
    config.env.observation_tokens = 110
    config.env.context_tokens = 256
    config.env.episode_timeout_s = 60.0
    config.env.max_failed_steps = 3
    config.env.reward = ConfigDict({"name": "em", "min_answers": 1})
    config.env.retriever = ConfigDict({"name": "bm25", "corpus": "", "topk": 3})
    return config


def laptop_ppo() -> ConfigDict:
    """PPO: a critic of the policy's size, trained first, GAE over action tokens."""
    config = laptop()
    config.workdir = "runs/search_r1_ppo"
    config.rl.steps = 50  # a step trains twice the model, and on every episode
    config.rl.advantage = parts.gae()
    config.rl.whiten_advantages = True
    return config


def laptop_echo() -> ConfigDict:
    """ECHO: GRPO plus cross-entropy on what the search engine returned, from the same forward pass."""
    config = laptop()
    config.workdir = "runs/search_r1_echo"
    # Per trajectory 32 tokens: two trajectories still share a row, and a step costs little more.
    config.rl.echo = ConfigDict({"coefficient": 0.05, "max_tokens": 32})
    return config


def laptop_lora() -> ConfigDict:
    """GRPO on low-rank adapters: the warm start trains all weights, RL leaves them as they are then."""
    config = laptop()
    config.workdir = "runs/search_r1_lora"
    config.model.lora = ConfigDict({"rank": 16, "alpha": 32.0, "rank_stabilised": False, "targets": "all-linear"})
    config.rl.optimizer.learning_rate = 2e-3  # ten times that of all weights
    return config


def laptop_dpo() -> ConfigDict:
    """DPO on pairs of the warm-started policy's own attempts; no reinforcement learning."""
    config = laptop()
    config.workdir = "runs/search_r1_dpo"
    config.stages = ("warm_start", "sample", "dpo")
    return config


def laptop_rft() -> ConfigDict:
    """Rejection-sampling fine-tuning on the warm-started policy's own successes; no reinforcement learning."""
    config = laptop()
    config.workdir = "runs/search_r1_rft"
    config.stages = ("warm_start", "sample", "rft")
    return config


def laptop_opd() -> ConfigDict:
    """On-policy distillation: a student of 60 % of the laptop's parameters learns from a finished laptop run.

    Its own warm start, then the teacher's judgement of what it samples; no reward is trained. The teacher is the policy
    that `--config=configs/search_r1.py` exported, and the tokenizer is the teacher's. RL alone, for comparison:
    `--config.stages=warm_start,rl`.
    """
    config = laptop()
    config.workdir = "runs/search_r1_opd"
    config.stages = ("warm_start", "opd")
    config.model.embed_dim = 96
    config.model.num_heads = 3
    config.model.num_kv_heads = 1
    config.model.mlp_dim = 256
    config.eval.every = 8
    # Over the whole vocabulary, in contexts that the student samples.
    config.opd.distill = ConfigDict({"teacher": "runs/search_r1/policy", "loss": {"name": "reverse_kl"}})
    config.tokenizer.path = "runs/search_r1/policy"
    return config


def laptop_moe() -> ConfigDict:
    """GRPO of a mixture of experts: of 8 experts a token goes to 2, which together are as wide as the dense MLP."""
    config = laptop()
    config.workdir = "runs/search_r1_moe"
    config.model.family = "qwen3_moe"
    config.model.settings = '{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}'
    return config


def laptop_hybrid() -> ConfigDict:
    """GRPO of a hybrid as large as the dense policy: three layers of gated delta nets, then one of gated attention."""
    config = laptop()
    config.workdir = "runs/search_r1_hybrid"
    config.model.family = "qwen3_5_text"
    config.model.num_layers = 4
    config.model.mlp_dim = 176
    return config


def smollm2() -> ConfigDict:
    """GRPO on a real pretrained model, SmolLM2-135M-Instruct, in its own chat template, on two CPU cores.

    The laptop's world with two passages per search, which stand in user messages. The warm start is short and its
    demonstrations of two hops mostly answer after the first search; RL unlearns that.
    """
    config = laptop()
    config.workdir = "runs/search_r1_smollm2"
    smollm2_scale(config)
    config.data.source.num_curriculum = 0
    config.env.prompt = "chat"
    config.env.max_turns = 3
    config.env.turn_tokens = 24
    config.env.observation_tokens = 96
    config.env.context_tokens = 320
    config.env.retriever.topk = 2
    config.engine.pages = 208
    config.warm_start.gate_family = "one_hop"
    config.warm_start.gate_questions = 2  # of each of five relations
    config.warm_start.batch.row_tokens = 320
    return config


def smollm2_scale(config: ConfigDict) -> None:
    """What training SmolLM2-135M-Instruct on a laptop needs, whatever it learns."""
    config.numerics = "fast"  # the log-prob gap is reported
    config.model.path = "runs/smollm2"  # python -m data_pipelines.smollm2 --out=runs/smollm2
    config.model.family = ""  # the folder says the shape
    config.model.num_layers = 0
    config.model.embed_dim = 0
    config.model.num_heads = 0
    config.model.num_kv_heads = 0
    config.model.head_dim = 0
    config.model.mlp_dim = 0
    config.model.remat = "dots"  # matrix products are kept; 30 layers written out would take minutes to compile
    config.model.logprob_chunk_tokens = 128  # of 49,152 logits each
    config.tokenizer.use_chat_template = True
    config.data.source.num_demonstrations = 1_000
    config.data.num_eval = 96
    config.env.episode_timeout_s = 900.0  # seconds on an idle machine; a crowded one must not look like failure
    config.engine.slots = 64
    config.engine.pages = 160  # 2.9 MB each; an episode is two or three, a group's prompt once
    config.engine.prefill_tokens = 1024
    config.engine.request_timeout_s = 600.0

    config.warm_start.max_steps = 20
    config.warm_start.curriculum = None
    config.warm_start.batch_sequences = 8
    config.warm_start.optimizer = parts.rate(2e-4)
    config.warm_start.batch.update(row_tokens=288, micro_rows=2)
    config.warm_start.gate_every = 40  # never: a bundle here would lie in memory beside what RL begins with

    config.rl.steps = 14
    config.rl.tasks_per_step = 8
    config.rl.group_size = 8
    config.rl.updates_per_step = 1
    config.rl.optimizer = parts.optimizer(2e-5, schedule="linear", warmup_steps=2)
    # A row holds the eight attempts of a group as a tree: their prompt, and what else they begin with alike, once.
    config.rl.batch.update(row_tokens=640, micro_rows=1, share_prefix=True)
    config.eval.every = 0  # before and after
    # A bundle on its way to the disk would hold 1.6 GB beside what an update needs; a signal still saves.
    config.checkpoint = ConfigDict({"every": 0, "keep": 1, "replay": "newest"})


def qwen2_5_3b() -> ConfigDict:
    """The published GRPO recipe of Search-R1 on Qwen2.5-3B (scripts nq_hotpotqa/v0.2), on 4 GPUs."""
    config = laptop()
    config.workdir = "runs/search_r1_qwen2.5-3b"
    config.mesh.fsdp = 4
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

    config.data.source = ConfigDict({"name": "files", "path": "data/nq_hotpotqa"})
    config.data.num_eval = 500
    config.env.prompt = "search_r1"
    config.env.max_turns = 4
    config.env.final_turn = True
    config.env.turn_tokens = 500
    config.env.observation_tokens = 500
    config.env.context_tokens = 8192
    config.env.episode_timeout_s = 600.0
    config.env.reward.min_answers = 2
    config.env.retriever = ConfigDict({"name": "http", "url": "http://127.0.0.1:8000/retrieve", "topk": 3})
    config.env.retriever.timeout_s = 60.0
    config.env.retriever.retries = 2

    config.engine.slots = 512
    config.engine.pages = 8192
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 300.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.steps = 1_005
    config.rl.tasks_per_step = 512
    config.rl.group_size = 5
    config.rl.updates_per_step = 10  # mini-batches of 256 attempts: published, the size counts rows (rollout.n is 1)
    config.rl.objective.clip_high = 0.2
    config.rl.advantage.drop_zero_signal = False
    config.rl.entropy_coefficient = 0.001
    # Warm-up over 0.285 of the steps, in updates; betas of the published trainer.
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=2_864, b2=0.999)
    config.rl.batch.row_tokens = 8192
    config.rl.batch.micro_rows = 4
    config.rl.batch.targets_multiple = 256
    config.rl.kl = ConfigDict({"coefficient": 0.001, "estimator": "k3", "where": "loss"})
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval.every = 50
    config.checkpoint.every = 50
    return config
