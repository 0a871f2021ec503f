"""Small bugs in Python source: places found in the syntax tree, replaced in the text: a diff of a line or two.

compare     < for <=, == for !=, is for is not, in for not in, and the other way round
arithmetic  + for -, * for //, ...
boolean     and for or; `not` left out; a condition inverted
constant    n + 1 for n, False for True
bound       a[i + 1:] for a[i:]
return      None for the value
branch      nothing in the place of what an `if` without `else` does
arguments   the first two of a call swapped
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

_COMPARE = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One bug: bytes of a file that are replaced."""

    kind: str
    line: int  # from 1
    start: int  # bytes
    end: int
    replacement: str

    def apply(self, source: str) -> str:
        """The file with the bug."""
        data = source.encode()
        return (data[: self.start] + self.replacement.encode() + data[self.end :]).decode()


def mutations(source: str) -> list[Mutation]:
    """All bugs that can be put into a file, in the order of their places; each leaves a file that parses.

    Raises:
      SyntaxError: the file is no Python.
    """
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    found = []
    for mutation in sorted(set(finder.found), key=lambda m: (m.start, m.end, m.kind, m.replacement)):
        try:
            ast.parse(mutation.apply(source))
        except (SyntaxError, ValueError):
            continue
        found.append(mutation)
    return found


class _Finder(ast.NodeVisitor):
    """Looks at the bodies of functions only: what stands outside of them is mostly imports and tables."""

    def __init__(self, source: str):
        self.found: list[Mutation] = []
        self._data = source.encode()
        self._lines = [0]
        for line in self._data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._inside = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Its body, without annotations, defaults and decorators."""
        self._inside += 1
        for statement in node.body:
            self.visit(statement)
        self._inside -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Its value."""
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Nothing: before Python 3.12 the places of what stands inside are wrong."""

    def generic_visit(self, node: ast.AST) -> None:
        """Every other node, after its own bugs."""
        if self._inside:
            for mutation in self._of(node):
                self.found.append(mutation)
        super().generic_visit(node)

    def _of(self, node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
                yield from self._operator("compare", left, right, *_COMPARE[type(op)])
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            texts = any(
                isinstance(side, ast.Constant | ast.JoinedStr) and _is_text(side) for side in (node.left, node.right)
            )
            if not texts:  # "%s" % x and "a" + b would only raise
                yield from self._operator("arithmetic", node.left, node.right, *_ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            if len(node.values) == 2:
                yield from self._operator("boolean", *node.values, *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._replaced("boolean", node, self._text(node.operand))
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.Constant):
                yield self._replaced("boolean", node.test, f"not ({self._text(node.test)})")
            if isinstance(node, ast.If) and not node.orelse:
                yield self._replaced("branch", (node.body[0], node.body[-1]), "pass")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield self._replaced("constant", node, str(value))
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if isinstance(bound, ast.Name | ast.Attribute):
                    yield self._replaced("bound", bound, f"{self._text(bound)} + 1")
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield self._replaced("return", node.value, "None")
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            first, second = node.args[:2]
            texts = self._text(first), self._text(second)
            if texts[0] != texts[1] and not any(isinstance(side, ast.Starred) for side in (first, second)):
                between = self._data[self._end(first) : self._start(second)].decode()
                yield self._replaced("arguments", (first, second), f"{texts[1]}{between}{texts[0]}")

    def _operator(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Mutation]:
        """The operator between two operands, where no comment or second operator stands there."""
        start, end = self._end(left), self._start(right)
        gap = self._data[start:end].decode()
        pattern = re.escape(old).replace(r"\ ", r"\s+")
        places = list(re.finditer(rf"\b{pattern}\b" if old[0].isalpha() else pattern, gap))
        if len(places) == 1 and "#" not in gap:
            at = start + len(gap[: places[0].start()].encode())
            yield Mutation(kind, left.end_lineno or 0, at, at + len(places[0][0].encode()), new)

    def _replaced(self, kind: str, node: ast.AST | tuple[ast.AST, ast.AST], text: str) -> Mutation:
        first, last = node if isinstance(node, tuple) else (node, node)
        return Mutation(kind, first.lineno, self._start(first), self._end(last), text)  # type: ignore[attr-defined]

    def _start(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        return self._data[self._start(node) : self._end(node)].decode()


def _is_text(node: ast.Constant | ast.JoinedStr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes)
