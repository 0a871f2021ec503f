"""Tools as functions of one side's tables, and the call of one: whatever is asked for, the answer is a text.

A tool is a function whose first argument is the tables; its other arguments, their types and its docstring are what
the model is shown. `ToolRefusal` is what a tool says when it cannot do what was asked.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxagent.envs.tau2.tables import Forms, Originals, Tables, open_tables
from jaxagent.tools.calls import Tool

_TYPES: Mapping[Any, tuple[dict[str, Any], str]] = {  # annotation -> (JSON schema, in words)
    str: ({"type": "string"}, "text"),
    list[str]: ({"type": "array", "items": {"type": "string"}}, "a list of texts"),
}


class ToolRefusal(ValueError):
    """A tool cannot do what was asked. The message is shown to whoever called it.

    Args:
      text: the message; with `values`, a format for them.
    """

    def __init__(self, text: str, *values: Any) -> None:
        super().__init__(text.format(*values) if values else text)
        self.text, self.values = text, values


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """What one side of a domain can do.

    Attributes:
      forms: its tables, and what their records hold.
      tools: functions that the side's model may call.
      helpers: functions that only tasks call, to prepare the tables and to judge them.
      open: gives an attempt the tables, which are the functions' first argument.
    """

    forms: Forms
    tools: tuple[Callable[..., Any], ...]
    helpers: tuple[Callable[..., Any], ...] = ()
    open: Callable[[Originals], Tables] = open_tables

    @functools.cached_property
    def by_name(self) -> Mapping[str, Callable[..., Any]]:
        """The tools."""
        return {tool.__name__: tool for tool in self.tools}

    @functools.cached_property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """Tools and helpers."""
        return {function.__name__: function for function in (*self.tools, *self.helpers)}

    @functools.cached_property
    def described(self) -> tuple[Tool, ...]:
        """The tools as a model is shown them."""
        return tuple(map(_described, self.tools))

    def call(self, tables: Tables, name: str, arguments: Mapping[str, Any] | str) -> tuple[str, bool]:
        """Calls a tool for a model: the text of its answer, and whether it is an error, "Error: ...".

        What is published here says of missing and unknown arguments what Python says; ours is said in words.
        """
        if name not in self.by_name:
            return f"Error: Tool '{name}' not found.", True
        tool = self.by_name[name]
        try:
            if isinstance(arguments, str):
                raise ToolRefusal("the arguments must be a JSON object")
            _check(tool, arguments)
            return as_text(tool(tables, **arguments)), False
        except Exception as error:  # a call that the function did not foresee is the caller's mistake
            return f"Error: {error}", True


def as_text(value: Any) -> str:
    """What a tool returns, as the model reads it: texts as they are, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def arguments_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """A function's arguments, without the tables."""
    return dict(list(inspect.signature(function).parameters.items())[1:])


def _check(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    parameters, types = arguments_of(tool), _annotations(tool)
    for name in arguments:
        if name not in parameters:
            raise ToolRefusal(f"{tool.__name__} has no argument '{name}'")
    for name, parameter in parameters.items():
        if name not in arguments:
            if parameter.default is inspect.Parameter.empty:
                raise ToolRefusal(f"{tool.__name__} needs the argument '{name}'")
        elif not (arguments[name] is None and parameter.default is None):
            kind, _ = types[name]
            if not _fits(arguments[name], kind):
                raise ToolRefusal(f"the argument '{name}' must be {_TYPES[kind][1]}")


def _fits(value: Any, kind: Any) -> bool:
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, list) and all(isinstance(element, str) for element in value)


def _described(function: Callable[..., Any]) -> Tool:
    types, arguments = _annotations(function), arguments_of(function)
    properties = {name: {**_TYPES[kind][0], "description": words} for name, (kind, words) in types.items()}
    required = [name for name, argument in arguments.items() if argument.default is inspect.Parameter.empty]
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(function.__name__, " ".join((function.__doc__ or "").split()), parameters)


@functools.cache
def _annotations(function: Callable[..., Any]) -> Mapping[str, tuple[Any, str]]:
    """Argument -> (its type, without None; what it is, in words)."""
    hints = typing.get_type_hints(function, include_extras=True)
    annotations = {}
    for name in arguments_of(function):
        hint, words = hints[name], ""
        if typing.get_origin(hint) is typing.Annotated:
            hint, words = typing.get_args(hint)
        if hint not in _TYPES:  # str | None
            hint = next(kind for kind in typing.get_args(hint) if kind in _TYPES)
        annotations[name] = (hint, words)
    return annotations
