"""Real agent programs, without a network, in a sandbox: each does a task of two turns over a scripted policy.

They come as a layer (`python -m data_pipelines.agent_programs`), which JAXAGENT_AGENT_LAYER names.
"""

import dataclasses
import json
import os

import numpy as np
import pytest

from jaxagent.agents import AGENTS
from jaxagent.gateway import harness
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.session import Session
from jaxagent.rollout.templates import CHAT_DATE
from jaxagent.sandbox.base import MIB, Limits, Spec
from jaxagent.types import StopReason, TokenKind
from tests.gateway import chat_templates, world
from tests.gateway.episodes import CONFIG, TASK

LAYER = os.environ.get("JAXAGENT_AGENT_LAYER", "")
COMMAND = "echo hello > hello.txt; echo written"
COMPLETE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def xml(name, arguments):
    texts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<tool_call>\n<function={name}>\n{texts}</function>\n</tool_call>"


# Program -> (template, how it writes calls, the program's tool, the command's name, other arguments)
PROGRAMS = {
    "codex": (chat_templates.QWEN25, hermes, "exec_command", "cmd", {}),
    "claude_code": (chat_templates.QWEN25, hermes, "Bash", "command", {"description": "Writes the file"}),
    "opencode": (chat_templates.QWEN3_CODER, xml, "bash", "command", {"description": "Writes the file"}),
    "qwen_code": (chat_templates.QWEN3_CODER, xml, "run_shell_command", "command", {}),
    "mini_swe_agent": (world.TEMPLATE, hermes, "bash", "command", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_a_task_and_its_trajectory_is_what_was_said(name, scene, monkeypatch):
    if not os.path.isdir(LAYER):
        pytest.skip("JAXAGENT_AGENT_LAYER names no folder of `python -m data_pipelines.agent_programs`")
    template, write, tool, key, more = PROGRAMS[name]
    scene.renderer = Renderer(world.tokenizer(), template, CHAT_DATE)
    scene.spec = Spec(layers=(LAYER,), limits=Limits(memory_bytes=2048 * MIB))
    scene.bound_s = 400.0
    replies = ["I write it.\n" + write(tool, {key: COMMAND, **more}), "It is there."]
    if name == "mini_swe_agent":
        replies[1] = write(tool, {key: COMPLETE})
    asked = []

    class Recorded(Session):
        async def answer(self, ask, *more, **named):
            answer = await super().answer(ask, *more, **named)
            asked.append((ask, answer))
            return answer

    monkeypatch.setattr(harness, "Session", Recorded)
    config = dataclasses.replace(CONFIG, context_tokens=200_000, turn_tokens=4000, episode_timeout_s=380.0)
    episode = scene.play(lambda context, turn: replies[turn], AGENTS[name](), config, run_s=300.0)
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.ANSWER, 1.0, "")
    assert episode.metrics["exit_status"] == 0 and episode.turns == 2

    # The tokens are the engine's, each sampled one once.
    world.check(scene.policy, episode.trajectories, "task", 3)
    (trajectory,) = episode.trajectories
    assert not episode.metrics["forks"] and not episode.metrics["side_requests"] and len(asked) == 2

    # What was sent and received is what the tokens say: the conversation rendered at once has the same text.
    (first, _), (last, answer) = asked
    assert [m.text for m in last.messages[: len(first.messages)]] == [m.text for m in first.messages]
    tokenizer = world.tokenizer()
    whole = scene.renderer.prompt(last.messages, last.tools, {}).ids + answer.tokens.tolist()
    assert tokenizer.decode(trajectory.tokens.tolist()) == tokenizer.decode(whole)
    assert any(TASK.prompt in message.text for message in first.messages) and tool in {t.name for t in first.tools}
    sampled = [tokenizer.decode(ids) for ids in world.spans(trajectory)]
    assert [text.removesuffix("<|im_end|>") for text in sampled] == replies
    seen = tokenizer.decode(trajectory.tokens[trajectory.kinds == TokenKind.OBSERVATION].tolist())
    assert "written" in seen
    if not any(message.role == "assistant" for message in first.messages):  # Qwen Code opens with a talk of its own
        assert TASK.prompt not in seen
    assert np.array_equal(np.flatnonzero(trajectory.kinds == TokenKind.ACTION), np.flatnonzero(trajectory.logprobs))
