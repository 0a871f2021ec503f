"""Demonstrations of a planner: they are what an attempt shows and hears, and end as they were meant to."""

import asyncio
import itertools
import json
from collections import Counter

import pytest

from configs import agentflow
from data_pipelines import arithmetic, arithmetic_plans
from jaxagent import config as schema
from jaxagent.config import ConfigError
from jaxagent.config.choice import Choice
from jaxagent.envs.agentflow import roles as arithmetic_team
from jaxagent.envs.agentflow.attempt import AgentFlowAttempt
from jaxagent.envs.cast import RoleReply
from jaxagent.sandbox.base import CommandResult
from jaxagent.types import StopReason, Task


def problems(number, seed=0):
    return list(itertools.islice(arithmetic.generate(seed), number))


class Cast:
    """The policy says what was demonstrated for a prompt, and the scripted roles play themselves."""

    def __init__(self, task, rows):
        self.task, self.heard = task, []
        self.lines = {(row["role"], row["prompt"][0]["content"]): row["turns"][0]["action"] for row in rows}
        self.unsaid = Counter(role for role, _ in self.lines)

    def talk(self, role, trained=True):
        return Talk(self, role)


class Talk:
    def __init__(self, cast, role):
        self.cast, self.role = cast, role

    async def say(self, message):
        role = "planner" if self.role == "policy" else self.role
        self.cast.unsaid[role] -= 1
        text = self.cast.lines.get((role, message.content))
        if role != "planner":
            speaker = Choice("jaxagent.roles:ROLES").make(f"arithmetic_{role}").speaker(self.cast.task, 0, 0)
            said = (await speaker.reply((message,), (), 24)).text
            assert text in (None, said), "an executor and a verifier are demonstrated as they speak"
            assert (text is None) == (role == "generator")
            text = said
        return RoleReply(text, "eos", None, 0, 0, 0.0, None)


class Sandbox:
    """Runs print(EXPRESSION)."""

    async def take(self):
        return self

    async def execute(self, argv, timeout_s, output_bytes):
        computed = arithmetic_team.compute(argv[-1].removeprefix("print(").removesuffix(")"))
        return CommandResult(f"{computed[0]}\n".encode(), 0)

    async def stop_processes(self):
        pass

    async def close(self):
        pass


def test_expressions_of_every_kind():
    value = {}
    for row in problems(60):
        whole, parts = arithmetic_plans.expressions(row["metadata"]["program"])
        assert arithmetic_team.compute(whole) == (int(row["answers"][0]), len(parts))
        assert arithmetic_team.compute(parts[-1]) == (int(row["answers"][0]), 1)
        value[row["kind"]] = row["metadata"]["program"], whole, parts
    assert len(value) == 6
    whole, parts = arithmetic_plans.expressions("n = 177 + 289\nprint(n * 66)")
    assert (whole, parts) == ("( 177 + 289 ) * 66", ["177 + 289", "466 * 66"])
    assert arithmetic_plans.expressions("n = 126 - 72\nprint(n)") == ("126 - 72", ["126 - 72"])


def test_demonstrations_are_episodes():
    """Each conversation is asked exactly what was demonstrated, no more and no less, and the answer is as intended."""
    env = schema.parse(agentflow.get_config()).env
    ends = Counter()
    for row in problems(120):
        rows = arithmetic_plans.demonstration(row, 0.5, env.max_turns, True)
        assert rows == arithmetic_plans.demonstration(row, 0.5, env.max_turns, True)
        task = Task(row["id"], row["prompt"], tuple(row["answers"]), row["kind"])
        cast = Cast(task, rows)
        attempt = AgentFlowAttempt(task, cast, env, Sandbox().take)

        async def play(attempt=attempt):
            ended = await attempt.play()
            return ended, await attempt.verify(ended)

        ended, verdict = asyncio.run(play())
        assert ended == StopReason.ANSWER and not any(cast.unsaid[role] for role in ("planner", "executor", "verifier"))
        assert not any(
            attempt.counters[name] for name in ("unreadable_steps", "unreadable_commands", "failed_programs")
        )
        two = row["kind"].startswith("two_step/")
        assert two or verdict.reward == 1.0
        ends[two, verdict.reward, attempt.counters["steps"], attempt.counters["python_calls"] > 0] += 1
        planner = [r for r in rows if r["role"] == "planner"]
        assert arithmetic_plans.demonstration(row, 0.5, env.max_turns, False) == planner
    assert set(ends) == {
        (False, 1.0, 1, True), (False, 1.0, 1, False), (True, 0.0, 1, False), (True, 1.0, 1, True),
        (True, 1.0, 2, True), (True, 1.0, 2, False),
    }  # fmt: skip
    assert 18 < ends[True, 0.0, 1, False] < 42  # half of 60


def test_the_source_writes_what_a_run_reads(tmp_path):
    cfg = schema.parse(agentflow.get_config())
    source = cfg.data.source
    source = type(source)(num_tasks=120, num_demonstrations=20, estimate_frac=0.8, role_rows=True)
    source.write(tmp_path / "data", 0, cfg.env)
    rows = [json.loads(line) for line in (tmp_path / "data" / "full.jsonl").read_text().splitlines()]
    assert {row["role"] for row in rows} == {"planner", "executor", "verifier"}
    assert len({row["id"] for row in rows}) == 20
    assert (tmp_path / "data" / "texts.jsonl").is_file()
    with pytest.raises(ConfigError, match="too few"):
        type(source)(num_tasks=1).write(tmp_path / "other", 0, cfg.env)


@pytest.mark.parametrize("changes", [dict(style="full"), dict(coder=True), dict(answer="tags")])
def test_the_source_refuses_what_it_does_not_demonstrate(changes):
    raw = agentflow.get_config()
    raw.env.update(changes)
    cfg = schema.parse(raw)
    with pytest.raises(ConfigError, match="arithmetic_plans"):
        cfg.data.source.settings(0, cfg.env)
