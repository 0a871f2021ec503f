"""An attempt's conversation as an environment of verifiers keeps it, so that its rubric sees what it always saw.

The package had two protocols. Until 0.1.7 an environment is asked `is_completed(messages, state)` and
`env_response(messages, state)`, and `state["completion"]` grows message by message. Since 0.1.8 it makes its own state
(`init_state`), is asked `get_prompt_messages(state)` and `is_completed(state)`, and makes the completion of the
trajectory when all is over; since 0.1.10 or so messages are objects. `open_dialogue` takes the one that the
environment speaks.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxagent.envs.verifiers import rows

Caller = Callable[..., Awaitable[Any]]  # calls a function of the environment, within its time
Messages = Sequence[Mapping[str, Any]]


def open_dialogue(environment: Any, call: Caller) -> Classic | Stepped:
    """The conversation of a new attempt."""
    return (Stepped if hasattr(environment, "get_prompt_messages") else Classic)(environment, call)


class Classic:
    """The protocol until 0.1.7, and that of environments which do without the package.

    Attributes:
      state: what the environment knows of the attempt.
    """

    def __init__(self, environment: Any, call: Caller) -> None:
        self._environment, self._call = environment, call
        self._messages: list[Mapping[str, Any]] = []
        self.state: dict[str, Any] = {}

    async def begin(self, row: Mapping[str, Any], task_id: str) -> Messages:
        """Makes the state. Returns the prompt."""
        prompt = rows.prompt_of(self._environment, row)
        self._messages = [dict(message) for message in prompt]
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
        return prompt

    async def say(self, message: Mapping[str, Any], cut: bool = False) -> None:
        """Adds the policy's message."""
        self.state["trajectory"].append({"prompt": list(self._messages), "completion": [message]})
        self.state["responses"].append(message)
        self.state["turn"] += 1
        self._add([message])

    async def over(self) -> bool:
        """Whether the environment is done with the attempt."""
        function = self._environment.is_completed
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        return bool(await self._call(function, *([self.state] if len(own) == 1 else [self._messages, self.state])))

    async def answer(self) -> Messages | None:
        """The environment's next messages; None: it is done with the attempt."""
        response = await self._call(self._environment.env_response, self._messages, self.state)
        if isinstance(response, tuple):
            response, self.state = response
        texts = [{"role": "user", "content": response}] if isinstance(response, str) else response
        new = [dict(message) for message in texts]
        self._add(new)
        return None if await self.over() else new

    async def fill(self) -> None:
        """Says that the context is full behind what was answered."""
        self.state["prompt_too_long"] = True

    async def finish(self) -> None:
        """Does nothing: the completion has grown message by message."""

    async def clean(self) -> None:
        """Does nothing: this protocol has no clean-up."""

    def _add(self, messages: Messages) -> None:
        self._messages += messages
        self.state["completion"] = [*self.state["completion"], *messages]


class Stepped:
    """The protocol since 0.1.8, with the same methods as `Classic`."""

    def __init__(self, environment: Any, call: Caller) -> None:
        self._environment, self._call = environment, call
        maker = next((cls for cls in type(environment).__mro__ if "init_state" in vars(cls)), type(environment))
        self._package = maker.__module__.partition(".envs")[0]
        self._prompt: list[Any] = []  # to the policy, in the environment's own form
        self._is_clean = False
        self.state: Any = {}

    async def begin(self, row: Mapping[str, Any], task_id: str) -> Messages:
        """Has the environment make its state. Returns the prompt."""
        full_row = {**row, "prompt": rows.prompt_of(self._environment, row)}
        client = _no_client(self._imported("clients", "Client"))
        self.state = await self._call(self._environment.init_state, full_row, client, "policy", {})
        self.state = await self._call(self._environment.setup_state, self.state) or self.state
        self._prompt = list(await self._call(self._environment.get_prompt_messages, self.state))
        return [_plain(message) for message in self._prompt]

    async def say(self, message: Mapping[str, Any], cut: bool = False) -> None:
        """Adds the policy's message as a step of the trajectory."""
        form = self._imported("utils.message_utils", "from_raw_message") or (lambda raw: raw)
        step = {"prompt": self._prompt, "completion": [form(message)], "is_truncated": cut, "extras": {}}
        step |= dict.fromkeys(("response", "tokens", "reward", "advantage"))
        step["trajectory_id"] = self.state.get("trajectory_id")
        if hasattr(self._environment, "add_trajectory_step"):
            await self._call(self._environment.add_trajectory_step, self.state, step)
        else:
            self.state["trajectory"].append(step)

    async def over(self) -> bool:
        """Whether the environment is done with the attempt."""
        return bool(await self._call(self._environment.is_completed, self.state))

    async def answer(self) -> Messages | None:
        """The environment's next messages; None: it is done with the attempt. Raises ValueError: the environment shows
        another conversation than the one that took place."""
        before = [*self._prompt, *self.state["trajectory"][-1]["completion"]]
        messages = list(await self._call(self._environment.get_prompt_messages, self.state))
        if self.state.get("final_env_response") is not None:
            return None if await self.over() else []
        if messages[: len(before)] != before:
            raise ValueError("get_prompt_messages rewrites the conversation; here a conversation only grows")
        self._prompt = messages
        return [_plain(message) for message in messages[len(before) :]]

    async def fill(self) -> None:
        """Says that the context is full behind what was answered. Some versions add a message of their own then."""
        self.state |= {"prompt_too_long": True, "is_truncated": True}
        make = self._imported("utils.message_utils", "get_overlong_prompt_dummy_response")
        if make is not None:
            await self.say({"role": "assistant", "content": make("chat").choices[0].message.content}, cut=True)

    async def finish(self) -> None:
        """Has the environment make the completion, whatever ended the attempt, and clean up."""
        if self.state.get("completion") is None:  # 0.1.8 renders it when it finds itself completed
            render = getattr(self._environment, "render_completion", None) or self._environment._render_completion
            await self._call(render, self.state)
        await self.clean()

    async def clean(self) -> None:
        """Lets the environment give back what the attempt holds, once."""
        function = getattr(self._environment, "cleanup", None) or getattr(self._environment, "_cleanup", None)
        if self.state and function is not None and not self._is_clean:
            self._is_clean = True
            await self._call(function, self.state)

    def _imported(self, module: str, name: str) -> Any:
        """Something of the package's; None where this version has it not."""
        try:
            return getattr(importlib.import_module(f"{self._package}.{module}"), name, None)
        except ImportError:
            return None


def _plain(message: Any) -> Mapping[str, Any]:
    return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)


def _no_client(base: type | None) -> Any:
    """What an environment takes for its client: here nobody asks it for anything, since the policy speaks itself."""

    def refuse(*args: Any, **named: Any) -> Any:
        raise RuntimeError("this environment asks the model itself; here only the policy's own turns are played")

    names = getattr(base, "__abstractmethods__", ())
    return type("Policy", (base or object,), {"__init__": lambda self: None, **dict.fromkeys(names, refuse)})()
