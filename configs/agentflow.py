"""AgentFlow: a planner is trained, an executor, a verifier and tools are not (Li et al., arXiv 2510.05592).

    python -m jaxagent.main --config=configs/agentflow.py                         # scripted roles, a laptop
    python -m jaxagent.main --config=configs/agentflow.py:laptop-engines          # two roles are frozen weights
    python -m jaxagent.main --config=configs/agentflow.py:laptop+flow_grpo        # any of algorithms/published.py
    python -m jaxagent.main --config=configs/agentflow.py:slime_agentic \
        --config.model.path=Qwen2.5-7B-Instruct --config.data.source=data/dapo_math_17k   # 8 GPUs of 80 GB
    python -m jaxagent.main --config=configs/agentflow.py:flow_grpo \
        --config.model.path=Qwen2.5-7B-Instruct --config.data.source=data/agentflow       # 8 GPUs of 80 GB

Laptop: a planner of about one million parameters, random at first, learns on two CPU cores which tool to send a word
problem to. Its demonstrations of problems of two steps mostly send them to a generator that only estimates; RL unlearns
that in favour of Python, or of one step after the other.

laptop-engines: the same, but executor and verifier are played by the weights that RL begins with, frozen, on an engine
of their own beside the planner's.

slime_agentic: the constants of LMIS-ORG's slime-agentic (8 problems x 8, every call of the planner trained with the
whole advantage of its trajectory). flow_grpo: those of AgentFlow's own code (32 x 8, only the next steps trained,
statistics over the turns of a group). Executor, verifier, generator and coder are the model that RL begins with,
frozen, on the same mesh. Not run by us: `--dry_run` says what they need. What deviates from the published codes:

- The published top_p is .95 (slime-agentic); here it is 1, because the trainer scores the whole vocabulary. The
  temperature is the published one.
- slime-agentic trains on 4 GPUs and has further ones for the frozen roles; here all share one mesh of 8. On 4 of 80 GB
  weights, optimiser, reference, two engines' weights and caches alone take 76 GB of each.
- Updates per step are fixed: published are as many as a batch's turns fill, and what is left over is dropped.
- flow_grpo has no Google and no Wikipedia search. Its published roles are gpt-4o-mini, and gpt-4o judges every answer;
  here they are the frozen model, and the judge is asked only where the answer does not equal the gold one. An endpoint
  instead: `--config.roles.judge=http --config.roles.judge.url=... --config.roles.judge.model=gpt-4o`.
- A next step with a prompt over 18,432 tokens is not trained (flow_grpo), and does not count in the group's
  statistics, where the published code drops it after them.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+flow_grpo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {
        "laptop": laptop,
        "laptop-engines": laptop_engines,
        "slime_agentic": slime_agentic,
        "flow_grpo": flow_grpo,
    }
    return parts.chosen("configs/agentflow.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO on generated word problems, with scripted roles."""
    config = parts.laptop()
    config.workdir = "runs/agentflow"
    config.tokenizer.vocab_size = 2560  # every number of three digits is one token

    config.data.source = ConfigDict({"name": "arithmetic_plans", "num_tasks": 6_000, "num_demonstrations": 9_000})
    config.data.source.estimate_frac = 0.8
    config.data.source.role_rows = False
    config.data.num_eval = 96

    config.env = ConfigDict({"name": "agentflow", "style": "compact", "answer": "boxed"})
    config.env.max_turns = 3
    config.env.turn_tokens = 24
    config.env.observation_tokens = 24  # nothing follows a reply
    config.env.context_tokens = 128
    config.env.episode_timeout_s = 120.0
    config.env.max_failed_steps = 3
    config.env.trained = "all"
    config.env.planner_role = False
    config.env.unknown_tool = "generator"
    config.env.coder = False
    config.env.judge = False
    config.env.token_budget = 16_384
    config.env.prompt_tokens = 0
    config.env.result_chars = 40
    config.env.plan_chars = 160
    config.env.step_chars = 80
    config.env.run_timeout_s = 15.0  # takes milliseconds, unless the machine is very busy
    config.env.output_chars = 40
    config.env.traceback = "message"
    config.env.sandbox = parts.sandbox()
    config.env.sandbox.memory_mb = 128  # 64 attempts run at once
    config.roles = ConfigDict({name: {"name": f"arithmetic_{name}"} for name in ("executor", "verifier", "generator")})

    config.engine.slots = 64
    config.engine.pages = 320
    config.engine.request_timeout_s = 120.0

    config.warm_start.max_steps = 1_000
    config.warm_start.curriculum = None
    config.warm_start.batch_sequences = 48
    config.warm_start.batch.row_tokens = 192
    config.warm_start.gate_family = "one_step"
    config.warm_start.gate_questions = 12
    config.warm_start.gate_every = 100
    config.warm_start.gate_accuracy = 0.95

    config.rl.steps = 30
    config.rl.tasks_per_step = 12
    config.rl.group_size = 8
    config.rl.optimizer = parts.optimizer(4e-4, schedule="linear")
    config.rl.batch.row_tokens = 192
    config.eval.every = 0
    config.checkpoint.every = 10
    return config


def laptop_engines() -> ConfigDict:
    """The laptop's, with executor and verifier played by the weights that RL begins with."""
    config = laptop()
    config.workdir = "runs/agentflow_engines"
    config.data.source.role_rows = True
    config.warm_start.max_steps = 1_800  # two fifths of the demonstrations are the roles'
    for name in ("executor", "verifier"):
        config.roles[name] = ConfigDict({"name": "engine", "path": "", "context_tokens": 128, "reply_tokens": 24})
        config.roles[name].sampling = ConfigDict({"temperature": 0.0})
    return config


def slime_agentic() -> ConfigDict:
    """LMIS-ORG/slime-agentic: agentflow_qwen25_7b_rl.sh; on 8 GPUs, since the frozen roles live on the same ones."""
    config = qwen2_5_7b()
    config.workdir = "runs/agentflow_slime_agentic"
    config.data.source = ConfigDict({"name": "files", "path": "data/dapo_math_17k"})
    config.data.num_eval = 30  # AIME 2024, as --config.data.eval_source

    config.env.max_turns = 5
    config.env.turn_tokens = 4_096
    config.env.context_tokens = 20_480
    config.env.judge = True
    config.roles.judge = ConfigDict(config.roles.generator)
    for role in config.roles.values():
        role.reply_tokens = 4_096

    config.rl.steps = 2_174  # one epoch of 17,398 problems
    config.rl.tasks_per_step = 8
    config.rl.group_size = 8
    config.rl.updates_per_step = 4  # published: a global batch of 64 turns; an attempt has three to seven
    config.rl.advantage = parts.group_mean_std(drop_zero_signal=False)
    config.rl.objective = ConfigDict({"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3})
    config.rl.aggregation = ConfigDict({"name": "sequence_mean"})  # every turn is a sample, and counts the same
    config.rl.optimizer = parts.optimizer(1e-6, weight_decay=0.1, warmup_steps=0)
    config.eval.every = 20
    return config


def flow_grpo() -> ConfigDict:
    """AgentFlow's own code, lupantech/AgentFlow: train/config.yaml, on 8 GPUs."""
    config = qwen2_5_7b()
    config.workdir = "runs/agentflow_flow_grpo"
    config.data.source = ConfigDict({"name": "files", "path": "data/agentflow"})  # NQ and DeepMath, mixed
    config.data.num_eval = 30

    config.env.answer = "tags"
    config.env.max_turns = 3
    config.env.turn_tokens = 2_048
    config.env.context_tokens = 20_480
    config.env.episode_timeout_s = 500.0
    config.env.trained = "steps"
    config.env.planner_role = True
    config.env.unknown_tool = "nothing"
    config.env.judge = True
    config.env.token_budget = 0
    config.env.prompt_tokens = 18_432
    config.roles.planner = ConfigDict(config.roles.generator)
    config.roles.judge = ConfigDict(config.roles.generator)

    config.rl.steps = 5_000  # five epochs; the published mixture's size is the data's
    config.rl.tasks_per_step = 32
    config.rl.group_size = 8
    config.rl.updates_per_step = 8  # published: mini-batches of 64 turns; 256 attempts have one to three each
    config.rl.advantage = parts.group_mean_std(drop_zero_signal=False)
    config.rl.advantage.multi_trajectory = "statistics"
    config.rl.objective = ConfigDict({"name": "dual_clip", "clip_low": 0.2, "clip_high": 0.3, "clip_dual": 3.0})
    config.rl.aggregation = ConfigDict({"name": "token_mean"})
    config.rl.optimizer = parts.optimizer(1e-6, b2=0.999, warmup_steps=0)
    config.eval.every = 2
    return config


def qwen2_5_7b() -> ConfigDict:
    """What both published presets share: Qwen2.5-7B-Instruct in all roles, KL 0.001 in the loss, temperature 0.7."""
    config = laptop()
    config.mesh.fsdp = 4
    config.mesh.tensor = 2  # every device has a half of the engines' weights, the policy's and the frozen roles'
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
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.vocab_size = 152_064
    config.tokenizer.use_chat_template = True

    config.env.style = "full"
    config.env.coder = True
    config.env.episode_timeout_s = 1800.0
    config.env.result_chars = 4_096
    # What roles are shown of the policy's own words: five steps of them leave room for a reply in 20,480 tokens.
    config.env.plan_chars = 4_096
    config.env.step_chars = 2_048
    config.env.run_timeout_s = 30.0
    config.env.output_chars = 4_000
    config.env.traceback = "whole"
    config.env.sandbox.warm = 64
    config.env.sandbox.memory_mb = 1024
    config.env.sandbox.disk_mb = 64
    frozen = {"name": "engine", "path": "", "context_tokens": 20_480, "reply_tokens": 2_048, "timeout_s": 300.0}
    for name in ("executor", "verifier", "generator", "coder"):
        config.roles[name] = ConfigDict(frozen)
        config.roles[name].sampling = ConfigDict({"temperature": 0.7})

    config.engine.slots = 64
    config.engine.pages = 8_192
    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 600.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.sampling.temperature = 0.7
    config.rl.kl = ConfigDict({"coefficient": 0.001, "estimator": "k3", "where": "loss"})
    config.rl.batch.row_tokens = 20_480
    config.rl.batch.micro_rows = 4
    config.rl.batch.targets_multiple = 1024
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval.sampled = False
    config.checkpoint.every = 50
    return config
