"""What models say of outcomes: of finished episodes, as a reward, and of tasks that nobody has played, for `rl.phases`.

`rl.group_reward=outcome_model` is opened with its weights when a stage begins. A folder of the stage "outcome_model"
has a scalar z per episode, and P(success) = sigmoid(z). Any other model folder is a language model that is asked the
question of WebRL's code (arXiv 2411.02337): goal, actions, last page; z = log P(YES) - log P(NO). An episode earns 1
where z >= 0, which is P >= 0.5, else 0. What the environment's own check says stays in `Episode.rewards`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxagent.algorithms import outcome
from jaxagent.algorithms.group_rewards import OutcomeModel
from jaxagent.algorithms.streams import action_mask
from jaxagent.algorithms.value_losses import Squared
from jaxagent.config import ConfigError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message
from jaxagent.learner import forward, programs
from jaxagent.learner.batching import Packer
from jaxagent.learner.score import policy_scorer, value_scorer
from jaxagent.learner.state import TrainState
from jaxagent.models import critic, hf, params, sharding
from jaxagent.models.spec import Computing, ModelSpec
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.templates import CHAT_DATE, open_template
from jaxagent.runs.parts import Parts
from jaxagent.types import Episode, Group, Task, TokenKind

SYSTEM = (
    "You are an expert in evaluating the performance of a website navigation agent. The agent is designed to help a "
    "human user navigate the website to complete a task. Given the user's intent, the agent's action history, and the "
    "final state of the screen, your goal is to decide whether the agent's execution is successful or not. You must "
    "respond with YES or NO."
)
Judge = Callable[[Sequence[Episode]], Sequence[float]]  # z of each


@dataclasses.dataclass(frozen=True)
class Opened(OutcomeModel):
    """The same with its model in memory."""

    judge: Judge = lambda episodes: ()

    def __call__(self, group: Group) -> list[float]:
        """1 where the model says success, else 0; 0 of an episode that failed or has no action."""
        live = [e for e in group.valid if any(action_mask(t).any() for t in e.trajectories)]
        z = dict(zip(map(id, live), self.judge(live) if live else (), strict=True))
        return [float(z.get(id(episode), -1.0) >= 0.0) for episode in group.episodes]


def opened(parts: Parts) -> Parts:
    """With the outcome model of `rl.group_reward` opened and compiled. Raises ConfigError for one that says nothing."""
    reward, cfg = parts.cfg.rl.group_reward, parts.cfg
    if not isinstance(reward, OutcomeModel):
        return parts
    folder, dtype = Path(reward.folder or Path(cfg.workdir) / "outcome_model"), cfg.model.compute_dtype
    computing = Computing(cfg.model.vocab_multiple, dtype, dtype, "none", cfg.model.logprob_chunk_tokens)
    spec = hf.read_spec(folder, computing)
    weights = hf.load(folder, spec, params.shardings(spec, parts.mesh, sharding.TRAIN))
    of_kind = _scalar if (folder / "value_head.npy").is_file() else _language
    judge = of_kind(parts, folder, spec, weights, reward.tokens)
    rl = dataclasses.replace(cfg.rl, group_reward=Opened(**vars(reward), judge=judge))
    return dataclasses.replace(parts, cfg=dataclasses.replace(cfg, rl=rl))


def _scalar(parts: Parts, folder: Path, spec: ModelSpec, weights: params.Params, tokens: int) -> Judge:
    cfg = parts.cfg
    packer = Packer(cfg.rl.batch, programs.action_tokens(cfg) + 1, parts.row_shards, None, cfg.mesh.context)
    score = value_scorer(forward.value_forward(spec), packer, parts.mesh, Squared())
    with jax.set_mesh(parts.mesh):
        model = critic.from_policy(weights)
        head = jax.device_put(np.load(folder / "value_head.npy"), model.value_head.sharding)
    model = dataclasses.replace(model, value_head=head)
    score.warm_up(model)
    return lambda episodes: [float(v[-1]) for v in score(model, [outcome.through_end(e) for e in episodes])[0]]


def _language(parts: Parts, folder: Path, spec: ModelSpec, weights: params.Params, tokens: int) -> Judge:
    tokenizer = Tokenizer.load(folder)
    answers = [tokenizer.encode(word)[:1] for word in ("YES", "NO")]
    if answers[0] == answers[1] or not all(answers):
        raise ConfigError(f"rl.group_reward.folder='{folder}': its tokenizer begins YES and NO with the same token.")
    rows = dataclasses.replace(parts.cfg.rl.batch, row_tokens=tokens, targets_multiple=1)
    score = policy_scorer(forward.policy_forward(spec), 1.0, Packer(rows, 1, parts.row_shards), parts.mesh)
    score.warm_up(weights)
    template = open_template(tokenizer, bool(tokenizer.chat_template), CHAT_DATE)

    def judge(episodes: Sequence[Episode]) -> list[float]:
        asked = []
        for episode in episodes:
            conversation = Conversation(tokenizer, template, tokens)
            conversation.add_prompt((Message("system", SYSTEM), Message("user", question(episode, parts.tokenizer))))
            asked += [outcome.after(conversation.pending[-tokens:], answer) for (answer,) in answers]
        logprobs = [float(of_tokens[-1]) for of_tokens in score(weights, asked)[0]]
        return [yes - no for yes, no in zip(logprobs[::2], logprobs[1::2], strict=True)]

    return judge


def question(episode: Episode, tokenizer: Tokenizer) -> str:
    """The goal, what the policy wrote in each turn, and the last that it was shown, in the words of WebRL's code."""
    history, page = "", ""
    for t in episode.trajectories:
        for turn in np.unique(t.turns[t.action_mask]):
            text = tokenizer.decode(t.tokens[t.action_mask & (t.turns == turn)].tolist())
            history += "; ".join(line.strip() for line in text.strip().split("\n")) + "\n"
        seen = np.isin(t.kinds, (TokenKind.OBSERVATION, TokenKind.WARNING))
        page = tokenizer.decode(t.tokens[seen & (t.turns == t.turns[seen].max())].tolist()) if seen.any() else page
    goal = f"The User Intent:\n{episode.task.prompt.strip()}\n\nAction History:\n{history}"
    return f"{goal}\nThe Current Screenshot:\n{page.strip()}"


def values_of(parts: Parts, of_rl: programs.Programs, state: TrainState, tasks: Sequence[Task]) -> list[float]:
    """The critic's value of each task's prompt, before the policy has done anything."""
    prompts = []
    for task in tasks:
        conversation = parts.conversation()
        conversation.add_prompt(parts.environment.prompt_messages(task))
        prompts.append(outcome.after(conversation.pending[: parts.cfg.env.context_tokens - 1]))
    assert of_rl.values is not None
    return [float(of_tokens[-1]) for of_tokens in of_rl.values(state.critic, prompts)[0]]
