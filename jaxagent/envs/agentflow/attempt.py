"""One attempt at one question: the planner's calls, the roles, the tools and the memory, and the verdict."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxagent.envs.agentflow import prompts, reading
from jaxagent.envs.agentflow.prompts import Memory, shortened_memory, without_middle
from jaxagent.envs.base import Message, Verdict
from jaxagent.envs.cast import POLICY, Cast, NoRoom, PlayedAttempt, RoleError, RoleReply
from jaxagent.envs.python import hidden_tests
from jaxagent.envs.python.programs import Programs, Take
from jaxagent.rewards import maths
from jaxagent.rewards.text import exact_match, normalize_answer
from jaxagent.types import StopReason, Task

if TYPE_CHECKING:
    from jaxagent.envs.agentflow.environment import AgentFlow

SOLVED = "solved"  # the verdict's component
NO_COMMAND = "No command was generated because the tool was not found."
NO_RESULT = "No result was generated because the tool was not found."
NO_OUTPUT = "(no output)"
OUT_OF_MEMORY = "Execution error: out of memory"
COUNTERS = (
    "steps", "tool_calls", "python_calls", "generator_calls", "unreadable_steps", "unknown_tools",
    "unreadable_commands", "unclear_conclusions", "failed_programs", "timed_out_programs", "out_of_budget",
    "long_prompts", "cut_replies", "judged", "no_room",
)  # fmt: skip


class AgentFlowAttempt(PlayedAttempt):
    """One attempt at one question."""

    def __init__(self, task: Task, cast: Cast, config: AgentFlow, take: Take):
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._task, self._cast, self._config = task, cast, config
        self._programs = Programs(take, config.run_timeout_s, config.output_chars, config.traceback)
        self._memory: Memory = ()
        self._planned_tokens = 0  # shown to the planner and said by it, of all its calls so far
        self._final = ""

    async def play(self) -> StopReason:
        """Plan, steps, final output. ANSWER where that states an answer, else TURN_LIMIT or TOKEN_LIMIT.

        TOKEN_LIMIT also where the policy has filled a role's context: then the final output comes at once.
        """
        config, trained = self._config, self._config.trained
        prompt = self._prompt("plan")
        plan = (await self._planner(prompt, trained != "steps")).text
        for number in range(1, config.max_turns + 1):
            self.counters["steps"] += 1
            prompt = self._prompt("step", self._memory, plan=plan, number=number, steps=config.max_turns)
            reply = await self._planner(prompt, True)
            try:
                await self._act(reading.step(reply.text))
                if await self._is_enough(plan):
                    break
            except NoRoom:  # as published: a verifier that cannot be asked says STOP
                self.counters["no_room"] += 1
                break
            if 0 < config.token_budget <= self._planned_tokens:
                self.counters["out_of_budget"] += 1
                break
        by_role = config.planner_role and trained != "all"
        plan, memory = self._brief(plan) if by_role else (plan, self._memory)
        prompt = self._prompt("final", memory, plan=plan, answer=config.answer)
        reply = await self._planner(prompt, trained == "all")
        self._final = reply.text
        if self.counters["no_room"]:
            return StopReason.TOKEN_LIMIT
        if reading.answer(reply.text, config.answer) is not None:
            return StopReason.ANSWER
        return StopReason.TOKEN_LIMIT if reply.finish == "length" else StopReason.TURN_LIMIT

    async def verify(self, stop_reason: StopReason) -> Verdict:
        """1 for a final answer that equals the gold one, or that the judge takes for right, else 0.

        As texts only such gold answers are compared of which normalising leaves something: "A" would equal "the".

        Raises:
          RoleError: the judge gives no verdict. One whose context the answer fills has not been convinced.
        """
        answer, golds = reading.answer(self._final, self._config.answer), self._task.answers
        exact = answer is not None and (
            any(maths.equal(answer, maths.last_boxed(gold) or gold) for gold in golds)
            or (self._config.answer == "tags" and exact_match(answer, list(filter(normalize_answer, golds))))
        )
        right = exact or (self._config.judge and bool(self._final.strip()) and await self._judge_agrees(golds))
        return Verdict(float(right), {SOLVED: float(right), "exact": float(exact)})

    async def close(self) -> None:
        """Ends the sandbox, if one was needed."""
        await self._programs.close()

    async def _planner(self, prompt: str, trained: bool) -> RoleReply:
        """One call of the planner: a conversation of the policy's, or of the role that plays untrained calls."""
        limit = self._config.prompt_tokens
        if not trained and self._config.planner_role:
            reply = await self._ask("planner", prompt)
        else:
            if limit and trained and len(self._cast.tokens(prompt).ids) > limit:
                self.counters["long_prompts"] += 1
                trained = False
            reply = await self._cast.talk(POLICY, trained).say(Message("user", prompt))
        self.counters["cut_replies"] += reply.finish == "length"
        self._planned_tokens += reply.prompt_tokens + reply.reply_tokens
        return reply

    async def _ask(self, role: str, prompt: str, system: str = "") -> RoleReply:
        messages = (*([Message("system", system)] if system else ()), Message("user", prompt))
        return await self._cast.talk(role).say(*messages)

    async def _act(self, planned_step: tuple[str, str, str]) -> None:
        """Has the executor write a command for what the planner wants, runs it, and remembers what came of it."""
        config, (context, sub_goal, tool_name) = self._config, planned_step
        tool = reading.tool(tool_name)
        self.counters["unreadable_steps"] += planned_step == reading.NOTHING
        self.counters["unknown_tools"] += tool is None and planned_step != reading.NOTHING
        if tool is None and config.unknown_tool == "nothing":
            self._remember(tool_name, sub_goal, NO_COMMAND, NO_RESULT)
            return
        tool = tool or reading.GENERATOR
        context, cut_goal = without_middle(context, config.plan_chars), without_middle(sub_goal, config.step_chars)
        prompt = self._prompt("executor", context=context, sub_goal=cut_goal, tool=tool)
        command = (await self._ask("executor", prompt)).text
        query = reading.query(command)
        if query is None:
            self.counters["unreadable_commands"] += 1
            result = 'Command parse error: there is no tool.execute(query="...") in the command'
        else:
            result = await self._use(tool, query)
        self._remember(tool, sub_goal, command, result)

    async def _use(self, tool: str, query: str) -> str:
        config = self._config
        self.counters["tool_calls"] += 1
        if tool == reading.GENERATOR:
            self.counters["generator_calls"] += 1
            return (await self._ask("generator", query)).text
        self.counters["python_calls"] += 1
        if config.coder:
            system = prompts.CODER.format(seconds=config.run_timeout_s)
            query = reading.program((await self._ask("coder", query, system)).text)
        return await run_program(self._programs, query, config.run_timeout_s, self.counters)

    def _remember(self, tool: str, sub_goal: str, command: str, result: str) -> None:
        result = without_middle(result.strip(), self._config.result_chars)
        self._memory += (prompts.action(tool, sub_goal, command, result),)

    def _prompt(self, call: str, memory: Memory = (), **values: Any) -> str:
        return prompts.prompt(
            call, self._config.style, self._config.coder, memory, question=self._task.prompt, **values
        )

    def _brief(self, plan: str) -> tuple[str, Memory]:
        """The plan and the memory as roles are shown them, whose contexts the policy could fill."""
        return without_middle(plan, self._config.plan_chars), shortened_memory(self._memory, self._config.step_chars)

    async def _is_enough(self, plan: str) -> bool:
        """Whether the verifier says STOP. What it does not say clearly is CONTINUE."""
        plan, memory = self._brief(plan)
        prompt = self._prompt("verifier", memory, plan=plan)
        word = reading.conclusion((await self._ask("verifier", prompt)).text)
        self.counters["unclear_conclusions"] += word is None
        return word == "STOP"

    async def _judge_agrees(self, golds: Sequence[str]) -> bool:
        self.counters["judged"] += 1
        prompt = prompts.judge(self._task.prompt, self._final, " or ".join(golds))
        try:
            reply = await self._ask("judge", prompt)
        except NoRoom:
            self.counters["no_room"] += 1
            return False
        # A reply that was cut may have come no further than to repeat what the policy wrote.
        verdict = None if reply.finish == "length" else reading.verdict(reply.text)
        if verdict is None:
            how = "was cut off before" if reply.finish == "length" else "has no line"
            raise RoleError(f"judge: its reply {how} 'VERDICT: True' or 'VERDICT: False'")
        return verdict


async def run_program(programs: Programs, code: str, timeout_s: float, counters: MutableMapping[str, float]) -> str:
    """What a program prints, or what it fails with. Counts "failed_programs" and "timed_out_programs". Raises
    RuntimeError: of the sandbox, which no program is to blame for."""
    if len(code) > hidden_tests.MAX_FILE_CHARS:
        counters["failed_programs"] += 1
        return f"Execution error: the program has more than {hidden_tests.MAX_FILE_CHARS} characters"
    ran = await programs.run(code.replace("\0", ""))
    output = ran.output.strip()
    if ran.timed_out:
        counters["timed_out_programs"] += 1
        return f"{output}\nExecution error: timed out after {timeout_s:g} s".lstrip("\n")
    if ran.exit_code != 0:
        counters["failed_programs"] += 1
        return OUT_OF_MEMORY if ran.out_of_memory else f"Execution error: {output or f'exit code {ran.exit_code}'}"
    return output or NO_OUTPUT
