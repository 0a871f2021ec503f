"""One attempt at one task of tau2-bench: the policy is the agent, a role plays the user, and both may call tools.

Steps are counted as published: each message of the agent, each of the user and each batch of results is one. The
conversation is over when the user says so; at `max_steps` steps, or `max_errors` failed calls of both sides together,
it is over without an end, which is a reward of 0 (TURN_LIMIT). What is the user's failure alone is a failure of the
episode: an empty message, an end before the agent has said a word, call upon call without a word to the agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxagent.envs.base import Attempt, Message, Observation, Step, Transcript, Verdict
from jaxagent.envs.cast import Cast, RoleError, Talk
from jaxagent.envs.tau2 import rewards, words
from jaxagent.envs.tau2.rows import AGENT, USER, Tau2Task, ToolUse
from jaxagent.envs.tau2.world import Differences, World
from jaxagent.tools.calls import Call, Tool
from jaxagent.tools.hermes import CLOSE, OPEN, read_answer
from jaxagent.types import StopReason, TokenKind

if TYPE_CHECKING:
    from jaxagent.envs.tau2.environment import Tau2

SOLVED = "solved"
MALFORMED = f'Error: write {OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}.'
EMPTY = "Error: say something to the user, or call a tool."
CALLS_IN_A_ROW = 25  # of a user, without a word to the agent


class Tau2Attempt(Attempt):
    """One attempt at one task."""

    stop_strings: Sequence[str] = (CLOSE,)

    def __init__(
        self,
        task: Tau2Task,
        world: World,
        gold_differences: Differences,
        prompt_parts: tuple[str, tuple[Tool, ...], tuple[Tool, ...]],  # policy text, the agent's tools, the user's
        config: Tau2,
        cast: Cast,
    ) -> None:
        self._task, self._world, self._config, self._cast = task, world, config, cast
        self._gold_differences = gold_differences
        self._policy, self._tools, self._user_tools = prompt_parts
        self._user: Talk = cast.talk("user")
        self._to_user: list[Message] = []  # what comes before its next reply: of the first one, its whole prompt
        self._agent_texts = [past.content for past in task.history if past.role == AGENT and past.content.strip()]
        self._calls_made = [use for past in task.history for _, use in past.calls]
        self._lines: list[str] = []  # the conversation as a judge reads it
        self._steps = 0
        self._errors = {AGENT: 0, USER: 0}
        names = ("calls", "failed_calls", "invalid_actions", "user_calls", "user_failed_calls", "skipped_assertions")
        self.counters: dict[str, float] = dict.fromkeys(names, 0.0)

    async def start(self) -> Sequence[Message]:
        """Has the user begin, unless the history ends with what the agent has to answer."""
        history = self._task.history
        agent_messages = words.seen_by(AGENT, history)
        system = Message("system", words.agent_prompt(self._policy, self._tools))
        to_user = [
            Message("system", words.user_prompt(self._task.scenario, self._user_tools)),
            *words.seen_by(USER, history),
        ]
        self._to_user = list(map(_with_line_end, to_user))
        self._lines = [f"{past.role}: {past.content}" for past in history if past.content]
        last = history[-1] if history else None
        if last is None:
            self._say_to_user(words.GREETING)
            self._to_user.append(_text_for_user(words.GREETING))
            agent_messages.append(Message("assistant", words.GREETING))
        if last is None or last.role == AGENT or (last.role == "tool" and last.requestor == USER):
            begins = await self._hear_user()
            if begins is None:
                raise RoleError("user: ended the conversation before the agent had said a word")
            agent_messages.append(Message("user", begins))
        return [system, *map(_with_line_end, agent_messages)]

    async def step(self, action: str) -> Step:
        """Makes the calls, or takes the words to the user and comes back with the answer."""
        reply = read_answer(action, self._tools)
        self._steps += 1
        if reply.malformed or not (reply.calls or reply.text.strip()):
            self.counters["invalid_actions"] += 1
            self._errors[AGENT] += 1
            self._steps += 1
            return self._after(MALFORMED if reply.malformed else EMPTY, "tool", TokenKind.WARNING)
        if reply.text.strip():
            self._say_to_user(reply.text.strip())
        if reply.calls:
            return self._after("\n".join(self._calls(AGENT, reply.calls)), "tool")
        if self._over:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        self._to_user.append(_text_for_user(reply.text.strip()))
        answer = await self._hear_user()
        if self._over:  # as published: an end that comes with the last step comes too late
            return Step(stop_reason=StopReason.TURN_LIMIT)
        if answer is None:
            return Step(stop_reason=StopReason.ANSWER)
        return self._after(answer, "user")

    async def verify(self, transcript: Transcript) -> Verdict:
        """The reward of an episode that the user has ended; 0 for any other."""
        self.counters["steps"] = float(self._steps)
        criteria = self._task.criteria
        if transcript.ended != StopReason.ANSWER:
            return Verdict(0.0, {SOLVED: 0.0})
        if criteria is None:
            return Verdict(1.0, {SOLVED: 1.0})
        parts = rewards.terms(
            criteria,
            same_state=self._world.differences() == self._gold_differences,
            assertions=[self._world.holds(assertion) for assertion in criteria.env_assertions or ()],
            calls=self._calls_made,
            agent_texts=self._agent_texts,
            judge_holds=None,
        )
        has_nl_assertions = "NL_ASSERTION" in criteria.reward_basis and bool(criteria.nl_assertions)
        if has_nl_assertions and self._config.nl_assertions != "judge":
            self.counters["skipped_assertions"] = float(len(criteria.nl_assertions))
        elif has_nl_assertions and rewards.reward(parts) > 0:  # nothing that a judge says makes more of a 0
            talk = self._cast.talk("judge")
            parts["nl_assertion"] = float(
                await rewards.holds_by_judge(talk, criteria.nl_assertions, "\n".join(self._lines))
            )
        reward = rewards.reward(parts)
        return Verdict(reward, {SOLVED: reward, **parts})

    async def solve(self) -> bool:
        """Makes the calls that the task's author has made, of both sides, and says what was to be said."""
        criteria = self._task.criteria
        if criteria is None:
            return True
        for use in criteria.actions or ():
            self._world.call(use)
            self._calls_made.append(use)
        self._agent_texts += criteria.communicate_info or ()
        return bool(criteria.actions) or not criteria.env_assertions  # assertions alone do not say how

    @property
    def _over(self) -> bool:
        return self._steps >= self._config.max_steps or sum(self._errors.values()) >= self._config.max_errors

    def _after(self, text: str, role: str, kind: TokenKind = TokenKind.OBSERVATION) -> Step:
        if self._over:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        return Step(Observation(((f"\n{text}\n", kind),), role))

    def _say_to_user(self, text: str) -> None:
        self._agent_texts.append(text)
        self._lines.append(f"{AGENT}: {text}")

    def _calls(self, side: str, calls: Sequence[Call]) -> list[str]:
        """Makes calls of one side; their results. Together they are one step."""
        prefix, texts = "" if side == AGENT else "user_", []
        for call in calls:
            arguments: Mapping[str, object] = call.arguments if isinstance(call.arguments, Mapping) else {}
            use = ToolUse(side, call.name, arguments)
            self._calls_made.append(use)
            text, failed = self._world.call(use)
            texts.append(text)
            self.counters[f"{prefix}calls"] += 1
            self.counters[f"{prefix}failed_calls"] += failed
            self._errors[side] += failed
        self._steps += 1
        return texts

    async def _hear_user(self) -> str | None:
        """What the user says to the agent, after as many calls of its own as it likes; None = the end. Raises
        RoleError: the user says nothing, or does nothing but call tools."""
        for _ in range(CALLS_IN_A_ROW):
            reply = await self._user.say(*self._to_user)
            self._to_user = []
            self._steps += 1
            answer = read_answer(reply.text, self._user_tools)
            if self._user_tools and (answer.calls or answer.malformed):
                self._to_user = [_text_for_user(words.result_text(self._user_results(answer.calls)))]
                if self._errors[USER] >= self._config.max_errors:
                    raise RoleError(f"user: {self._errors[USER]} failed calls of its tools")
                if self._over:  # by calls of both sides
                    return None
                continue
            text = answer.text.strip()
            if not text:
                raise RoleError("user: an empty message")
            self._lines.append(f"{USER}: {text}")
            return None if any(end in text for end in words.ENDS) else text
        raise RoleError(f"user: {CALLS_IN_A_ROW} calls of tools in a row, without a word to the agent")

    def _user_results(self, calls: Sequence[Call]) -> list[str]:
        allowed = {tool.name for tool in self._user_tools}
        if not calls or any(call.name not in allowed for call in calls):
            self.counters["user_calls"] += max(1, len(calls))
            self.counters["user_failed_calls"] += 1
            self._errors[USER] += 1
            self._steps += 1
            wrong = next((call.name for call in calls if call.name not in allowed), None)
            return [MALFORMED if wrong is None else f"Error: Tool '{wrong}' not found."]
        return self._calls(USER, calls)


def _with_line_end(message: Message) -> Message:
    return Message(message.role, f"{message.content}\n")


def _text_for_user(text: str) -> Message:
    """What the user is told after its own words."""
    return Message("user", f"\n{text}\n")
