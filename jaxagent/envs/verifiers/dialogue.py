"""An attempt's conversation as an environment of verifiers keeps it, so that its rubric sees what it always saw.

An environment of the package plays rollouts itself (`hosted.py`). An object that does without the package is asked
`is_completed(messages, state)` and `env_response(messages, state)`, as the package asked until 0.1.7.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxagent.envs.verifiers import rows
from jaxagent.envs.verifiers.hosted import Loop, Seat
from jaxagent.tools.calls import Tool
from jaxagent.types import StopReason

Caller = Callable[..., Awaitable[Any]]  # calls a function, a coroutine function or not, within its time
Messages = Sequence[Mapping[str, Any]]
STOPS = {"max_turns_reached": StopReason.TURN_LIMIT, "timeout_reached": StopReason.TIME_LIMIT}


class Classic:
    """The protocol of environments which do without the package: its own until 0.1.7.

    Attributes:
      state: what the environment knows of the attempt.
    """

    def __init__(self, environment: Any, call: Caller) -> None:
        self._environment, self._call = environment, call
        self._messages: list[Mapping[str, Any]] = []
        self._row: Mapping[str, Any] = {}
        self.state: dict[str, Any] = {}

    async def begin(self, row: Mapping[str, Any], task_id: str) -> tuple[Messages, list[Tool]]:
        """Makes the state. Returns the prompt, and the tools."""
        prompt = rows.prompt_of(self._environment, row)
        self._messages, self._row = [dict(message) for message in prompt], row
        self.state = {
            **{name: row.get(name, default) for name, default in (("answer", ""), ("task", "default"), ("info", {}))},
            "id": task_id,
            "example_id": row.get("example_id", 0),
            "input": row,
            "prompt": prompt,
            "completion": [],
            "responses": [],
            "trajectory": [],
            "turn": 0,
            "timing": dict.fromkeys(("generation_ms", "scoring_ms", "total_ms"), 0.0),
        }
        if hasattr(self._environment, "setup_state"):
            self.state = await self._call(self._environment.setup_state, self.state) or self.state
        own = rows.tools_of(self.state.get)  # a row may have its own
        return prompt, own or rows.tools_of(lambda name: getattr(self._environment, name, None))

    async def say(self, message: Mapping[str, Any], last: bool) -> tuple[StopReason | None, Messages]:
        """The policy's message. Returns how the attempt is over, or what the environment shows. `last`: no more turns
        are played."""
        await self.end(message)
        if await self._over():
            return StopReason.ANSWER, ()
        if last:
            return StopReason.TURN_LIMIT, ()
        response = await self._call(self._environment.env_response, self._messages, self.state)
        if isinstance(response, tuple):
            response, self.state = response
        texts = [{"role": "user", "content": response}] if isinstance(response, str) else response
        new = [dict(message) for message in texts]
        self._add(new)
        return StopReason.ANSWER if await self._over() else None, new

    async def end(self, message: Mapping[str, Any]) -> None:
        """A message behind which nothing comes."""
        self.state["trajectory"].append({"prompt": list(self._messages), "completion": [message]})
        self.state["responses"].append(message)
        self.state["turn"] += 1
        self._add([message])

    async def fill(self) -> None:
        """Says that the context is full behind what was answered."""
        self.state["prompt_too_long"] = True

    async def score(self) -> tuple[float, dict[str, float]]:
        """The reward, and the value of each reward function."""
        reward, scores = 0.0, dict[str, float]()
        for function, weight, rubric in rows.reward_functions(self._environment):
            parameters = inspect.signature(function).parameters.values()
            takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
            objects = rows.score_objects(self._environment, rubric, self.state, self._row)
            named = objects if takes_all else {p.name: objects[p.name] for p in parameters if p.name in objects}
            value = float(await self._call(function, **named))
            scores[rows.name_of(function)] = value
            reward += weight * value
        return reward, scores

    async def close(self) -> None:
        """Does nothing: this protocol has no clean-up."""

    async def _over(self) -> bool:
        function = self._environment.is_completed
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        return bool(await self._call(function, *([self.state] if len(own) == 1 else [self._messages, self.state])))

    def _add(self, messages: Messages) -> None:
        self._messages += messages
        self.state["completion"] = [*self.state["completion"], *messages]


class Hosted:
    """The package plays, on `loop`; the same methods as `Classic`."""

    def __init__(self, environment: Any, call: Caller, loop: Loop) -> None:
        self._environment, self._call, self._loop = environment, call, loop
        self._seat = Seat(environment)
        self._request: Mapping[str, Any] = {}

    @property
    def state(self) -> Any:
        """The package's state of the attempt."""
        return self._seat.state

    async def begin(self, row: Mapping[str, Any], task_id: str) -> tuple[Messages, list[Tool]]:
        """Begins the rollout. Returns the prompt, and the tools. Raises ValueError: it is over before it has asked."""
        request = await self._do(self._seat.begin, {**row, "prompt": rows.prompt_of(self._environment, row)})
        if request is None:
            raise ValueError(f"the rollout is over before the policy was asked: {self.state.get('error')!r}")
        self._request = request
        return request["messages"], rows.tools_of(lambda name: request.get("tools") if name == "oai_tools" else None)

    async def say(self, message: Mapping[str, Any], last: bool) -> tuple[StopReason | None, Messages]:
        """As `Classic.say`. Raises ValueError: the environment shows another conversation than took place."""
        request = await self._do(self._seat.say, message)
        if request is None:
            reason = STOPS.get(self.state.get("stop_condition"), StopReason.ANSWER)
            return (StopReason.ANSWER if getattr(self._environment, "max_turns", 0) == 1 else reason), ()
        if last:
            return StopReason.TURN_LIMIT, ()
        before, self._request = self._request["messages"], request
        own, *new = request["messages"][len(before) :] or [{}]
        if request["messages"][: len(before)] != before or rows.text_of(own) != message["content"]:
            raise ValueError("get_prompt_messages rewrites the conversation; here a conversation only grows")
        return None, new

    async def end(self, message: Mapping[str, Any]) -> None:
        """A message that was cut, behind which nothing comes."""
        await self._do(self._seat.say, message, True)
        await self.fill()

    async def fill(self) -> None:
        """Says that the context is full behind what was answered."""
        await self._do(self._seat.fill)

    async def score(self) -> tuple[float, dict[str, float]]:
        """What the package's rubric says. A rollout that was not over ends as with a full context."""
        await self.fill()
        return await self._do(self._seat.score)

    async def close(self) -> None:
        """Gives up a rollout that is not over."""
        await self._do(self._seat.close)

    async def _do(self, method: Callable[..., Any], *args: Any) -> Any:
        async def run() -> Any:
            return await self._loop.run(method(*args))

        return await self._call(run)
