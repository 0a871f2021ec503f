"""Calls of `checks` -> one small Python program that needs nothing but the standard library."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path

_CHECKS = Path(__file__).with_name("checks.py")
_NAME = re.compile(r"^\w+(?=\()", re.MULTILINE)  # the function at the beginning of a call


def call(check: str, *arguments: object) -> str:
    """The source of one call, e.g. call("content", "a", "b") -> "content('a', 'b')"."""
    if check not in _functions():
        raise ValueError(f"checks.py has no function '{check}'")
    return f"{check}({', '.join(map(repr, arguments))})"


def program(title: str, calls: Sequence[str]) -> str:
    """The calls after the functions they need, these after the imports those need. Exit status 0 when all hold, else 1.

    Args:
      title: one line for people.
      calls: statements, in order.
    """
    functions, imports, uses = _functions(), _imports(), _uses()
    needed, waiting = set(), {name for line in calls for name in _NAME.findall(line)}
    while waiting:
        name = waiting.pop()
        if name in functions and name not in needed:
            needed.add(name)
            waiting |= uses[name]
    used = {name for function in needed for name in uses[function]}
    parts = [f'"""{title}"""', "\n".join(f"import {name}" for name in imports if name in used)]
    parts += [f"\n{source}\n" for name, source in functions.items() if name in needed]
    return "\n".join([*parts, *calls, 'print("passed")']) + "\n"


@functools.cache
def _uses() -> dict[str, frozenset[str]]:
    """Function -> all names in it."""
    trees = {name: ast.walk(ast.parse(source)) for name, source in _functions().items()}
    return {name: frozenset(n.id for n in tree if isinstance(n, ast.Name)) for name, tree in trees.items()}


@functools.cache
def _functions() -> dict[str, str]:
    source = _CHECKS.read_text("utf-8")
    body = ast.parse(source).body
    return {node.name: ast.get_source_segment(source, node) for node in body if isinstance(node, ast.FunctionDef)}


@functools.cache
def _imports() -> list[str]:
    body = ast.parse(_CHECKS.read_text("utf-8")).body
    return [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
