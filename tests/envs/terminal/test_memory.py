"""What an agent's use of memory kills is a reward of 0; what fails for other reasons is a failure. Played sandboxes."""

import asyncio

import pytest

from configs import gsm8k_python
from jaxagent import config as schema
from jaxagent.envs.base import Transcript
from jaxagent.envs.python import hidden_tests
from jaxagent.envs.python.environment import PythonAttempt
from jaxagent.envs.terminal.environment import TerminalAttempt
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.sandbox.base import CommandResult, SandboxClosed
from jaxagent.types import StopReason, Task
from tests.envs.terminal.test_terminal_attempts import cmd, make_config, task


class Played:
    """A sandbox in which `kills` processes were killed for memory; `at` says when that happens and what it costs.

    Args:
      at: "test" (the final test is killed), "command" and "death" (process 1 dies, in a command or before the test).
      counts: whether anybody counts.
      kills: how many more are counted then.
    """

    def __init__(self, at, counts, kills):
        self.at, self.counts, self.kills, self.count, self.dead = at, counts, kills, 2, False

    async def oom_kills(self):
        return self.count if self.counts else None

    def ends(self):
        self.count += self.kills
        self.dead = True

    async def run(self, command, deadline_s, output_bytes):
        if self.at in ("command", "death") and command == "fill":
            self.ends()
            if self.at == "command":
                raise SandboxClosed("process 1 is gone")
        return CommandResult(b"", 0)

    async def execute(self, argv, deadline_s, output_bytes, env=None, directory=""):
        if self.dead:
            raise SandboxClosed("process 1 is gone")
        if self.at == "test" and "final" in " ".join(argv):
            self.count += self.kills
            return CommandResult(b"", 137)
        return CommandResult(b"", 0)

    async def stop_processes(self, spared=()):
        if self.dead:
            raise SandboxClosed("process 1 is gone")

    async def close(self):
        pass


def judged(sandbox, *said):
    async def play():
        async def take(of):
            return sandbox

        environment = TerminalAttempt(task(final_test="final"), make_config().env, take)
        await environment.start()
        steps = [await environment.step(action) for action in said]
        return steps[-1].stop_reason, await environment.verify(Transcript("", (), ())), environment.counters

    return asyncio.run(play())


@pytest.mark.parametrize("at", ["test", "command", "death"])
def test_memory_that_the_agent_used_up_is_0(at):
    said = (cmd("fill"),) if at == "command" else (cmd("fill"), "<done>")
    reason, verdict, counters = judged(Played(at, True, 1), *said)
    assert verdict.reward == 0.0 and counters["broken_places"] == 1
    assert reason == (StopReason.TURN_LIMIT if at == "command" else StopReason.ANSWER)
    assert not reason.is_failure


@pytest.mark.parametrize(("counts", "kills"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("at", ["test", "command", "death"])
def test_what_was_not_killed_for_memory_is_a_failure(at, counts, kills):
    with pytest.raises(VerifierError if at == "test" else SandboxClosed):
        judged(Played(at, counts, kills), cmd("fill"), "<done>")


def test_memory_that_ran_out_before_the_test_explains_no_failure_of_the_test():
    """A command of the agent's was killed; the test then fails by itself."""
    sandbox = Played("test", True, 0)

    async def run(command, deadline_s, output_bytes):
        sandbox.count += 1
        return CommandResult(b"Killed", 137)

    sandbox.run = run
    with pytest.raises(VerifierError, match="must exit with 0 or 1, not 137"):
        judged(sandbox, cmd("fill"), "<done>")


CODE = {"hidden_tests": {"t": {"call": "f(1)", "value": 1}}, "fail_to_pass": ["t"]}


class Dying:
    """A sandbox whose process 1 dies in a python program."""

    def __init__(self, kills):
        self.kills, self.count = kills, 0

    async def execute(self, argv, *rest):
        if argv[0] == "python3" or "exec python3" in argv[2]:
            self.count = self.kills
            raise SandboxClosed("process 1 is gone")
        return CommandResult(b"", 0)

    async def oom_kills(self):
        return self.count

    async def stop_processes(self):
        pass

    async def close(self):
        pass


@pytest.mark.parametrize("kills", [0, None, 1])
def test_submissions_and_programs_that_use_up_the_memory_fail(kills):
    raw = gsm8k_python.get_config("laptop")
    raw.env.judge = "tests"
    config = schema.parse(raw).env

    async def play():
        async def take():
            return Dying(kills)

        environment = PythonAttempt(Task("t", "Write f.", (), "", CODE), config, take)
        step = await environment.step("<py>f = bytearray(10**12)</py>")
        return step.stop_reason, environment.counters, await environment.verify(Transcript("", (), ()))

    tests = hidden_tests.of_task(Task("t", "", (), "", CODE))
    run = hidden_tests.run(Dying(kills), tests, {hidden_tests.MAIN: "f = 1"}, 1.0)
    if kills:
        assert asyncio.run(run) == {"t": "error"}
        reason, counters, verdict = asyncio.run(play())
        assert (reason, counters["failed_programs"], verdict.reward) == (StopReason.TURN_LIMIT, 1.0, 0.0)
    else:
        for failing in (run, play()):
            with pytest.raises(SandboxClosed):
                asyncio.run(failing)
