"""The world of one attempt: the agent's tables and the user's, what both may call, and how a task begins in it.

world = World(DOMAINS["mock"], stock)
world.prepare(task)                                  # initial data, initial actions, the calls of the history
world.call(ToolUse(AGENT, "create_task", {...}))     # the agent's, and with USER the user's
world.holds(assertion)
world.differences() == gold(domain, stock, task)     # whether both stores are as the task's actions leave them
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from jaxagent.config import nearest
from jaxagent.data.fields import RowError, show
from jaxagent.envs.forms import shaped
from jaxagent.envs.tau2 import mock, retail
from jaxagent.envs.tau2.rows import AGENT, USER, Tau2Task, ToolUse
from jaxagent.envs.tau2.tables import Originals, Tables, digest, laid_over
from jaxagent.envs.tau2.toolkit import Toolkit, ToolRefusal, arguments_of

Differences = Mapping[tuple[str, str, str], str]  # (side, table, key) -> the record as text

NOTHING = Toolkit(forms={}, tools=())


Domain = Mapping[str, Toolkit]  # of AGENT and of USER, who without tools only talks
DOMAINS: Mapping[str, Domain] = {
    "mock": {AGENT: mock.AGENT, USER: mock.USER},
    "retail": {AGENT: retail.AGENT, USER: NOTHING},
}
Stock = Mapping[str, Originals]  # of both sides: what every attempt begins with, and nobody writes into


class World:
    """Both sides' tables, as one attempt changes them."""

    def __init__(self, domain: Domain, stock: Stock) -> None:
        self._domain = domain
        self._tables: dict[str, Tables] = {side: domain[side].open(stock[side]) for side in (AGENT, USER)}

    def call(self, use: ToolUse) -> tuple[str, bool]:
        """A call by the agent or by the user, each of its own tools: the answer, and whether it is an error."""
        return self._domain[use.requestor].call(self._tables[use.requestor], use.name, use.arguments)

    def run(self, function: ToolUse) -> Any:
        """Calls a function that the task names: a tool or a helper. Raises ToolRefusal, TypeError: it does not take
        these arguments, or cannot do what was asked."""
        return self._domain[function.requestor].functions[function.name](
            self._tables[function.requestor], **function.arguments
        )

    def holds(self, assertion: ToolUse) -> bool:
        """Whether an assertion returns what is wanted. One about something that is not there does not hold."""
        try:
            return self.run(assertion) is assertion.expected
        except ToolRefusal:  # published code fails here; but that there is no such task is the agent's doing
            return False

    def prepare(self, task: Tau2Task) -> None:
        """Makes the world what it is when the task begins. Raises RowError: the task does not fit the domain; names its
        column."""
        for side, update in ((AGENT, task.agent_data), (USER, task.user_data)):
            self._lay_over(side, update)
        for number, function in enumerate(task.initialization):
            column = f"initial_state.initialization_actions[{number}]"
            check_function(self._domain, function, column)
            try:
                self.run(function)
            except ToolRefusal as error:
                raise RowError(column, str(error)) from None
        self._repeat(task)

    def differences(self) -> Differences:
        """All that is no longer as it was. Equal differences from one stock are equal hashes of both stores."""
        return {
            (side, name, key): text
            for side, tables in self._tables.items()
            for name, table in tables.items()
            for key, text in table.differences().items()
        }

    def digest(self, side: str) -> str:
        """The published hash of one side's store."""
        return digest(self._tables[side])

    def _lay_over(self, side: str, update: Mapping[str, Any]) -> None:
        forms, tables = self._domain[side].forms, self._tables[side]
        column = f"initial_state.initialization_data.{'agent_data' if side == AGENT else 'user_data'}"
        for name, records in update.items():
            if name not in forms:
                raise RowError(f"{column}.{name}", f"there is no such table. {nearest(name, forms)}")
            if not isinstance(records, Mapping):
                raise RowError(f"{column}.{name}", f"must be an object, got {show(records)}")
            for key, record in records.items():
                record_after = laid_over(tables[name].get(key, {}), record)
                tables[name].add(key, shaped(record_after, forms[name], f"{column}.{name}.{key}"))

    def _repeat(self, task: Tau2Task) -> None:
        """Makes the calls of the history again, and compares what they give with what is written there."""
        results = {past.id: past.content for past in task.history if past.role == "tool"}
        for number, past in enumerate(task.history):
            for name, use in past.calls:
                if use.name not in self._domain[use.requestor].by_name:
                    continue  # the model that wrote the history called something that there is not: nothing happened
                text, _ = self.call(use)
                if _value(text) != _value(results[name]):
                    column = f"initial_state.message_history[{number}]"
                    raise RowError(column, f"{use.name} gives {show(text)}, and not what is written there")


def gold(domain: Domain, stock: Stock, task: Tau2Task) -> Differences:
    """What the task's own actions leave behind. Actions that give an error are part of some tasks, and do nothing."""
    world = World(domain, stock)
    world.prepare(task)
    if task.criteria is not None:
        for action in task.criteria.actions or ():
            world.call(action)
    return world.differences()


def check_task(domain: Domain, task: Tau2Task) -> None:
    """Whether the domain has everything that a task names. Raises RowError: naming the column."""
    for number, name in enumerate(task.user_tools or ()):
        if name not in domain[USER].by_name:
            raise RowError(f"user_tools[{number}]", f"the user has no '{name}'. {nearest(name, domain[USER].by_name)}")
    if task.criteria is None:
        return
    for number, action in enumerate(task.criteria.actions or ()):
        tools = domain[action.requestor].by_name
        if action.name not in tools:
            column = f"evaluation_criteria.actions[{number}].name"
            raise RowError(column, f"the {action.requestor} has no tool '{action.name}'. {nearest(action.name, tools)}")
        argument_names = arguments_of(tools[action.name])
        for place, names in (("arguments", action.arguments), ("compare_args", action.compare_args or ())):
            if wrong := next((name for name in names if name not in argument_names), ""):
                column = f"evaluation_criteria.actions[{number}].{place}"
                raise RowError(column, f"{action.name} has no argument '{wrong}'. {nearest(wrong, argument_names)}")
    for number, assertion in enumerate(task.criteria.env_assertions or ()):
        column = f"evaluation_criteria.env_assertions[{number}]"
        check_function(domain, assertion, column)
        if inspect.signature(domain[assertion.requestor].functions[assertion.name]).return_annotation != "bool":
            raise RowError(f"{column}.func_name", f"'{assertion.name}' does not say yes or no")


def check_function(domain: Domain, function: ToolUse, column: str) -> None:
    """Whether there is such a function, and takes such arguments. Raises RowError: naming the column."""
    functions = domain[function.requestor].functions
    if function.name not in functions:
        hint = nearest(function.name, functions)
        raise RowError(f"{column}.func_name", f"the {function.requestor} has no '{function.name}'. {hint}")
    try:
        inspect.signature(functions[function.name]).bind(None, **function.arguments)
    except TypeError as error:
        raise RowError(f"{column}.arguments", f"{function.name}: {error}") from None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
