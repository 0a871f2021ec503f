"""For the tests of tau2: a cast whose roles say what a test has written down, a folder of tasks, and one attempt."""

import asyncio
import contextlib
import json
from pathlib import Path

from jaxagent.data import files, sources
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.cast import RoleError, RoleReply
from jaxagent.envs.tau2.environment import Tau2
from jaxagent.tools.calls import Call
from jaxagent.tools.hermes import Hermes
from jaxagent.types import StopReason

SHARED = Path(__file__).resolve().parents[3].parent / "shared/data"
MOCK, RETAIL, SHOP = SHARED / "tau2-bench/mock", SHARED / "tau2-bench/retail", SHARED / "tau-bench-retail"
DATABASE = {
    "tasks": {"task_1": {"task_id": "task_1", "title": "First", "status": "pending"}},
    "users": {"user_1": {"user_id": "user_1", "name": "One", "tasks": ["task_1"]}},
}


class Scripted:
    """Replies one after the other; behind the last one, the last one for ever. An exception is raised."""

    def __init__(self, lines):
        self.lines, self.heard = list(lines), []

    async def say(self, *messages, stop_strings=(), max_tokens=None):
        self.heard.append(messages)
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        line = line(messages) if callable(line) else line
        if isinstance(line, Exception):
            raise line
        return RoleReply(line, "eos", None, 1, 1, 0.0, None)


class People:
    """A cast of scripted roles."""

    def __init__(self, **lines):
        self.names = tuple(lines)
        self.talks = {role: Scripted(said) for role, said in lines.items()}

    def talk(self, role, trained=True):
        return self.talks[role]


def call(name, **arguments):
    """A call as a policy, or a user, writes it."""
    return Hermes.write("", [Call(name, arguments)])


def folder_of(path, tasks, splits=None, **others):
    """A folder of tasks in the published layout."""
    path.mkdir(exist_ok=True)
    splits = splits or {"train": [task["id"] for task in tasks]}
    written = {"tasks.json": tasks, "split_tasks.json": splits, "db.json": DATABASE, **others}
    for name, value in written.items():
        (path / name).write_text(json.dumps(value))
    (path / "policy.md").write_text("Be kind.")
    return path


def task_row(**changes):
    """A small task of the mock domain."""
    scenario = {"user_scenario": {"instructions": "You want task_1 to be completed."}}
    done = {"name": "update_task_status", "arguments": {"task_id": "task_1", "status": "completed"}, "action_id": "a"}
    return {"id": "one", **scenario, "evaluation_criteria": {"actions": [done]}, **changes}


@contextlib.contextmanager
def opened(folder, **settings):
    """The environment's (task id, cast) -> attempt."""
    tasks = {}
    for split in files.splits(folder):
        tasks |= {task.id: task for task in sources.load_tasks(folder, split, need_answers=False)}
    here = Opening(folder, tuple(tasks.values()), lambda work, timeout_s: asyncio.run(work), lambda line: None)
    with Tau2(**settings).open(here) as attempt_at:
        yield lambda name, cast: attempt_at(tasks[name], cast)


async def played(attempt, actions):
    """(verdict or None, stop reason or the failure, what was shown); actions end with the episode."""
    shown = []
    try:
        shown.append("".join(message.content for message in await attempt.start()))
        for action in actions:
            step = await attempt.step(action)
            if step.stop_reason is not None:
                return await attempt.verify(Transcript("", (), ended=step.stop_reason)), step.stop_reason, shown
            shown.append(step.observation.text)
        return await attempt.verify(Transcript("", (), ended=StopReason.TOKEN_LIMIT)), StopReason.TOKEN_LIMIT, shown
    except (RoleError, TimeoutError) as failure:
        return None, failure, shown
