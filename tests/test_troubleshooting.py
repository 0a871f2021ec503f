"""docs/troubleshooting.md explains what the product prints: every message of the page is one of the source's."""

from __future__ import annotations

import ast
import re

import pytest

from tests.tiny_run import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
CELLS = [line.split(" | ")[0].lstrip("| ") for line in PAGE.splitlines() if line.startswith("| ")]
# What other programs print (Python, XLA), and files.
OTHERS = ("No module named ...", "RESOURCE_EXHAUSTED", "fleet/weights", "fleet/logs/*.stacks")
MESSAGES = [m for cell in CELLS for m in re.findall(r"`([^`]+)`", cell) if m not in OTHERS]


def texts(tree: ast.AST) -> list[str]:
    """Every text of a file as a template: a value that is put in is one character \\0."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            out.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            out.append(node.value)
    return out


@pytest.fixture(scope="module")
def templates() -> list[str]:
    files = sorted((ROOT / "jaxagent").rglob("*.py"))
    return [text for file in files for text in texts(ast.parse(file.read_text(encoding="utf-8")))]


def is_printed(message: str, templates: list[str]) -> bool:
    """Whether what stands around the message's "..." comes, in this order and with a value between, from one text."""
    pieces = message.split("...")
    form, longest = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL), max(pieces, key=len)
    return any(longest in text and form.search(text) for text in templates)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_one_of_the_source(message, templates):
    assert max(map(len, message.split("..."))) >= 8, "too little of it is said to be found"
    assert is_printed(message, templates)


def test_the_page_has_the_commonest_mistakes_and_the_check_sees_what_is_none(templates):
    assert len(MESSAGES) >= 35
    for wrong in (
        "Unknown config feild ...",
        "mesh needs ... devices, this machine has none",
        "port ...: Cannot listen",
    ):
        assert not is_printed(wrong, templates)
    known = texts(ast.parse('f"a {x} b" "c" f"{y}"\nprint("d")'))
    assert known == ["a \0 bc\0", "d"] and is_printed("a ... bc...", known) and not is_printed("a b", known)
