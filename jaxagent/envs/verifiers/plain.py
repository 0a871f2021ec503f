"""The rollout and the rubric of an object that does without the package verifiers, as the package had them until 0.1.7:
`dataset`, `rubric`, `env_response(messages, state)`, `is_completed(messages, state)`, and maybe `setup_state`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jaxagent.envs.verifiers import rows


async def play(
    environment: Any, row: Mapping[str, Any], ask: Callable[..., Awaitable[Mapping[str, Any] | None]]
) -> Any:
    """Plays a row, of which the prompt is messages. Returns the state; its completion grows message by message.

    `ask` gets a request of OpenAI's chat, and returns {"message", "finish_reason"}; None: the context is full.
    """
    messages = [dict(message) for message in row["prompt"]]
    completion: list[Mapping[str, Any]] = []
    state: Any = {"answer": "", "task": "default", "info": {}, "example_id": 0, **row, "input": row}
    state |= {"completion": completion, "responses": [], "trajectory": [], "turn": 0, "prompt_too_long": False}
    state["timing"] = dict.fromkeys(("generation_ms", "scoring_ms", "total_ms"), 0.0)
    if hasattr(environment, "setup_state"):
        state = await _called(environment.setup_state, state) or state
    is_completed = environment.is_completed
    own = [p for p in inspect.signature(is_completed).parameters.values() if p.kind is not p.VAR_KEYWORD]
    while True:
        offered = (state.get("oai_tools"), *(getattr(environment, name, None) for name in ("oai_tools", "tool_defs")))
        tools = next(filter(None, offered), ())
        reply = await ask({"messages": list(messages), "tools": tools})
        if reply is None:
            return {**state, "prompt_too_long": True}
        message = _open(reply["message"])
        state["trajectory"].append({"prompt": list(messages), "completion": [message]})
        state["responses"].append(message)
        state["turn"] += 1
        new: Any = [message]
        for _ in range(2):
            messages += new
            completion += new
            if reply["finish_reason"] == "length" or await _called(is_completed, *[messages, state][-len(own) :]):
                return state
            if new == [message] and state["turn"] >= environment.max_turns:
                return {**state, "stop_condition": "max_turns_reached"}
            if new == [message]:
                response = await _called(environment.env_response, messages, state)
                response, state = response if isinstance(response, tuple) else (response, state)
                new = [{"role": "user", "content": response}] if isinstance(response, str) else list(response)


async def score(environment: Any, state: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """The weighted sum of the rubric's functions, and the value of each."""
    reward, scores = 0.0, dict[str, float]()
    for function, weight, rubric in rows.reward_functions(environment):
        objects = {name: state.get(name) for name in ("prompt", "completion", "answer", "task", "info")}
        objects |= {**{k: v for k, v in state["input"].items() if k not in objects}, "state": state}
        objects["parser"] = getattr(rubric, "parser", getattr(environment, "parser", None))
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = objects if takes_all else {p.name: objects[p.name] for p in parameters if p.name in objects}
        scores[rows.name_of(function)] = value = float(await _called(function, **named))
        reward += weight * value
    return reward, scores


async def _called(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    result = function(*args, **named)
    return await result if inspect.isawaitable(result) else result


class _Open(dict[str, Any]):
    """A dict whose entries are attributes too: environments read tool calls in either way."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _open(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Open({key: _open(one) for key, one in value.items()})
    return [_open(one) for one in value] if isinstance(value, list) else value
