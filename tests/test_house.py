"""Budgets of the house: how long the package may be, how many classes it has, and that no name is borne too often."""

import ast
import collections
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1] / "jaxagent"
SOURCES = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in SOURCES.items()}
CLASSES = [
    (node.name, path) for path, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MOST_LINES = 84_050  # with web agents, branching and measured tasks; the goal was 66,000 before


def code_lines(path: pathlib.Path) -> int:
    """Lines of a file that are neither empty, nor a comment, nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(map(str.strip, SOURCES[path].splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and i not in docstrings for i, line in lines)


def test_the_package_grows_no_more():
    assert sum(text.count("\n") for text in SOURCES.values()) <= MOST_LINES
    assert max(text.count("\n") for text in SOURCES.values()) <= 450


def test_at_most_15_classes_per_1000_lines_of_code():
    assert 1_000 * len(CLASSES) / sum(map(code_lines, SOURCES)) <= 15


def test_no_class_name_is_borne_more_than_twice():
    files = collections.defaultdict(list)
    for name, path in CLASSES:
        files[name].append(str(path))
    assert {name: where for name, where in files.items() if len(where) > 2} == {}
