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
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent import types
from jaxagent.config import nearest
from jaxagent.data import fields
from jaxagent.data.fields import RowError

KEY = "tau2"
AGENT, USER = "assistant", "user"  # who calls a tool, and whose environment a function belongs to
BASES = ("DB", "COMMUNICATE", "ACTION", "ENV_ASSERTION", "NL_ASSERTION")
DEFAULT_BASIS = ("DB", "COMMUNICATE")
_ROW = (
    *("id", "description", "user_scenario", "ticket", "initial_state", "evaluation_criteria"),
    *("issues", "required_documents", "user_tools"),
)
_CRITERIA = ("actions", "env_assertions", "communicate_info", "nl_assertions", "reward_basis")
_STATE = ("initialization_data", "initialization_actions", "message_history")
_PARTS = {  # of structured instructions: column -> its title, in the order in which the user reads them
    "domain": "Domain",
    "reason_for_call": "Reason for call",
    "known_info": "Known info",
    "unknown_info": "Unknown info",
    "task_instructions": "Task instructions",
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
    """Converts and checks a published row.

    Raises:
      RowError: naming the column.
    """
    task = parse(row)
    return types.Task(id=task.id, prompt=task.about, answers=(), kind="", metadata={KEY: dict(row)})


def check(row: Any, column: str) -> None:
    """Raises RowError unless a row can be read; `column` says where it stands inside of another one."""
    parse(row, f"{column}.")


def parse(row: Any, prefix: str = "") -> Tau2Task:
    """Reads a row; `prefix` says where it stands inside of another row.

    Raises:
      RowError: naming the column.
    """
    row = _checked_object(row, _ROW, prefix.rstrip(".") or "*")
    if row.get("required_documents"):
        raise RowError(f"{prefix}required_documents", "tasks that need documents are not supported")
    scenario, about = _scenario(fields.get(row, "user_scenario", prefix), f"{prefix}user_scenario")
    state = _checked_object(row.get("initial_state") or {}, _STATE, f"{prefix}initial_state")
    place = f"{prefix}initial_state.initialization_data"
    data = _checked_object(state.get("initialization_data") or {}, ("agent_data", "user_data"), place)
    over = {side: dict(fields.mapping(data.get(side) or {}, f"{place}.{side}")) for side in ("agent_data", "user_data")}
    ticket = row.get("ticket")
    if ticket is not None:
        about = fields.text(row, "ticket", prefix)
    tools = row.get("user_tools")
    return Tau2Task(
        id=fields.text(row, "id", prefix),
        scenario=scenario,
        about=about,
        initialization=_each(state, "initialization_actions", f"{prefix}initial_state.", _function) or (),
        history=_history(state.get("message_history"), f"{prefix}initial_state.message_history"),
        criteria=_criteria(row.get("evaluation_criteria"), f"{prefix}evaluation_criteria"),
        user_tools=None if tools is None else fields.texts(tools, f"{prefix}user_tools"),
        **over,
    )


def _scenario(value: Any, column: str) -> tuple[str, str]:
    """(what the user is told, what it is about)."""
    scenario = _checked_object(value, ("persona", "instructions"), column)
    instructions = fields.get(scenario, "instructions", f"{column}.")
    if isinstance(instructions, str):
        about = text = fields.text(scenario, "instructions", f"{column}.")
    else:
        parts = _checked_object(instructions, _PARTS, f"{column}.instructions")
        about = fields.text(parts, "reason_for_call", f"{column}.instructions.")
        fields.text(parts, "task_instructions", f"{column}.instructions.")
        texts = {name: fields.text(parts, name, f"{column}.instructions.") for name in _PARTS if parts.get(name)}
        blocks = [f"Domain: {texts.pop('domain')}"] if "domain" in texts else []
        text = "\n".join([*blocks, *(_titled(_PARTS[name], part) for name, part in texts.items())])
    blocks = [_titled("Instructions", text)]
    if scenario.get("persona") is not None:
        blocks.insert(0, _titled("Persona", fields.text(scenario, "persona", f"{column}.")))
    return "\n".join(blocks), about


def _titled(title: str, text: str) -> str:
    return f"{title}:\n" + textwrap.indent(text, "\t")


def _criteria(value: Any, column: str) -> Criteria | None:
    if value is None:
        return None
    row = _checked_object(value, _CRITERIA, column)
    basis = row.get("reward_basis")
    basis = DEFAULT_BASIS if basis is None else fields.texts(basis, f"{column}.reward_basis")
    for number, term in enumerate(basis):
        if term not in BASES:
            raise RowError(f"{column}.reward_basis[{number}]", f"there is no '{term}'. {nearest(term, BASES)}")
    return Criteria(
        actions=_each(row, "actions", f"{column}.", _expected),
        env_assertions=_each(row, "env_assertions", f"{column}.", _function),
        communicate_info=fields.texts(row.get("communicate_info") or [], f"{column}.communicate_info"),
        nl_assertions=fields.texts(row.get("nl_assertions") or [], f"{column}.nl_assertions"),
        reward_basis=basis,
    )


def _expected(value: Any, column: str) -> ToolUse:
    keys = ("action_id", "requestor", "name", "arguments", "info", "compare_args")
    use = _use(_checked_object(value, keys, column), column)
    compared = value.get("compare_args")
    names = None if compared is None else fields.texts(compared, f"{column}.compare_args")
    return ToolUse(use.requestor, use.name, use.arguments, names)


def _function(value: Any, column: str) -> ToolUse:
    keys = ("env_type", "func_name", "arguments", "assert_value", "message")
    row = _checked_object(value, keys, column)
    expected = row.get("assert_value", True)
    if not isinstance(expected, bool):
        raise RowError(f"{column}.assert_value", f"must be true or false, got {fields.show(expected)}")
    side = _side(fields.text(row, "env_type", f"{column}."), f"{column}.env_type")
    arguments = fields.mapping(fields.get(row, "arguments", f"{column}."), f"{column}.arguments")
    return ToolUse(side, fields.text(row, "func_name", f"{column}."), dict(arguments), expected=expected)


def _history(value: Any, column: str) -> tuple[Past, ...]:
    """The messages; after those with calls come the results, in the order of the calls."""
    past, open_calls = [], []
    for number, message in enumerate(_list(value or [], column)):
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


def _past(value: Any, column: str) -> Past:
    keys = ("role", "content", "tool_calls", "id", "turn_idx", "requestor", "error", "timestamp")
    row = _checked_object(value, keys, column)
    role = fields.text(row, "role", f"{column}.")
    if role not in (USER, AGENT, "tool"):
        raise RowError(f"{column}.role", f"must be user, assistant or tool, got {role!r}")
    calls = []
    for number, call in enumerate(_list(row.get("tool_calls") or [], f"{column}.tool_calls")):
        place = f"{column}.tool_calls[{number}]"
        use = _use(_checked_object(call, ("id", "name", "arguments", "requestor"), place), place)
        calls.append((fields.text(call, "id", f"{place}."), dataclasses.replace(use, requestor=role)))
    content = row.get("content")
    if not isinstance(content or "", str) or not (calls or role == "tool" or str(content or "").strip()):
        raise RowError(f"{column}.content", f"must be text that is not blank, got {fields.show(content)}")
    name = fields.text(row, "id", f"{column}.") if role == "tool" else ""
    return Past(role, content or "", tuple(calls), name)


def _use(row: Mapping[str, Any], column: str) -> ToolUse:
    requestor = _side(row.get("requestor") or AGENT, f"{column}.requestor")
    arguments = fields.mapping(fields.get(row, "arguments", f"{column}."), f"{column}.arguments")
    return ToolUse(requestor, fields.text(row, "name", f"{column}."), dict(arguments))


def _side(value: Any, column: str) -> str:
    if value not in (AGENT, USER):
        raise RowError(column, f"must be '{AGENT}' or '{USER}', got {fields.show(value)}")
    return value


def _each(row: Mapping[str, Any], name: str, prefix: str, read: Any) -> Any:
    """A list read element by element; None where it is absent."""
    if row.get(name) is None:
        return None
    return tuple(read(element, f"{prefix}{name}[{i}]") for i, element in enumerate(_list(row[name], f"{prefix}{name}")))


def _list(value: Any, column: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise RowError(column, f"must be a list, got {fields.show(value)}")
    return value


def _checked_object(value: Any, names: Sequence[str] | Mapping[str, str], column: str) -> Mapping[str, Any]:
    """An object that has no other keys."""
    row = fields.mapping(value, column)
    for key in row:
        if key not in names:
            raise RowError(column, f"unknown key '{key}'. {nearest(str(key), names)}")
    return row
