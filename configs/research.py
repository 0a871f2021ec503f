r"""ReSearch: an agent that reasons with a search engine, from the reward alone (Chen et al., arXiv 2503.19470).

    python -m jaxagent.main --config=configs/research.py                    # the geography world, a laptop
    python -m jaxagent.main --config=configs/research.py:laptop+dapo        # any of algorithms/published.py
    python -m jaxagent.main --config=configs/research.py:qwen2.5-7b \
        --config.model.path=Qwen2.5-7B-Instruct --config.data.source=data/musique   # the published recipe, 8 GPUs

Search-R1's environment with ReSearch's tags, prompts and reward: results stand between <result> and </result>, the
answer in \boxed{} between <answer> and </answer>, and the policy itself ends its message. The reward is the F1 of the
answer, 0.1 for a wrong answer in the right format, else 0.

Laptop: configs/search_r1.py's policy, world and warm start, in this protocol. Held-out exact match goes from 0.45 to
about 0.91, because the policy searches again where its demonstrations mostly answer after the first search. About six
minutes.

qwen2.5-7b: GRPO on MuSiQue's training questions, 256 x 5, one update per rollout, learning rate 1e-6, KL 0.001 in the
loss, 5 passages per search. MuSiQue in FlashRAG's layout (id, question, golden_answers) is read as it is. Published
runs may search as often as 8192 tokens allow; here env.max_turns says how often. Not run by us: `--dry_run` says what
it needs. A base model takes `--config.env.prompt=research --config.tokenizer.use_chat_template=false`.
"""

from ml_collections import ConfigDict

from jaxagent.configs import _parts as parts
from jaxagent.configs import search_r1


def get_config(preset: str = "laptop") -> ConfigDict:
    """Returns the config of a preset, "laptop", or of a preset with a published algorithm, "laptop+dapo".

    Raises:
      ConfigError: unknown preset or algorithm.
    """
    return parts.chosen("configs/research.py", preset, {"laptop": laptop, "qwen2.5-7b": qwen2_5_7b})


def laptop() -> ConfigDict:
    """GRPO on the geography world, in ReSearch's protocol."""
    config = search_r1.laptop()
    config.workdir = "runs/research"
    config.env.protocol = "research"
    config.env.turn_tokens = 20  # more tags than Search-R1's
    config.env.context_tokens = 320
    config.env.reward = ConfigDict({"name": "research", "wrong_score": 0.1})
    config.warm_start.batch.row_tokens = 320
    config.rl.steps = 50
    config.rl.batch.row_tokens = 320
    return config


def qwen2_5_7b() -> ConfigDict:
    """The published run on Qwen2.5-7B-Instruct (scripts/train/train_multi_node.sh), on 8 GPUs; published: 64."""
    config = search_r1.qwen2_5_3b()
    config.workdir = "runs/research_qwen2.5-7b"
    config.mesh.fsdp = 8

    # The shape of Qwen2.5-7B, so that --dry_run needs no checkpoint; a model.path must agree with it.
    config.model.num_layers = 28
    config.model.embed_dim = 3584
    config.model.num_heads = 28
    config.model.num_kv_heads = 4
    config.model.mlp_dim = 18_944
    config.model.tie_embeddings = False
    config.tokenizer.vocab_size = 152_064

    config.data.source = ConfigDict({"name": "files", "path": "data/musique"})
    config.data.num_eval = 100
    config.env.protocol = "research"
    config.env.prompt = "research_chat"
    config.env.max_turns = 10
    config.env.final_turn = False
    config.env.turn_tokens = 8192
    config.env.observation_tokens = 2048  # published: not cut
    config.env.context_tokens = 8704  # a prompt of 512 tokens, and 8192 with all results
    config.env.reward = ConfigDict({"name": "research", "wrong_score": 0.1})
    config.env.retriever.topk = 5

    config.engine.slots = 256
    config.engine.pages = 17_408  # of 3.7 MB; 128 whole sequences

    config.rl.steps = 155  # 2 epochs of MuSiQue's 19,938 questions in batches of 256
    config.rl.tasks_per_step = 256
    config.rl.group_size = 5
    config.rl.updates_per_step = 1
    config.rl.optimizer = parts.optimizer(1e-6, warmup_steps=0, b2=0.999)
    config.rl.batch.row_tokens = 8704
    config.rl.batch.micro_rows = 8  # a row per device
    config.eval.every = 10
    config.checkpoint.every = 10
    return config
