"""One attempt at one task: messages of the policy in, the customer's words and tools' answers out; and the reward.

The reward is the published one, 1 or 0. It is 1 where the conversation has ended (the customer said "###STOP###", or
the policy transferred the customer to a human), the shop's data are what the task's own actions make of fresh data, and
every text of the task's outputs occurs in something that the policy said, letters' case and the policy's commas aside.
A conversation that the last turn does not end has reward 0 and counts as TURN_LIMIT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxagent.envs.base import Attempt, Message, Observation, Step, Transcript, Verdict
from jaxagent.envs.cast import Cast, Talk
from jaxagent.envs.tau import prompts, rows, toolbox
from jaxagent.envs.tau.formats import CONTENT, FORMATS, RESPOND
from jaxagent.envs.tau.store import ShopStore
from jaxagent.envs.tau2.rewards import communicated
from jaxagent.envs.tau2.words import STOP
from jaxagent.types import StopReason, Task

if TYPE_CHECKING:
    from jaxagent.envs.tau.environment import TauBench

ROLE = "user"  # who plays the customer
SOLVED = "solved"


class TauAttempt(Attempt):
    """One attempt at one task."""

    def __init__(
        self,
        task: Task,
        cast: Cast,
        config: TauBench,
        store: ShopStore,
        prompt: tuple[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        self._task, self._config, self._store = task, config, store
        self._policy, self._tools = prompt
        self._format = FORMATS[config.tools]
        self._shop = store.open()
        self._cast = cast
        self._customer: Talk | None = None
        self._turns = 0
        self._over = False
        self._spoken_texts: list[str] = []
        self.stop_strings: Sequence[str] = self._format.stop_strings
        self.tool_prefixes: Sequence[str] = self._format.prefixes
        self.counters: dict[str, float] = dict.fromkeys(
            ("tool_calls", "tool_errors", "customer_replies", "invalid_actions", "ignored_calls", "transfers"), 0.0
        )

    async def start(self) -> Sequence[Message]:
        """The shop's policy, its tools, and the customer's first words."""
        self._customer = self._cast.talk(ROLE)
        opening = (await self._customer.say(*prompts.to_customer(self._task.prompt))).text
        self.counters["customer_replies"] += 1
        return self._format.messages(opening, self._policy, self._tools)

    async def step(self, action: str) -> Step:
        """Speaks to the customer, calls a tool, or says why the message does neither."""
        self._turns += 1
        try:
            name, arguments, ignored = self._format.parse(action, self._tools)
        except ValueError as error:
            self.counters["invalid_actions"] += 1
            return self._go_on(self._format.refused(f"Error: {error}"))
        self.counters["ignored_calls"] += ignored
        if name == RESPOND:
            assert self._customer is not None
            self._spoken_texts.append(arguments[CONTENT])
            reply = (await self._customer.say(Message("user", arguments[CONTENT]))).text
            self.counters["customer_replies"] += 1
            self._over = STOP in reply
            return self._go_on(self._format.after(name, reply))
        answer = toolbox.call(self._shop, name, arguments)
        self.counters["tool_calls"] += 1
        self.counters["tool_errors"] += answer.startswith(("Error", "Unknown action"))
        if name in toolbox.TERMINATING:
            self.counters["transfers"] += 1
            self._over = True
        return self._go_on(self._format.after(name, answer))

    def _go_on(self, observation: Observation) -> Step:
        if self._over:
            return Step(stop_reason=StopReason.ANSWER)
        return Step(stop_reason=StopReason.TURN_LIMIT) if self._turns >= self._config.max_turns else Step(observation)

    async def verify(self, transcript: Transcript) -> Verdict:
        """The published reward; the components tell what of it there is."""
        metadata = self._task.metadata
        data = float(self._shop.digest() == self.goal())
        outputs_said = float(communicated(metadata["outputs"], self._spoken_texts))
        solved = float(self._over and data and outputs_said)
        return Verdict(solved, {SOLVED: solved, "data": data, "outputs": outputs_said, "ended": float(self._over)})

    async def solve(self) -> bool:
        """Does what the task's actions do and says its outputs, after which the customer ends the conversation."""
        self._make_actions(self._shop)
        self._spoken_texts += self._task.metadata["outputs"]
        return await self.idle()

    async def idle(self) -> bool:
        """The customer ends the conversation, whatever was done."""
        self._over = True
        return True

    def goal(self) -> str:
        """The digest of what the task's actions make of fresh data."""
        shop = self._store.open()
        self._make_actions(shop)
        return shop.digest()

    def _make_actions(self, shop: Any) -> None:
        actions = self._task.metadata["actions"]
        toolbox.replay(shop, ((action["name"], rows.passed_arguments(action)) for action in actions))
