"""Arithmetic that a policy writes, computed as Python's `eval` computes it, but never for long.

A policy may write 9**9**9**9, which Python would compute until the machine is full. So the expression is read as a
syntax tree whose nodes are computed here, and whole numbers may not grow without end.
"""

from __future__ import annotations

import ast
import operator
import warnings
from typing import Any

MOST_CHARS = 10_000
MOST_BITS = 65_536  # of a whole number; a float ends at 1,024
_TOO_LARGE = "int too large to convert to float"
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> Any:
    """The value of an expression of numbers, + - * / // **, and parentheses.

    Raises:
      SyntaxError, TypeError, ZeroDivisionError, OverflowError, RecursionError...: as `eval` would.
    """
    if not isinstance(expression, str):
        raise TypeError("eval() arg 1 must be a string, bytes or code object")
    if len(expression) > MOST_CHARS:
        raise OverflowError(f"an expression may have {MOST_CHARS} characters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "3(4)": "perhaps you missed a comma"
        tree = ast.parse(expression.lstrip(" \t"), "<string>", "eval")
    return _value(tree.body)


def _value(node: ast.AST) -> Any:
    """The value of a node; a long sum, which leans to the left, takes no deep recursion."""
    pending = []
    while isinstance(node, ast.BinOp):
        pending.append(node)
        node = node.left
    value = _single(node)
    for operation in reversed(pending):
        value = _applied(operation.op, value, _value(operation.right))
    return value


def _single(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):  # "()": there is no comma
        return ()
    if isinstance(node, ast.Call):
        raise TypeError(f"'{type(_value(node.func)).__name__}' object is not callable")
    assert isinstance(node, ast.UnaryOp), ast.dump(node)
    return _OPERATORS[type(node.op)](_value(node.operand))


def _applied(sign: ast.operator, a: Any, b: Any) -> Any:
    is_int_power = isinstance(sign, ast.Pow) and isinstance(a, int) and isinstance(b, int)
    if is_int_power and abs(a) > 1 and a.bit_length() * b > MOST_BITS:
        raise OverflowError(_TOO_LARGE)
    value = _OPERATORS[type(sign)](a, b)
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise OverflowError(_TOO_LARGE)
    return value
