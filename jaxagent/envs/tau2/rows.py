"""Tasks of tau2-bench as they are published (tasks.json) -> dataclasses, each field checked. Every mistake names it.

  id, ticket                       its name; what is asked, in a line, for reports
  user_scenario                    {persona, instructions}: what the simulated user is told
  initial_state                    {initialization_data, initialization_actions, message_history}
  evaluation_criteria              {actions, env_assertions, communicate_info, nl_assertions, reward_basis}
  user_tools                       which of the domain's tools the user has; absent = all
  description, issues              for people; they are not read

A row stays as it is in `metadata["tau2"]`; the environment reads it again with `parse`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxagent import types
from jaxagent.data import fields
from jaxagent.data.fields import RowError
from jaxagent.envs.forms import TEXT, shaped

KEY = "tau2"
AGENT, USER = "assistant", "user"  # who calls a tool, and whose environment a function belongs to
BASES = ("DB", "COMMUNICATE", "ACTION", "ENV_ASSERTION", "NL_ASSERTION")
DEFAULT_BASIS = ("DB", "COMMUNICATE")
_PARTS = {  # of structured instructions: column -> its title, in the order in which the user reads them
    "domain": "Domain",
    "reason_for_call": "Reason for call",
    "known_info": "Known info",
    "unknown_info": "Unknown info",
    "task_instructions": "Task instructions",
}
_INSTRUCTIONS = {f"{name}~": str for name in _PARTS} | {"reason_for_call": TEXT, "task_instructions": TEXT}
_CALL = {"name": TEXT, "arguments": dict, "requestor~": (AGENT, USER)}
_FUNCTION = {
    **{"env_type": (AGENT, USER), "func_name": TEXT, "arguments": dict},
    **{"assert_value~": bool, "message~": object},
}
_MESSAGE = {
    **{"role": (USER, AGENT, "tool"), "content~": str, "tool_calls~": [{"id": TEXT, **_CALL}], "id~": object},
    **dict.fromkeys(("turn_idx~", "requestor~", "error~", "timestamp~"), object),
}
_CRITERIA = {
    "actions~": [{**_CALL, "action_id~": object, "info~": object, "compare_args~": [TEXT]}],
    "env_assertions~": [_FUNCTION],
    "communicate_info~": [TEXT],
    "nl_assertions~": [TEXT],
    "reward_basis~": [BASES],
}
_STATE = {
    "initialization_data~": {"agent_data~": dict, "user_data~": dict},
    "initialization_actions~": [_FUNCTION],
    "message_history~": [_MESSAGE],
}
_ROW = {
    **{"id": TEXT, "ticket~": TEXT, "user_tools~": [TEXT], "initial_state~": _STATE, "evaluation_criteria~": _CRITERIA},
    **{"user_scenario": {"persona~": TEXT, "instructions": object}},
    **dict.fromkeys(("description~", "issues~", "required_documents~"), object),
}


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """A call of a tool by the agent or by the user, or of a function of the domain by the task itself."""

    requestor: str  # AGENT or USER: who calls, or whose function the task calls
    name: str
    arguments: Mapping[str, Any]
    compare_args: tuple[str, ...] | None = None  # of one that solves a task: what ACTION compares; None = all
    expected: bool = True  # what an assertion has to return


@dataclasses.dataclass(frozen=True)
class Past:
    """A message from before the episode: words, calls, or the result of the call with the same id."""

    role: str  # "user", "assistant" or "tool"
    content: str
    calls: tuple[tuple[str, ToolUse], ...] = ()  # (id, call)
    id: str = ""  # of a result: of its call
    requestor: str = AGENT  # of a result: who called


@dataclasses.dataclass(frozen=True)
class Criteria:
    """How an episode is judged. None and () differ: with neither actions nor assertions no state is compared."""

    actions: tuple[ToolUse, ...] | None = None
    env_assertions: tuple[ToolUse, ...] | None = None
    communicate_info: tuple[str, ...] = ()
    nl_assertions: tuple[str, ...] = ()
    reward_basis: tuple[str, ...] = DEFAULT_BASIS


@dataclasses.dataclass(frozen=True)
class Tau2Task:
    """One task."""

    id: str
    scenario: str  # all that the user is told, as text
    about: str  # one paragraph for reports
    agent_data: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # laid over the agent's store
    user_data: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # laid over the user's
    initialization: tuple[ToolUse, ...] = ()
    history: tuple[Past, ...] = ()
    criteria: Criteria | None = None  # None = whoever comes to an end has solved it
    user_tools: tuple[str, ...] | None = None  # None = all of the domain's


def is_published(row: Mapping[str, Any]) -> bool:
    """Whether a row has the layout."""
    return "user_scenario" in row


def to_task(row: Mapping[str, Any]) -> types.Task:
    """Converts and checks a published row. Raises RowError: naming the column."""
    task = parse(row)
    return types.Task(id=task.id, prompt=task.about, answers=(), kind="", metadata={KEY: dict(row)})


def check(row: Any, column: str) -> None:
    """Raises RowError unless a row can be read; `column` says where it stands inside of another one."""
    parse(row, f"{column}.")


def parse(row: Any, prefix: str = "") -> Tau2Task:
    """Reads a row; `prefix` says where it stands inside of another row. Raises RowError: naming the column."""
    row = shaped(row, _ROW, prefix.rstrip("."))
    if row.get("required_documents"):
        raise RowError(f"{prefix}required_documents", "tasks that need documents are not supported")
    scenario, about = _scenario(row["user_scenario"], f"{prefix}user_scenario.instructions")
    state, criteria = row.get("initial_state", {}), row.get("evaluation_criteria")
    return Tau2Task(
        id=row["id"],
        scenario=scenario,
        about=row.get("ticket", about),
        initialization=_each(_function, state.get("initialization_actions", ())),
        history=_history(state.get("message_history", ()), f"{prefix}initial_state.message_history"),
        criteria=None if criteria is None else _criteria(criteria),
        user_tools=_each(str, row.get("user_tools")),
        **state.get("initialization_data", {}),
    )


def _scenario(scenario: Mapping[str, Any], column: str) -> tuple[str, str]:
    """(what the user is told, what it is about)."""
    if isinstance(scenario["instructions"], str):
        about = text = shaped(scenario["instructions"], TEXT, column)
    else:
        parts = shaped(scenario["instructions"], _INSTRUCTIONS, column)
        about, texts = parts["reason_for_call"], {name: parts[name] for name in _PARTS if parts.get(name)}
        blocks = [f"Domain: {texts.pop('domain')}"] if "domain" in texts else []
        text = "\n".join([*blocks, *(_titled(_PARTS[name], part) for name, part in texts.items())])
    blocks = [_titled("Persona", scenario["persona"])] if "persona" in scenario else []
    return "\n".join([*blocks, _titled("Instructions", text)]), about


def _titled(title: str, text: str) -> str:
    return f"{title}:\n" + textwrap.indent(text, "\t")


def _criteria(row: Mapping[str, Any]) -> Criteria:
    return Criteria(
        actions=_each(_call, row.get("actions")),
        env_assertions=_each(_function, row.get("env_assertions")),
        communicate_info=tuple(row.get("communicate_info", ())),
        nl_assertions=tuple(row.get("nl_assertions", ())),
        reward_basis=tuple(row.get("reward_basis", DEFAULT_BASIS)),
    )


def _call(row: Mapping[str, Any], requestor: str = "") -> ToolUse:
    compared = _each(str, row.get("compare_args"))
    return ToolUse(requestor or row.get("requestor", AGENT), row["name"], dict(row["arguments"]), compared)


def _function(row: Mapping[str, Any]) -> ToolUse:
    expected = row.get("assert_value", True)
    return ToolUse(row["env_type"], row["func_name"], dict(row["arguments"]), expected=expected)


def _each(read: Callable[[Any], Any], values: Sequence[Any] | None) -> Any:
    """Each of them, as it is read; None for None, which says something else than an empty list."""
    return None if values is None else tuple(map(read, values))


def _history(messages: Sequence[Mapping[str, Any]], column: str) -> tuple[Past, ...]:
    """The messages; after those with calls come the results, in the order of the calls."""
    past, open_calls = [], []
    for number, message in enumerate(messages):
        place = f"{column}[{number}]"
        record = _past(message, place)
        if record.role == "tool":
            if not open_calls:
                raise RowError(place, "is the result of no call")
            name, caller = open_calls.pop(0)
            if record.id != name:
                raise RowError(f"{place}.id", f"must be that of its call, {name!r}, got {record.id!r}")
            record = dataclasses.replace(record, requestor=caller)
        elif open_calls:
            raise RowError(place, f"the result of call {open_calls[0][0]!r} must come before it")
        open_calls += [(name, use.requestor) for name, use in record.calls]
        past.append(record)
    if open_calls:
        raise RowError(column, f"ends before the result of call {open_calls[0][0]!r}")
    return tuple(past)


def _past(row: Mapping[str, Any], column: str) -> Past:
    role, content = row["role"], row.get("content", "")
    calls = tuple((call["id"], _call(call, role)) for call in row.get("tool_calls", ()))
    if not (calls or role == "tool" or content.strip()):
        raise RowError(f"{column}.content", f"must be text that is not blank, got {fields.show(content)}")
    return Past(role, content, calls, fields.text(row, "id", f"{column}.") if role == "tool" else "")
