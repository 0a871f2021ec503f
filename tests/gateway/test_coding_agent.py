"""The laptop's coding agent, a real program in real sandboxes, over a scripted policy: a demonstration is the episode
that it would have been, token by token, through the gateway as in the built-in rollout; and what it is worth."""

import asyncio
import contextlib
import itertools

import pytest

from configs import coding_agent
from data_pipelines import fixes
from jaxagent import config as schema
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Opening
from jaxagent.envs.terminal import dialogue
from jaxagent.gateway.harness import HarnessRollout
from jaxagent.rollout import demonstrations
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.rollout.workers import Workers
from jaxagent.types import StopReason, Task, TokenKind
from tests.gateway.scripted import Scripted

PAIRS = list(itertools.islice(fixes.generate(7), len(fixes.KINDS)))  # one of each kind
FIRST_TEXTS = [fixes.demonstration(*pair, 0.0) for pair in itertools.islice(fixes.generate(0), 200)]


class Demonstrator(Scripted):
    """Says in every turn what the task's demonstration says there."""

    def __init__(self, tokenizer, shown):
        super().__init__(tokenizer, lambda context, turn: "")
        self._shown = shown

    def answer(self, turn):
        return self._shown[turn.task_id]["turns"][turn.turn]["action"]


def play(preset, tokenizer, shown):
    """(the environment, an episode per task): what comes of saying what is shown."""
    raw = coding_agent.get_config(preset)
    raw.env.update(turn_tokens=100, context_tokens=500)  # a small vocabulary
    raw.env.sandbox.warm = 2
    cfg = schema.parse(raw)
    tasks = [Task(row["id"], row["prompt"], (), row["kind"], row["metadata"]) for _, row in PAIRS]
    kind = {"laptop": HarnessRollout, "builtin": MultiTurn}[preset]
    with contextlib.ExitStack() as opened:
        workers = opened.enter_context(Workers(len(tasks)))
        begin = opened.enter_context(cfg.env.open(Opening(None, tasks, workers.run, print)))
        more = {"shared": opened.enter_context(kind.open_shared(workers, print))} if kind is HarnessRollout else {}
        policy = Demonstrator(tokenizer, shown)
        rollout = kind(begin, policy, tokenizer, Plain(), cfg.env, cfg.rl.sampling, request_timeout_s=60.0, **more)

        async def every():
            return await asyncio.gather(*(rollout(task, 0) for task in tasks))

        return cfg.env, workers.run(every(), 300.0)


@pytest.mark.parametrize("preset", ["laptop", "builtin"])
@pytest.mark.parametrize("guess_frac", [0.0, 1.0])
def test_a_demonstration_is_an_episode(sandbox, preset, guess_frac):
    tokenizer = Tokenizer.train(fixes.tokenizer_texts(FIRST_TEXTS), 700, dialogue.TAGS["plain"])
    shown = {row["id"]: fixes.demonstration(draft, row, guess_frac) for draft, row in PAIRS}
    env, episodes = play(preset, tokenizer, shown)
    for (draft, row), episode in zip(PAIRS, episodes, strict=True):
        assert (episode.stop_reason, episode.error) == (StopReason.ANSWER, "")
        assert episode.reward == float(guess_frac == 0.0 or draft.kind == "flip"), draft.kind
        (trajectory,) = episode.trajectories
        taught = demonstrations.trajectory(shown[row["id"]], Conversation(tokenizer, Plain(), 500), env)
        for name in ("tokens", "kinds", "turns"):
            assert getattr(trajectory, name).tolist() == getattr(taught, name).tolist(), (name, episode.text)
        assert (trajectory.kinds == TokenKind.OBSERVATION).any() and trajectory.turns.max() == 2 - guess_frac
