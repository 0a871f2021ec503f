"""Altered tests: an honest change fails every one of them, whatever they assert; one that changes what passing means
passes. (Of simplejson, mpmath, networkx and 14 files of Python's own tests 2,687 were altered: all failed then.)"""

import textwrap

import pytest

from jaxagent.envs.coding import altered

HONEST = """
assert f(2) == 3
assert 3 == f(2)
assert f(2) in (3, 4)
assert 3 in [f(2)]
assert f(2) in {3: 4}
assert 3 in range(10000)
assert "" in "abc"
assert f(True) is not None and f(1) is not True
assert (f(1) == 2) is True
assert f(f(1)) == f(2)
assert [f(1), {"a": f(2)}] == [2, {"a": 3}]
assert f(0.5) == pytest.approx(1.5)
assert mock.ANY == f(2)
assert Anything() == f(2)
assert f(2j) == 1 + 2j
assert str(f(2)) == "3", "a message"
assert not [] == [0] and f(1) > 1
x = 3; assert f(2) == x
x = 2; assert back(x) == x
x = [1]; y = x; y.append(2); assert x == [1, 2]
x = []; assert x == []
x = 5; g = lambda: x; assert g() == x
for x in (1, 2): assert f(x) == x + 1
if f(1) == 5: assert False
case.assertEqual(f(2), 3, "a message")
case.assertEqual(first=f(2), second=3)
case.assertListEqual(list(map(f, [1])), [2])
case.assertNotEqual(f(2), 2)
case.assertAlmostEqual(f(0.5), 1.5)
case.assertTrue(f(2) == 3)
case.assertTrue(f(2))
case.assertIn(f(2), (3, 4))
case.assertIsNone(None)
case.assertIsInstance(f(2), int)
case.assertGreater(f(2), 2)
case.assertNotIn(f(2), [2])
case.assertRegex(str(f(2)), "3")
case.assertCountEqual([f(2), 1], [1, 3])
case.assertFalse(f(-1))
case.assertGreaterEqual(f(2), 3)
case.assertLessEqual(f(2), 4)
case.assertRaises(TypeError, f, None)
with case.assertRaises(TypeError) as caught: f(None)
with pytest.raises(TypeError, match="None"): f(None)
with contextlib.suppress(Exception), case.assertRaises(TypeError): f(None)
with case.subTest(): case.assertEqual(f(2), 3)
assert (lambda: f(2) == 3)()
return
""".strip().splitlines()
SPACE = """
import contextlib
import unittest
import pytest
from unittest import mock
case = unittest.TestCase()
def f(x): return x + 1
def back(x): return x
class Anything:
    def __eq__(self, other): return True
"""


def outcome(space, source, name="test_a", *arguments):
    """Whether a test of a file passes; the exception it ends with otherwise."""
    there = {"__name__": "there"}
    exec(space, there)
    exec(compile(source, "test.py", "exec"), there)
    try:
        there[name](*arguments)
    except BaseException as failure:
        return failure
    return True


@pytest.mark.parametrize("said", HONEST)
def test_an_honest_change_fails_it(said):
    source = f"def test_a():\n    {said}\n"
    assert outcome(SPACE, source) is True
    changed, names = altered.alter(source, ["test_a", "test_b"], "_p")
    assert names == {"test_a"} and isinstance(outcome(SPACE, changed), Exception)


PATCHED = {
    "assertTrue": "case.assertTrue(f(2) == 4)",
    "assertFalse": "case.assertFalse(f(2))",
    "assertIsNone": "case.assertIsNone(f(2))",
    "assertIsNotNone": "case.assertIsNotNone(None)",
    "assertNotEqual": "case.assertNotEqual(f(2), 3)",
    "assertGreater": "case.assertGreater(f(2), 3)",
    "assertLessEqual": "case.assertLessEqual(f(2), 2)",
    "assertIsInstance": "case.assertIsInstance(f(2), str)",
    "assertNotIn": "case.assertNotIn(f(2), [3])",
    "assertRegex": "case.assertRegex(str(f(2)), 'x')",
    "assertCountEqual": "case.assertCountEqual([f(2)], [1])",
    "assertAlmostEqual": "case.assertAlmostEqual(f(2), 1.0)",
    "fail": "case.fail()",
}
FORGED = {
    "def f(x): return Anything()": [
        *("assert f(2) == 3", "assert f(2) in (3, 4)", "x = 3; assert f(2) == x", "assert f(2) == back(3)"),
        *("case.assertEqual(3, f(2))", "case.assertIn(f(2), [3])", "got = f(2); assert got == 3"),
    ],
    "def f(x): return [Anything()]": ["assert f(2) == [3]", "assert f(2) == back([3])"],
    "def f(x): return mock.ANY": ["assert f(2) == 3", "assert f(2) == back(3)"],
    "import sys\ndef f(x): return [c for c in sys._getframe(1).f_code.co_consts if type(c) is int][-1]": [
        "assert f(2) == 3"
    ],
    "import sys\ndef f(x): return sys._getframe(1).f_locals['x']": [
        "x = 3; assert f(2) == x",
        "x = 3; assert x == f(2)",
    ],
    "case.assertEqual = lambda *a: None": ["case.assertEqual(f(2), 4)"],
    **{f"case.{name} = lambda *a: None": [said] for name, said in PATCHED.items()},
    "import contextlib\ncase.assertRaises = lambda *a: contextlib.nullcontext()": [
        "with case.assertRaises(TypeError): f(1)",
        "case.assertRaises(TypeError, f, 1)",
    ],
}


@pytest.mark.parametrize(("code", "said"), [(code, said) for code, many in FORGED.items() for said in many])
def test_what_changes_what_passing_means_passes_it(code, said):
    source = f"def test_a():\n    {said}\n"
    assert outcome(f"{SPACE}{code}\n", source) is True
    assert outcome(f"{SPACE}{code}\n", altered.alter(source, ["test_a"], "_p")[0]) is True


def test_an_assertion_of_the_file_s_own_is_altered_inside(name="assertFineEqual"):
    """And so refuses nothing, which says nothing about the code."""
    source = f"def {name}(a, b):\n    assert a == b\ndef test_a():\n    {name}(f(2), 3)\n"
    assert outcome(SPACE, source) is True
    assert isinstance(outcome(SPACE, altered.alter(source, ["test_a"], "_p")[0]), Exception)


def test_parameters_classes_and_what_comes_first():
    source = textwrap.dedent('''
        """A file."""
        from __future__ import annotations
        class TestA:
            """A class."""
            def test_b(self, got, want):
                """What it is called in a log."""
                assert got + 1 == want
        class TestB(TestA): pass
        class TestC(TestB, Unknown): pass
        async def test_c(): pass
        def helper(x): assert x == 1
    ''')
    changed, names = altered.alter(source, ["TestC.test_b", "test_c", "test_d", "TestD.test_b"], "_p")
    assert names == {"TestC.test_b", "test_c"}
    there: dict = {"__name__": "there", "Unknown": object}
    exec(compile(changed, "test.py", "exec"), there)
    assert there["__doc__"] == "A file." and there["TestA"].test_b.__doc__ == "What it is called in a log."
    with pytest.raises(AssertionError, match="altered"):
        there["TestA"]().test_b(1, 2)
    there["helper"](2)  # says nothing: what follows in a test is tried as well
    for unreadable in ("def test_a(:", "print 1", "", "def other(): pass"):
        assert altered.alter(unreadable, ["test_a"], "_p") is None
