"""Attempts at software tasks: by an agent program, or by the policy's own commands. How one is judged:

its time is over (run_s)            reward 0, or judged like the others, by `verify_timeouts`
no change can be taken              reward 0: the repository is gone, the disk is full, there is too much of it
nothing was changed                 the tests run, or reward 0, by `verify_empty`
the change cannot be applied        reward 0
tests fail, hang, or say nothing    reward 0
sandbox or task fail by themselves  an exception: the episode failed, which is no reward of 0
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence

from jaxagent.envs.agent_attempt import Place
from jaxagent.envs.base import Message, Transcript, Verdict
from jaxagent.envs.coding import patches, repository, verify
from jaxagent.envs.coding.environment import GUARD_S, MAX_CHANGE_BYTES, SOLVED, Coding, statement_file
from jaxagent.envs.coding.task import CodingTask
from jaxagent.envs.terminal.commands import COMMAND_COUNTERS, ENTER_TIMEOUT_S, CommandAttempt, SandboxAttempt
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.sandbox.base import FileError, Sandbox
from jaxagent.types import StopReason

Take = Callable[[CodingTask], Awaitable[Sandbox]]
COUNTERS = {  # of judgements that are no honest failure of tests: why -> counter
    verify.NOT_APPLIED: "unapplied_changes",
    verify.NO_RESULTS: "runs_without_results",
    verify.FORGED: "forged_runs",
    verify.LATE: "late_runs",
    verify.MEMORY: "runs_out_of_memory",
}
_NAMES = ("empty_changes", "lost_changes", "dropped_files", "unverified", *COUNTERS.values())


class _Attempt(SandboxAttempt):
    """An attempt at a software task, whoever plays: it brings the repository, takes the change out and judges it."""

    def __init__(self, task: CodingTask, config: Coding, take: Take):
        self.task, self.config, self._take = task, config, take
        self.counters: dict[str, float] = dict.fromkeys(_NAMES, 0.0)
        self.judgement: verify.Judgement | None = None  # for whoever wants more than a number
        self._base: tuple[str, str] | None = None

    async def _begin(self) -> Sandbox:
        self._sandbox = await self._take(self.task)
        self._base = await repository.bring_for_agent(self._sandbox, self.task)
        self._oom_kills = await self._sandbox.oom_kills()
        return self._sandbox

    async def _verdict(self, stop_reason: StopReason | None) -> Verdict:
        if stop_reason == StopReason.TIME_LIMIT and not self.config.verify_timeouts:
            self.counters["unverified"] += 1
            return self._worth(0.0)
        change = await self._change()
        if change is None:
            self.counters["lost_changes"] += 1
            return self._worth(0.0)
        config = self.config
        text, dropped = patches.keep(change, self.task.protected, config.drop)
        self.counters["dropped_files"] += len(dropped)
        if not text.strip():
            self.counters["empty_changes"] += 1
            if not config.verify_empty:
                return self._worth(0.0)
        limits = (config.ladder, config.drop, config.verify_s)
        self.judgement = await verify.judge(lambda: self._take(self.task), self.task, text, *limits)
        if (counter := COUNTERS.get(self.judgement.why)) is not None:
            self.counters[counter] += 1
        similarity = patches.WRONG_FORMAT
        if config.reward == "patch_similarity" and text.strip():
            similarity = await asyncio.to_thread(patches.likeness, text, self.task.patch)
        return self._worth(float(self.judgement.resolved), similarity)

    def _worth(self, resolved: float, similarity: float = patches.WRONG_FORMAT) -> Verdict:
        """The verdict; SWE-RL's reward of an agent that has left no change is that of a wrong format."""
        if self.config.reward == "patch_similarity":
            return Verdict(similarity, {SOLVED: resolved, "patch_similarity": similarity})
        return Verdict(resolved, {SOLVED: resolved})

    async def _change(self) -> str | None:
        """What the agent changed, or None where that cannot be told by its own doing. Ends its sandbox."""
        if self._sandbox is None or self._base is None:
            raise VerifierError(f"{self.task.id}: the attempt has not begun.")
        if self._sandbox_lost:
            return None
        try:
            await self._sandbox.stop_processes()
            change = await repository.change(self._sandbox, self.task, self._base, MAX_CHANGE_BYTES)
        except FileError:
            return None
        except RuntimeError:
            if not await self._memory_ran_out(self._oom_kills):
                raise
            return None
        await self._sandbox.close()
        return change


class AgentCodingAttempt(_Attempt):
    """One attempt by an agent program."""

    def __init__(self, task: CodingTask, config: Coding, take: Take):
        super().__init__(task, config, take)
        self.agent = config.agent
        self.init_s, self.run_s, self.verify_s = config.init_s, config.run_s, 2 * config.verify_s + GUARD_S

    async def start(self) -> Place:
        """The repository in a sandbox, with the problem in a file beside it."""
        sandbox = await self._begin()
        await sandbox.write(str(statement_file(self.task)), self.task.statement.encode())
        instruction = self.config.instruction.format(statement=self.task.statement)
        return Place(sandbox, self.task.workdir, instruction)

    async def verify(self, stop_reason: StopReason) -> Verdict:
        """Judges what the program left."""
        return await self._verdict(stop_reason)


class BuiltInAttempt(_Attempt, CommandAttempt):
    """One attempt by the policy's own commands."""

    def __init__(self, task: CodingTask, config: Coding, take: Take):
        _Attempt.__init__(self, task, config, take)
        CommandAttempt.__init__(self, config)
        self.counters |= dict.fromkeys(COMMAND_COUNTERS, 0.0)

    async def start(self) -> Sequence[Message]:
        """The repository in a sandbox; the shell starts there. The attempt's time begins when that is done."""
        async with asyncio.timeout(self.config.init_s):
            sandbox = await self._begin()
            entered = await sandbox.run(f"cd -- {shlex.quote(self.task.workdir)}", ENTER_TIMEOUT_S, 1000)
        if entered.exit_code != 0:
            raise VerifierError(f"{self.task.id}: the shell cannot start in {self.task.workdir!r}")
        self._ends_at = time.monotonic() + self.config.run_s
        return self.config.messages(self.task.statement)

    async def solve(self) -> bool:
        """Does what the row's own patch does, in place of an agent; False = the row has none. Raises VerifierError: the
        patch cannot be applied."""
        if self._sandbox is None or not self.task.patch:
            return False
        ladder = patches.LADDERS[self.config.ladder]
        if not await verify.apply_patch(self._sandbox, self.task, self.task.patch, ladder):
            raise VerifierError(f"{self.task.id}: the row's patch cannot be applied.")
        return True

    async def verify(self, transcript: Transcript) -> Verdict:
        """Judges what the commands left."""
        return await self._verdict(transcript.ended)
