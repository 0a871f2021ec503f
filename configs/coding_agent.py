"""Coding agents that are programs of their own: the policy is an endpoint to them (slime's coding_agent_rl).

    python -m jaxagent.main --config=configs/coding_agent.py                       # the laptop default
    python -m jaxagent.main --config=configs/coding_agent.py:laptop+gspo           # any of algorithms/published.py
    python -m jaxagent.main --config=configs/coding_agent.py:builtin               # the same tasks without a program
    python -m jaxagent.main --config=configs/coding_agent.py:qwen3.6-35b-a3b \
        --config.model.path=Qwen3.6-35B-A3B --config.data.source=data/swe          # the published recipe

Laptop: a policy of about one million parameters, random at first, is what an agent program talks to. Every episode
starts that program, `jaxagent/agents/shell_agent.py`, inside a sandbox of its own, in a small Python repository with
one mistake ("In oak.py cedar(x) must give x - 37."). It reaches nothing but the gateway, over Chat Completions, and a
fresh sandbox judges what it changed. Most demonstrations mend without having looked at the code, which is right in a
quarter of the tasks; RL unlearns that. Held-out tasks are other issues than those of training. builtin: the policy
writes the same commands itself, in the ordinary rollout; the gain is the same. Held-out tasks resolved, greedy: from
0.25 to 1.00, with a log-prob gap of 0.0. 17 minutes beside several other runs (13 of them RL), builtin 9.

qwen3.6-35b-a3b: the published hyper-parameters (8 prompts x 8, learning rate 1e-6, no KL, clip 0.2 / 0.28) and model,
with Claude Code. qwen3-30b-a3b: a mixture without gated delta nets. claude_code, codex: Qwen3-32B, a dense model of
that size, with these programs. Not run by us; on 64 GPUs of 80 GB (qwen3-30b-a3b: 32), over eight of which the 96k
tokens of a row are split (docs/scaling_out.md, "Long sequences"). What dry runs say of them:
docs/recipes/coding_agent.md.
"""

import json

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+gspo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    presets = {
        "laptop": laptop,
        "builtin": builtin,
        "claude_code": claude_code,
        "codex": codex,
        "qwen3.6-35b-a3b": qwen3_6_35b_a3b,
        "qwen3-30b-a3b": qwen3_30b_a3b,
    }
    return parts.chosen("configs/coding_agent.py", preset, presets)


def laptop() -> ConfigDict:
    """GRPO: our shell agent in real sandboxes, through the gateway; learns in minutes on two CPU cores."""
    config = parts.laptop()
    config.workdir = "runs/coding_agent"
    config.tokenizer.vocab_size = 1280  # every name and number of the tasks is one token

    config.data.source = ConfigDict({"name": "fixes", "num_tasks": 4_000, "num_demonstrations": 12_000})
    config.data.source.guess_frac = 0.7
    config.data.num_eval = 96

    config.env = ConfigDict({"name": "coding", "play": "agent", "tools": "plain", "instruction": "{statement}"})
    config.env.agent = shell_agent()
    config.env.max_turns = 5
    config.env.turn_tokens = 36
    config.env.observation_tokens = 48
    config.env.context_tokens = 160
    config.env.init_s = 120.0  # takes a tenth of a second, unless the machine is very busy
    config.env.run_s = 120.0
    config.env.verify_s = 60.0
    config.env.episode_timeout_s = 600.0
    config.env.max_failed_steps = 3
    config.env.verify_empty = False
    config.env.sandbox = parts.sandbox()

    config.engine.slots = 64
    config.engine.pages = 320
    config.engine.request_timeout_s = 120.0

    config.warm_start.max_steps = 400  # to the end of its schedule: the habit of looking must be there, if rare
    config.warm_start.curriculum = None
    config.warm_start.batch_sequences = 48
    config.warm_start.batch.row_tokens = 192
    config.warm_start.gate_every = 400
    config.warm_start.gate_family = "flip"
    config.warm_start.gate_accuracy = 0.9
    config.warm_start.gate_questions = 12

    config.rl.steps = 25
    config.rl.tasks_per_step = 8
    config.rl.group_size = 8
    config.rl.batch.row_tokens = 192
    config.eval.every = 0  # before and after
    return config


def shell_agent() -> ConfigDict:
    """Our minimal agent program, in the words of the built-in dialogue (`envs/terminal/dialogue.py`, plain)."""
    agent = ConfigDict({"name": "shell", "system": "", "task": "{instruction}\n", "max_turns": 5})
    agent.shown = "<out>{output}</out>\n"
    agent.failed = "<out>{output}\n(exit_code={code})</out>\n"
    agent.late = "<out>{output}\n(timed out)</out>\n"
    agent.no_command = "<out>no command</out>\n"
    agent.command_timeout_s = 10.0
    agent.output_chars = 1_000
    return agent


def builtin() -> ConfigDict:
    """The same tasks, sandboxes and judgement, but the policy's own turns instead of an agent program's requests."""
    config = laptop()
    config.workdir = "runs/coding_agent_builtin"
    config.env.play = "built_in"
    del config.env.agent
    config.env.command_timeout_s = 10.0
    config.env.output_chars = 1_000
    return config


def claude_code() -> ConfigDict:
    """The published recipe with Claude Code as the agent program."""
    config = published()
    config.workdir = "runs/coding_agent_claude_code"
    config.env.agent = ConfigDict({"name": "claude_code"})
    return config


def codex() -> ConfigDict:
    """The published recipe with Codex as the agent program."""
    config = published()
    config.workdir = "runs/coding_agent_codex"
    config.env.agent = ConfigDict({"name": "codex"})
    return config


def qwen3_6_35b_a3b() -> ConfigDict:
    """The published recipe with Claude Code and the published model, whose text part is as large as Qwen3.5-35B-A3B."""
    config = claude_code()
    config.workdir = "runs/coding_agent_qwen3.6-35b-a3b"
    qwen3_5(config)
    config.mesh.update(context=8, expert=4, tensor=2)
    config.rl.batch.micro_rows = 4
    config.model.family = "qwen3_5_moe_text"
    config.model.num_layers = 40
    config.model.embed_dim = 2048
    config.model.num_heads = 16
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 512
    experts = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    more = experts | {"shared_expert_intermediate_size": 512}
    config.model.settings = json.dumps(json.loads(config.model.settings) | more)
    return config


def qwen3_5(config: ConfigDict) -> None:
    """What all models of Qwen3.5 and 3.6 have in common, as their config.json says it."""
    config.model.head_dim = 256
    config.model.rope_theta = 10_000_000.0
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "partial_rotary_factor": 0.25}
    config.model.settings = json.dumps(heads | dims | {"full_attention_interval": 4})
    config.model.logprob_chunk_tokens = 1024  # of a quarter of a million logits each
    config.tokenizer.vocab_size = 248_320


def qwen3_30b_a3b() -> ConfigDict:
    """The published recipe with Claude Code and a smaller mixture of experts, on 32 GPUs."""
    config = claude_code()
    config.workdir = "runs/coding_agent_qwen3-30b-a3b"
    config.mesh.update(fsdp=1, context=8, tensor=4)
    config.model.family = "qwen3_moe"
    config.model.num_layers = 48
    config.model.embed_dim = 2048
    config.model.num_heads = 32
    config.model.num_kv_heads = 4
    config.model.head_dim = 128
    config.model.mlp_dim = 6144
    config.model.settings = json.dumps({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
    return config


def published() -> ConfigDict:
    """slime's coding_agent_rl: 8 prompts x 8 samples in 96k tokens of context; the split over 64 GPUs is ours.

    The shape is that of Qwen3-32B, a dense model as large as the published one.
    """
    config = laptop()
    del config.env.agent
    config.mesh.context = 8  # as published: eight devices share a row
    config.mesh.tensor = 8
    # The shape of Qwen3-32B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.num_layers = 64
    config.model.embed_dim = 5120
    config.model.num_heads = 64
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.mlp_dim = 25_600
    config.model.tie_embeddings = False
    agent_scale(config)

    config.env.context_tokens = 96 * 1024
    config.env.turn_tokens = 32_768
    config.env.run_s = 1800.0
    config.env.verify_s = 600.0
    config.env.episode_timeout_s = 3_600.0
    config.env.verify_empty = True  # an empty change is tested like any other

    config.engine.slots = 64
    config.engine.pages = 49_152  # 32 whole sessions; those that wait for their programs give theirs up
    config.rl.tasks_per_step = 8
    config.rl.group_size = 8
    config.rl.batch.row_tokens = 96 * 1024
    config.rl.batch.micro_rows = 1
    return config


def agent_scale(config: ConfigDict) -> None:
    """What the large presets of both coding recipes have in common: long sessions of real agent programs."""
    config.numerics = "fast"
    config.checkpoint.replay = "newest"
    config.model.rope_theta = 1_000_000.0
    config.model.embed_init_std = 0.02
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "layer"
    config.model.logprob_chunk_tokens = 4096
    config.tokenizer.vocab_size = 151_936
    config.tokenizer.use_chat_template = True

    config.data.source = ConfigDict({"name": "files", "path": "data/swe"})
    config.data.num_eval = 64
    del config.env.instruction  # the environment's own: read PROBLEM_STATEMENT.md
    config.env.max_turns = 200  # requests of a session
    config.env.init_s = 600.0
    config.env.sandbox.update(warm=16, memory_mb=8192, disk_mb=8192, files=500_000, processes=512, cpus=2.0)

    config.engine.steps_per_dispatch = config.engine.prefill_tokens = config.engine.tile_rows = 0  # by platform
    config.engine.kv_on_update = "keep"
    config.engine.cache_dtype = "bfloat16"
    config.engine.request_timeout_s = 1800.0
    config.stages = ("rl",)

    config.rl.rescore_every = 10
    config.rl.steps = 100
    config.rl.updates_per_step = 1
    config.rl.advantage.drop_zero_signal = False
    config.rl.aggregation = ConfigDict({"name": "rollout_mean"})
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=0, b2=0.98, weight_decay=0.1)
    config.rl.batch.targets_multiple = 1024
    config.update(parts.offline_stages(1e-6))
    config.opd.learning_rate = 1e-6
    config.eval.every = 50
    config.checkpoint.every = 20
