"""Scripted executor, verifier and generator for arithmetic word problems: what a planner can be trained with anywhere.

They are deterministic, and read the compact style of `envs/agentflow/prompts.py`. Their talents are those of the models
that they stand for: the executor turns a sub-goal into a program or a query; the generator computes one operation right
and estimates more than one; the verifier stops when the memory's last result is a number and every number of the
question has been used. It does not check whether that result is right.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
from collections.abc import Sequence

from jaxagent.envs.agentflow.reading import PYTHON
from jaxagent.envs.base import Message
from jaxagent.envs.cast import Scripted, Speaker, TextRole
from jaxagent.types import Task

MAX_CHARS = 200  # of a sub-goal that is computed: it is written by a policy
UNKNOWN = "unknown"  # what the generator says to anything but sums, differences and products of whole numbers
_SUB_GOAL = re.compile(r"Sub-Goal: (.*)\nTool Name: (\S+)\nCommand:\s*\Z", re.DOTALL)
_RESULT = re.compile(r" =(-?[0-9]+)\nVerify:\s*\Z")
_NUMBER = re.compile(r"[0-9]+")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def compute(text: str) -> tuple[int, int] | None:
    """The value of a sum, difference or product of whole numbers and its number of operations; None for other texts."""
    try:
        tree = ast.parse(text.strip(), mode="eval") if len(text) <= MAX_CHARS else None
        return None if tree is None else _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> tuple[int, int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value, 0
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        (a, before), (b, after) = _value(node.left), _value(node.right)
        return _OPERATORS[type(node.op)](a, b), before + after + 1
    raise ValueError("neither a whole number nor an operation on such")


def estimate(number: int) -> int:
    """A tenth too much: never the number itself."""
    return number + max(abs(number) // 10, 1)


def command(sub_goal: str, tool: str) -> str:
    """The executor's reply."""
    query = f"print({sub_goal})" if tool == PYTHON else sub_goal
    return f'execution = tool.execute(query="""{query}""")'


def answer(query: str) -> str:
    """The generator's reply."""
    computed = compute(query)
    if computed is None:
        return UNKNOWN
    value, operations = computed
    return str(value if operations <= 1 else estimate(value))


def conclusion(question: str, prompt: str) -> str:
    """The verifier's reply to its prompt, which shows the question once and then the memory."""
    memory = prompt.replace(question, "", 1)
    numbers_in_memory = set(_NUMBER.findall(memory))
    stop = _RESULT.search(memory) and numbers_in_memory.issuperset(_NUMBER.findall(question))
    return f"Conclusion: {'STOP' if stop else 'CONTINUE'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArithmeticExecutor(TextRole):
    """Writes a program for the Python tool, and hands the sub-goal on to the other: a command in any case, since of a
    sub-goal that cannot be computed the tool says so."""

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """A fresh conversation."""

        def write(messages: Sequence[Message]) -> str:
            match = _SUB_GOAL.search(messages[-1].content)
            return command(*match.groups()) if match else "No sub-goal."

        return Scripted(write)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArithmeticGenerator(TextRole):
    """Computes one operation right, and estimates more than one."""

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """A fresh conversation."""
        return Scripted(lambda messages: answer(messages[-1].content))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArithmeticVerifier(TextRole):
    """Stops when the last result is a number and every number of the question has been used."""

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """A fresh conversation."""
        return Scripted(lambda messages: conclusion(task.prompt, messages[-1].content))
