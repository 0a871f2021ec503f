"""Tests that must fail: the tests of a task, in their own places, with other expectations.

Who changes what passing means (an assertion that is patched, an object that equals everything, a value read from the
caller, a result or a log written beside the tests) passes these as well, and an honest change passes none: each test
ends with an assertion that fails, unless one about something wrong has held before. Where an assertion compares, a
constant is another constant, a local variable that is only compared has another value, and anything else is compared
with an object that is new. An exception that a test expects is one that nobody raises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Any

_EQUAL = re.compile(r"assert(?!.*([Nn]ot|Regex|[Ll]ess|[Gg]reater))\w*([Ee]quals?|[Aa]llclose|[Aa]lmost\w*|Is|In)$")
_RAISES = ("raises", "assertRaises", "assertRaisesRegex")
# What each of unittest's other assertions must refuse, beside what the test says.
_REFUSED = {
    **dict.fromkeys(("assertTrue", "assertIsNotNone"), "None"),
    **dict.fromkeys(("assertFalse", "assertIsNone"), "1"),
    **dict.fromkeys(("assertNotEqual", "assertIsNot"), "0, 0"),
    **dict.fromkeys(("assertGreater", "assertGreaterEqual"), "0, 1"),
    **dict.fromkeys(("assertLess", "assertLessEqual", "assertEqual", "assertIs"), "1, 0"),
    **{"assertNotIn": "0, [0]", "assertIn": "0, []", "assertIsInstance": "0, str", "assertNotIsInstance": "0, int"},
    **{"assertRegex": "'', 'x'", "assertNotRegex": "'x', 'x'", "assertCountEqual": "[0], []", "fail": ""},
}
_COMPARED = (ast.Eq, ast.Is, ast.In)
# What stands in an altered file, under a name that nobody knows for P.
_PRELUDE = """
class P:
    hits = []
    class Hit(BaseException): pass
    class Never(BaseException): pass
    def other(value):
        kind = type(value)
        if kind is bool: return not value
        if kind in (int, float): return 7919 - value
        if kind in (str, bytes, type(None)): return "~altered~"
        if kind in (list, tuple, set): return kind([P.other(v) for v in value][:30] or ["~"])
        return {key: P.other(value[key]) for key in list(value)[:30]} or {"~": "~"} if kind is dict else object()
    def new(value):
        if type(value) not in (list, tuple, dict) or not 0 < len(value) < 30: return object()  # differences are slow
        return {key: P.new(value[key]) for key in value} if type(value) is dict else type(value)(map(P.new, value))
    def probe(holds, a, b, ready):
        wrong = [(a, P.new(b)), (P.new(a), b)] if ready is False else [(a, [object()]), (object(), b)]
        for pair in [(a, b)] if ready else wrong:
            try:
                if holds(*pair): P.hits.append(1)
            except BaseException: pass
    def end():
        hit = bool(P.hits)
        del P.hits[:]
        raise P.Hit if hit else AssertionError("altered")
"""
_HERE: dict[str, Any] = {}
exec(_PRELUDE, _HERE)  # `other` serves here, too: constants are changed before the file is written


def alter(source: str, tests: Collection[str], place: str) -> tuple[str, set[str]] | None:
    """A file of tests, some of which must fail.

    Args:
      source: the file.
      tests: "Class.test_a" or "test_a".
      place: an identifier that occurs nowhere else.

    Returns:
      The altered file, and which of the tests are in it; None where there is none, or the file cannot be read.
    """
    try:
        tree = ast.parse(source)
        work = _Alter(tests, place, {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)})
        work.visit(tree)
        first = next((i for i, node in enumerate(tree.body) if not _is_head(node)), len(tree.body))
        tree.body[first:first] = work.read(_PRELUDE)
        found = work.theirs()
        return (ast.unparse(ast.fix_missing_locations(tree)), found) if found else None
    except (SyntaxError, ValueError, RecursionError):
        return None


def constant(node: ast.AST) -> tuple[Any, ...]:
    """(the value,) of an expression of constants; else ()."""
    try:
        return (ast.literal_eval(node),)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError):
        return ()


def _is_head(node: ast.stmt) -> bool:
    """Whether a statement stays first: the docstring, and `from __future__`."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _name(node: ast.AST) -> str:
    node = getattr(node, "func", node)
    return getattr(node, "attr", getattr(node, "id", ""))


def _compared(node: ast.AST) -> tuple[ast.expr, ...]:
    """The two sides of what says that they are equal, the same, or one in the other; () for anything else."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], _COMPARED):
        return node.left, node.comparators[0]
    if isinstance(node, ast.Call) and _EQUAL.match(_name(node)) and len(node.args) > 1:
        return () if any(isinstance(arg, ast.Starred) for arg in node.args) else tuple(node.args[:2])
    return ()


class _Alter(ast.NodeTransformer):
    def __init__(self, tests: Collection[str], place: str, defined: Collection[str]):
        self._defined = defined  # functions of the file: what they assert is altered, so that they refuse nothing
        self.altered: set[str] = set()
        self._bases: dict[str, list[str]] = {}  # class -> those of its bases that stand above it
        self._tests, self._place, self._path = tests, place, ""
        self._changed: set[str] = set()  # local variables that are only compared

    def read(self, text: str) -> list[Any]:
        """Statements, with the name that nobody knows for P."""
        return ast.parse(re.sub(r"\bP\b", self._place, text)).body

    def visit_ClassDef(self, node: Any) -> Any:
        before, self._path = self._path, f"{self._path}{node.name}."
        self.generic_visit(node)
        bases = [base for base in map(_name, getattr(node, "bases", ())) if base in self._bases]
        self._bases[node.name] = [*bases, *(above for base in bases for above in self._bases[base])]
        self._path = before
        return node

    def theirs(self) -> set[str]:
        """The tests that are altered, here or in a class that theirs inherits from."""
        return {
            test
            for test in self._tests
            if test in self.altered
            or any(
                f"{base}.{test.rpartition('.')[2]}" in self.altered
                for base in self._bases.get(test.rpartition(".")[0], ())
            )
        }

    def visit_FunctionDef(self, node: Any) -> Any:
        before, name, first = self._changed, f"{self._path}{node.name}", int(_is_head(node.body[0]))
        given = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
        self._changed = _only_compared(node, given)
        start = self.read("\n".join(f"{arg} = P.other({arg})" for arg in given if arg in self._changed))
        self.visit_ClassDef(node)
        self._changed = before
        body = [*start, *node.body[first:]] or [ast.Pass()]
        if any(test.rpartition(".")[2] == node.name for test in self._tests):
            self.altered.add(name)
            (frame,) = self.read("try:\n try: pass\n finally: P.end()\nexcept P.Hit: pass")
            frame.body[0].body, body = body, [frame]
        node.body[first:] = body
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> Any:
        if _name(node.targets[0]) in self._changed and isinstance(node.targets[0], ast.Name):
            node.value = self._other(*constant(node.value))
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        return self._probe(node.test) or node

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        if _name(call) in self._defined:
            return node
        if isinstance(call, ast.Call) and _name(call) in _RAISES and len(call.args) > 1:
            return self._never(call, node)
        refused = _REFUSED.get(_name(call)) if isinstance(call, ast.Call) else None
        if refused is None or not isinstance(call.func, ast.Attribute):
            return self._probe(call) or node
        there = ast.unparse(call.func)
        more = self.read(f"P.probe(lambda a, b: ({there}({refused}),), None, None, True)")
        said = call.args[0] if _name(call) == "assertTrue" and call.args else call
        return [*more, self._probe(said) or node]

    def visit_With(self, node: Any) -> Any:
        self.generic_visit(node)
        call = node.items[0].context_expr
        alone = len(node.items) == 1 and isinstance(call, ast.Call) and call.args  # others may swallow what it raises
        return self._never(call, node) if alone and _name(call) in {*_RAISES} - {*self._defined} else node

    def _never(self, call: ast.Call, node: ast.stmt) -> ast.stmt:
        call.args[0] = self.read("P.Never")[0].value
        (frame,) = self.read("try: pass\nexcept BaseException: pass\nelse: P.hits.append(1)")
        frame.body = [node]
        return frame

    def _probe(self, said: ast.AST) -> ast.stmt | None:
        """A statement that notes whether what is said of two sides is also true of something wrong. None: it is not
        about two sides, both are constants, or one is made to equal anything."""
        sides = list(_compared(said))
        known = [constant(side) for side in sides]
        if not sides or all(known) or any("any" in _name(n).lower() for s in sides for n in ast.walk(s)):
            return None
        ready = any(known) or any(isinstance(side, ast.Name) and side.id in self._changed for side in sides)
        if _name(said).endswith("In") or isinstance(getattr(said, "ops", [0])[0], ast.In):
            ready, known = None, [(), ()]
        sides = [self._other(*value) if value else side for side, value in zip(sides, known, strict=True)]
        (note,) = self.read(f"P.probe(lambda P_a, P_b: (0,), None, None, {ready})")
        a, b = (ast.Name(arg.arg, ast.Load()) for arg in note.value.args[0].args.args)
        if isinstance(said, ast.Compare):
            said.left, said.comparators = a, [b]
            note.value.args[0].body = said
        else:
            said.args[:2] = [a, b]  # type: ignore[attr-defined]
            note.value.args[0].body.elts = [said]  # an assertion that raises nothing holds
        note.value.args[1:3] = sides
        return note

    def _other(self, value: Any) -> ast.expr:
        text = repr(_HERE["P"].other(value))
        return self.read("object()" if "<" in text else text)[0].value


def _only_compared(node: ast.AST, given: Collection[str]) -> set[str]:
    """Parameters, and variables whose value is a constant, of which a function does nothing but compare them with what
    is neither."""
    nodes = list(ast.walk(node))
    stored = [n.targets for n in nodes if isinstance(n, ast.Assign) and constant(n.value)]
    constants = [_name(targets[0]) for targets in stored if len(targets) == 1 and isinstance(targets[0], ast.Name)]
    chosen = {*constants, *given}
    pairs = [pair for n in nodes for a, b in [_compared(n) or (n, n)] if a is not b for pair in ((a, b), (b, a))]
    sides = [_name(a) for a, b in pairs if isinstance(a, ast.Name) and not constant(b) and _name(b) not in chosen]
    uses = [n.id for n in nodes if isinstance(n, ast.Name)]
    return {name for name in chosen if 0 < sides.count(name) == uses.count(name) - constants.count(name)}
