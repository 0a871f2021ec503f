"""What an environment of the verifiers interface has to offer: its rows, prompts, tools and reward functions.

Nothing here needs the package verifiers: an environment is any object with

    dataset, eval_dataset         sequences of rows, or get_dataset() and get_eval_dataset()
    rubric                        funcs and weights (or reward_funcs, get_reward_funcs(), ...), or a group of `rubrics`
    oai_tools or tool_defs        tools, in OpenAI's form or without its outer layer; may be missing
    rollout, or setup_state, env_response, is_completed, max_turns
"""

from __future__ import annotations

import inspect
import json
import logging
import signal
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.choice import object_at
from jaxagent.config.errors import as_config_error
from jaxagent.envs import forms
from jaxagent.envs.base import Message
from jaxagent.tools.calls import Tool, with_tools
from jaxagent.types import Task

logger = logging.getLogger(__name__)

SOLVED = "solved"  # the score in reports
OF_A_GROUP = {"prompts", "completions", "answers", "states", "tasks", "infos"}  # parameters of such a function


def load(make: str, arguments: str) -> Any:
    """The environment that "module:function" returns for a JSON object of arguments. Raises ConfigError: it cannot be
    made, or has not what an environment has."""
    if not make:
        raise ConfigError("config.env.make is empty: name a function, such as my_package.my_module:load_environment.")
    options = forms.json_object(arguments, "config.env.arguments")
    function = object_at(make, "config.env.make")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with as_config_error(f"config.env.make='{make}'"):
            environment = function(**options)
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:  # the package would end the run in its own way
                signal.signal(number, handler)
    for name in ("rubric",) if hasattr(environment, "rollout") else ("env_response", "is_completed", "rubric"):
        if not hasattr(environment, name):
            raise ConfigError(f"config.env.make='{make}' returns {type(environment).__name__}, which has no {name}.")
    return environment


def rows_of(environment: Any, split: str) -> Sequence[Mapping[str, Any]]:
    """The rows of "train" or "heldout"; () = it has none."""
    prefix = {"train": "", "heldout": "eval_"}[split]
    dataset = getattr(environment, f"{prefix}dataset", None)
    if dataset is None and hasattr(environment, f"get_{prefix}dataset"):
        dataset = getattr(environment, f"get_{prefix}dataset")()
    return () if dataset is None else dataset


def prompt_of(environment: Any, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row's prompt as chat messages. Raises ValueError: it has none, or one that is not text."""
    prompt = row.get("prompt")
    if prompt is None:
        if "question" not in row:
            raise ValueError(f"a row needs 'prompt' or 'question', and has {sorted(row)}")
        system = getattr(environment, "system_prompt", None)
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *(getattr(environment, "few_shot", None) or []), _user(row["question"])]
    return [_user(prompt)] if isinstance(prompt, str) else [dict(message) for message in prompt]


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text. Raises ValueError: part of it is no text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
        raise ValueError(f"a message of role {message.get('role')!r} holds more than text, which no policy here reads")
    return "".join(part["text"] for part in content)


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The tools of a request."""
    forms = [form.get("function") or form for form in tools]
    return [Tool(form["name"], form.get("description") or "", form.get("parameters") or {}) for form in forms]


def prompt_key(environment: Any, row: Mapping[str, Any]) -> str:
    """A row's prompt, to be compared with others'."""
    return json.dumps([(m.get("role"), text_of(m)) for m in prompt_of(environment, row)])


def split_rows(
    train: Sequence[str], heldout: Sequence[str], num_heldout: int, name: str
) -> dict[str, list[tuple[str, int]]]:
    """Which rows are trained on and which are held out, each as (split of the environment, number).

    Args:
      train: a key of each training row; rows of the same key are one and the same to the policy.
      heldout: likewise of the environment's held-out rows; without any the last training rows are held out, and
        training rows that are like one of these are left out.
      num_heldout: how many.
      name: of the environment, for messages.

    Raises:
      ConfigError: a held-out row is a training row, or no training rows are left.
    """
    trained = set(train)
    if shared := sum(key in trained for key in heldout):
        raise ConfigError(
            f"{name}: {shared} of its {len(heldout)} held-out rows are training rows, so its score would be that of "
            "training."
        )
    if heldout:
        return {
            "train": [("train", i) for i in range(len(train))],
            "heldout": [("heldout", i) for i in range(len(heldout))],
        }
    first = max(0, len(train) - num_heldout)
    last_rows = set(train[first:])
    rest = [i for i in range(first) if train[i] not in last_rows]
    logger.warning(
        "%s has no held-out rows of its own: the last %d of %d are held out.", name, len(train) - first, len(train)
    )
    if first and not rest:
        logger.warning("%s has no training row that is unlike a held-out one: its score is that of training.", name)
        rest = list(range(first))
    elif len(rest) < first:
        logger.warning("%s: %d training rows are like held-out ones and are left out.", name, first - len(rest))
    if not rest:
        raise ConfigError(f"{name} has too few rows: {len(train)}, all of them held out.")
    return {"train": [("train", i) for i in rest], "heldout": [("train", i) for i in range(first, len(train))]}


def place_of(task: Task) -> tuple[str, int]:
    """(split, number) of the row that a task stands for. Raises ConfigError: it names none."""
    split, number = task.metadata.get("split"), task.metadata.get("row")
    if split not in ("train", "heldout") or type(number) is not int:
        raise ConfigError(f"task {task.id!r} names no row of the environment: take --config.data.source=verifiers.")
    return split, number


def policy_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Message]:
    """Messages as the policy is shown them; tools are described in a system message."""
    texts = [(str(message.get("role", "user")), text_of(message)) for message in messages]
    return [Message(*pair) for pair in with_tools(texts, tools, several=False)]


def reward_functions(environment: Any) -> list[tuple[Callable[..., Any], float, Any]]:
    """(function, weight, its rubric) of each reward function. Raises ConfigError: functions and weights are not equally
    many, or one judges whole groups."""
    weighted, rubrics = [], [environment.rubric]
    while rubrics:
        rubric = rubrics.pop(0)
        _check_rubric(rubric)
        parts = [environment.rubric for environment in getattr(rubric, "env_map", {}).values()]
        if inner := getattr(rubric, "rubrics", None) or parts:  # a group, in which there may be groups
            rubrics[:0] = inner
            continue
        functions = list(_first(rubric, ("funcs", "reward_funcs")) or ())
        weights = list(_first(rubric, ("weights", "reward_weights")) or [1.0] * len(functions))
        if len(functions) != len(weights):
            raise ConfigError(f"config.env.make: a rubric has {len(functions)} functions and {len(weights)} weights.")
        for function, weight in zip(functions, weights, strict=True):
            signature = inspect.signature(function)
            returns = typing.get_origin(signature.return_annotation) or signature.return_annotation
            if OF_A_GROUP & set(signature.parameters) or returns is list:
                raise ConfigError(f"config.env.make: {function.__name__} judges whole groups; one episode is needed.")
            weighted.append((function, float(weight), rubric))
    return weighted


def _check_rubric(rubric: Any) -> None:
    """Raises ConfigError: it judges whole groups, by a method of its own."""
    own = [cls for cls in type(rubric).__mro__ if not cls.__module__.startswith("verifiers.")]
    for name in ("score_group", "score_rollouts"):
        if any(name in vars(cls) for cls in own):
            raise ConfigError(
                f"config.env.make: {type(rubric).__name__}.{name} judges whole groups; one episode is needed."
            )
    if getattr(rubric, "has_advantages", False):
        raise ConfigError(
            f"config.env.make: {type(rubric).__name__} gives advantages; rl.advantage computes them here."
        )


def name_of(function: Callable[..., Any]) -> str:
    """The name of a reward function in reports."""
    return getattr(function, "__name__", type(function).__name__)


def _first(rubric: Any, names: Sequence[str]) -> Any:
    for name in names:
        if hasattr(rubric, name):
            return getattr(rubric, name)
        if hasattr(rubric, f"get_{name}"):
            return getattr(rubric, f"get_{name}")()
    return None


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
