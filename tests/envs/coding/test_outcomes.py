"""Logs as the frameworks write them, against the frameworks' own result objects: real unittest and real pytest."""

import json
import os
import random
import re
import subprocess
import sys
import time

import pytest

from jaxagent.envs.coding import outcomes

# Runs the tests of the module `odd` verbosely, and writes what the framework itself says of each into truth.json.
_UNITTEST = """
import json, sys, unittest
seen = {}
class Result(unittest.TextTestResult):
    def startTest(self, test):
        super().startTest(test)
        seen[test.id()] = {"name": str(test), "doc": test.shortDescription(), "said": []}
    def note(self, test, status):
        if test.id() in seen: seen[test.id()]["said"].append(status)
    def addSuccess(self, test): super().addSuccess(test); self.note(test, "PASSED")
    def addFailure(self, test, error): super().addFailure(test, error); self.note(test, "FAILED")
    def addError(self, test, error): super().addError(test, error); self.note(test, "ERROR")
    def addExpectedFailure(self, test, error): super().addExpectedFailure(test, error); self.note(test, "XFAIL")
    def addUnexpectedSuccess(self, test): super().addUnexpectedSuccess(test); self.note(test, "FAILED")
    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note(test, "SKIPPED")
    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None: self.note(test, "FAILED")
import odd
suite = unittest.defaultTestLoader.loadTestsFromModule(odd)
unittest.TextTestRunner(verbosity=2, resultclass=Result).run(suite)
json.dump(list(seen.values()), open("truth.json", "w"))
"""
_BODIES = {
    "pass": "pass",
    "fail": "self.fail('a - b\\n... ok')",
    "error": "raise ValueError('ok')",
    "skip": "self.skipTest('no ... reason')",
    "sub_pass": "for i in range(3):\n        with self.subTest(i=i): pass",
    "sub_fail": "for i in range(3):\n        with self.subTest('m', i=i): self.assertNotEqual(i, 1)",
    "sub_skip": "for i in range(3):\n        with self.subTest(i=i): self.skipTest('r') if i else None",
    "expected": "self.fail()",
    "unexpected": "pass",
}
_DOCS = (
    *("", "", "The sum of %d.", "Number %d ... of many", "Ends in %d ok", "If %d, a key is", "Looks (like.it%d)"),
    *("Is %d (a.b) [c] (d)", "FAIL: %d", "Two lines %d\\n        and more"),
)
_NAMES = (
    "test_%d",
    "test %d with blanks",
    "test_%d - dash",
    "test_%d[a b]",
    "test_%d é",
    "test_%d::x",
)
_WRITES = (  # what a test writes meanwhile that is no status
    *(
        "",
        "",
        "print('a line')",
        "print('no end', end='')",
        "print('loading ... done')",
        "print('loading ... ', end='')",
    ),
    *("sys.stderr.write('Internal Server Error: /x/\\n')", "print('Applying 0001... OK')", "print('look')", "print()"),
    *("print('=' * 20)", "print('m (x.y) says hello')"),
)
_FORGES = (
    "print('ok')",
    "print('\\nok\\n')",
    "print('test_0 (odd.T.test_0) ... ok')",
    "print('FAIL: x (odd.T.x)')",
    "print('FAIL')",
)


def _module(rng, writes):
    lines = ["import sys, unittest", "class T(unittest.TestCase): pass"]
    for number in range(120):
        name, body = rng.choice(_NAMES) % number, rng.choice(sorted(_BODIES))
        doc = rng.choice(_DOCS)
        lines += [f"def f{number}(self):"]
        lines += [f'    """{doc % number}"""'] if doc else []
        lines += [f"    {rng.choice(writes) or 'pass'}", f"    {_BODIES[body]}"]
        if body in ("expected", "unexpected"):
            lines += [f"f{number} = unittest.expectedFailure(f{number})"]
        lines += [f"setattr(T, {name!r}, f{number})"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("forged", [False, True])
def test_unittests_log_says_what_its_result_objects_say(tmp_path, forged):
    """120 tests of odd names, docstrings, subtests and output. What a test forges never makes one look better."""
    (tmp_path / "odd.py").write_text(_module(random.Random(forged), _FORGES if forged else _WRITES), "utf-8")
    env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "-c", _UNITTEST], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log = ran.stdout.decode()
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert len(truth) == 120, log
    found = outcomes.of_unittest(log)
    wrong = []
    for test in truth:
        passed = bool(test["said"]) and all(status in outcomes.PASSING for status in test["said"])
        for name in filter(None, (test["name"], test["doc"])):
            read = outcomes.required_passed(found, [name])
            if read != passed and (read or not forged):
                wrong.append((name, test["said"], read))
    assert not wrong, log


# Django 5.2's runner (manage.py test --verbosity 2); and Python 3.8's unittest, where failed subtests have no status.
_DJANGO = """\
Applying sites.0002_alter_domain_unique... OK
System check identified no issues (0 silenced).
test_doc (app.tests.A.test_doc)
If form data is provided, a parent's auto-generated alternate key is ... ok
test_faildoc (app.tests.A.test_faildoc)
Fails - surely. ... FAIL
test_glued (app.tests.A.test_glued) ... a line ... without endok
test_out (app.tests.A.test_out) ... Testing against Django installed in '/x' with up to 2 processes
Internal Server Error: /x/
ok
test_skip (app.tests.A.test_skip) ... skipped 'no ... reason'
test_sub (app.tests.A.test_sub)
With subtests ... of it ...
  test_sub (app.tests.A.test_sub) (i=1)
With subtests ... of it ... FAIL
test_subok (app.tests.A.test_subok) ... ok
test_old_sub (app.tests.A) ... test_old_after (app.tests.A) ... ok
test_old_doc_sub (app.tests.A)
Its doc ... test_old_doc_after (app.tests.A)
Another doc ... ok

======================================================================
FAIL: test_old_sub (app.tests.A) (i=1)
----------------------------------------------------------------------
"""


def test_logs_of_django():
    found = outcomes.of_unittest(_DJANGO)
    good = (
        *("test_doc (app.tests.A)", "If form data is provided, a parent's auto-generated alternate key is"),
        *("test_glued (app.tests.A.test_glued)", "test_out (app.tests.A)", "test_subok (app.tests.A)"),
        *("test_old_after (app.tests.A)", "test_old_doc_after (app.tests.A)", "Another doc"),
    )
    bad = (
        *("test_faildoc (app.tests.A)", "Fails - surely.", "test_skip (app.tests.A)", "test_sub (app.tests.A)"),
        *("With subtests ... of it", "test_old_sub (app.tests.A)", "test_old_doc_sub (app.tests.A)", "Its doc"),
    )
    assert [name for name in good if not outcomes.required_passed(found, [name])] == []
    assert [name for name in bad if outcomes.required_passed(found, [name])] == []


def test_a_hostile_log_is_read_in_time_that_grows_with_its_length():
    """Lines of which a search that goes back could not come to an end, among the framework's own."""
    hostile = (
        "a (" * 3 + "b.c) [" * 99_999,
        " ... skipped '" * 99_999,
        " ... x" * 99_999,
        "x (a.b) (" * 99_999,
        "(" * 999_999,
    )
    log = "".join(f"test_{i} (m.C) ... {line}\nok\n{line}\n" for i, line in enumerate(hostile * 3))
    started = time.process_time()
    found = outcomes.of_unittest(log)
    assert outcomes.of_pytest(log) == {} and outcomes.required_passed(found, ["test_0 (m.C)", "test_14 (m.C)"])
    assert time.process_time() - started < 3.0 and sum(map(len, found)) < 1_000_000


_IDS = (
    *(
        "a - b",
        "a - c",
        "a",
        "a b",
        "[x]",
        "x]y",
        "]",
        "[",
        "(p) - q",
        "é",
        "::",
        "a::b - c",
        "\n",
        "'q'",
        "PASSED",
        " ",
    ),
    *("FAILED x", "tail -", "- head", "a/b.py", "ok ... ok", "a - b - c", "x" * 90, "a[0] - b"),
)
_PLUGIN = """
import json
said = {}
def pytest_runtest_logreport(report):
    status = report.outcome if report.when == "call" or report.outcome != "passed" else ""
    if hasattr(report, "wasxfail"):
        status = "xpassed" if report.passed else "xfailed"
    if status: said.setdefault(report.nodeid, []).append(status)
def pytest_sessionfinish(session): json.dump(said, open("truth.json", "w"))
"""


def test_pytests_log_says_what_its_reports_say(tmp_path):
    (tmp_path / "plugin.py").write_text(_PLUGIN)
    (tmp_path / "test_odd.py").write_text(
        f"import pytest\nIDS = {_IDS!r}\n"
        "@pytest.fixture\ndef broken(): raise ValueError('a] - b')\n"
        "each = pytest.mark.parametrize('x', range(len(IDS)), ids=IDS)\n"
        "class TestC:\n"
        "    @each\n    def test_even(self, x): assert x % 2 == 0, f'no] - {x} - [0]'\n"
        "    @each\n    def test_odd(self, x): assert x % 2, '- x'\n"
        "@each\n@pytest.mark.xfail(reason='a] - b')\ndef test_x(x): assert x % 2\n"
        "@each\ndef test_skipped(x): pytest.skip('r - s') if x % 2 else None\n"
        "@each\ndef test_broken(x, broken): pass\n"
        "def test_plain(): pass\ndef test_fails(): raise ValueError('[a] - b')\n"
    )
    argv = [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "plugin", "-p", "no:cacheprovider", "-o", "addopts="]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"COLUMNS": "80"}
    ran = subprocess.run(argv, cwd=tmp_path, env=env | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert len(truth) == 5 * len(_IDS) + 2
    found = outcomes.of_pytest(ran.stdout)
    wrong = []
    for name, said in truth.items():
        passed = all(status in ("passed", "xfailed") for status in said)
        read = outcomes.required_passed(found, [name])
        ambiguous = "] - " in name  # an id that may as well be a shorter one with a message: never read as better
        if read != passed and (read or not ambiguous):
            wrong.append((name, said, read))
    assert not wrong, re.sub(r"\n(?!PASSED|FAILED|ERROR|X).*", "", ran.stdout)
