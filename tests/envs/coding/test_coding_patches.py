"""Patches cut into files, what is left out of them, SWE-RL's likeness, and logs of tests."""

import tarfile

import pytest

from jaxagent.envs.coding import outcomes, patches
from jaxagent.envs.coding.task import from_task
from jaxagent.types import Task

ONE = """diff --git a/foo.txt b/foo.txt
index 83db48f..f73504f 100644
--- a/foo.txt
+++ b/foo.txt
@@ -1,4 +1,4 @@
-Hello world
+Hello World
 This is a file
-With some lines
+With some changed lines
 End
"""
TAB = "\t"  # what git writes behind a name with a blank
TWO = ONE.replace("some changed lines", "some changed")
THREE = TWO.replace("foo.txt", "bar.txt")


def change(path, mode="100644", old="/dev/null"):
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\nindex 0000000..ce01362\n--- {old}\n"
        f"+++ b/{path}{TAB if ' ' in path else ''}\n"
        "@@ -0,0 +1 @@\n+diff --git a/x b/x\n"
    )


def test_a_patch_is_cut_at_its_files_only():
    found = patches.split("preamble\n" + ONE + change("a b/c.py") + change("d.py"))
    assert [c.path for c in found] == ["foo.txt", "a b/c.py", "d.py"]
    assert "".join(c.text for c in found) == ONE + change("a b/c.py") + change("d.py")
    gone = "diff --git a/e.py b/e.py\ndeleted file mode 100644\n--- a/e.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    quoted = 'diff --git "a/t\\tb.py" "b/t\\tb.py"\n--- "a/t\\tb.py"\n+++ "b/t\\tb.py"\n@@ -1 +1 @@\n-x\n+y\n'
    mode = "diff --git a/f.sh b/f.sh\nold mode 100644\nnew mode 100755\n"
    assert [c.path for c in patches.split(gone + quoted + mode)] == ["e.py", "t\tb.py", "f.sh"]


@pytest.mark.parametrize(
    "text",
    [
        change(".git/config"),
        change("a/.GIT/hooks/x"),
        change("../x"),
        change("/etc/x"),
        change("tests/test_a.py"),
        change("tests"),
        change("tests/conftest.py"),
        change("here", mode="120000"),
        change("sub", mode="160000"),
        change("x").replace("+++ b/x", "+++ b/tests/test_a.py"),
        change("x", old="a/y"),
        change("tests/test_a.py/x"),
        change("tests/test_a/__init__.py"),
        change("a/x.egg-info/entry_points.txt"),
        change("a/.gitattributes"),
        # As other readers compare names: importlib.metadata, `patch`, some file systems.
        *map(change, ("./tests/test_a.py", "tests//test_a.py", "tests/./test_a.py", "tests/test_a.py/.", "./z.py")),
        *map(
            change,
            ("Tests/Test_A.py", "tests/\uff54est_a.py", "X.EGG-INFO/entry_points.txt", "a/x-1.Dist-Info/METADATA"),
        ),
        *map(
            change,
            ("ConfTest.py", "a/PyTest.ini", "fractions.py", "src/json/__init__.py", "pluggy.py", "unittest/mock.py"),
        ),
        change("tests/test_a.py 2020-01-01 00:00:00").replace(TAB, ""),
        *map(change, ("tests/test_a.py\r", "tests/test_a.py\tx", '"tests/test_a.py"')),
        'diff --git "a/tests/test\\137a.py" "b/tests/test\\137a.py"\n--- "a/tests/test\\137a.py"\n'
        '+++ "b/tests/test\\137a.py"\n@@ -1 +1 @@\n-x\n+y\n',
        change("a.pyc").replace("+diff", "+\0diff"),
        "diff --git a/x b/y\nrename from x\nrename to y\n",
        # What `git diff` never prints, and `git apply` obeys: who owns the sandbox can have replaced git.
        "diff --git a/x b/x\nsimilarity index 100%\nrename from y\nrename to tests/test_a.py\n",
        change("x") + "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-x\n+y\n",
        change("x") + "Index: tests/test_a.py\n",
        change("x") + "@@ -1,2 +1,1 @@\n-x\n",
        "diff --git a/x.bin b/x.bin\nindex 1..2 100644\nBinary files a/x.bin and b/x.bin differ\n",
    ],
)
def test_what_decides_the_judgement_is_left_out(text):
    kept, dropped = patches.keep(ONE + text + change("z.py"), ["tests/test_a.py"], patches.STEERS)
    assert kept == ONE + change("z.py") and len(dropped) == 1


def test_what_git_prints_is_kept():
    """A file that gets a package's name where no test's module is, no line end at the end, and another encoding."""
    end = "\\ No newline at end of file\n"
    bare = "diff --git a/x b/x\nindex 1..2 100644\n--- a/x\n+++ b/x\n"
    bare += f"@@ -1,2 +1 @@ f\n-\udce9\n-y\n{end}+@@ -1 +1 @@\n{end}"
    empty = "diff --git a/p/__init__.py b/p/__init__.py\nnew file mode 100755\nindex 0000000..e69de29\n"
    empty += change("profile/models.py") + change("a/json.py")  # a package of this name is theirs, or is nobody's
    edited = ONE.replace("foo.txt", "tests/__init__.py")
    kept = patches.keep(bare + empty + edited, ["tests.py", "tests/test_a.py"], patches.STEERS)
    assert kept == (bare + empty + edited, ())


def test_what_a_solution_may_change(tmp_path):
    """In a row that brings its repository: every source but those of tests, and new files."""
    files = (
        "pkg/a.py",
        "pkg/b.py",
        "pkg/c.txt",
        "other/a.py",
        "x.ini",
        "run.py",
        "lib/Tests/b.py",
        "lib/Tests/data.csv",
    )
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in files[:4]:
            archive.addfile(tarfile.TarInfo(f"./{name}"))
    about = {"files": dict.fromkeys(files[4:], ""), "archive": "a.tar", "patch": ONE.replace("foo.txt", "pkg/a.py")}
    about["check_tests"] = {"fail_to_pass": ["lib/Tests/x/test_a.py::test_a"]}
    tried = (*files, "pkg/new.py", "new.py", "pkg/tests.py", "lib/tests/new.py", "lib/new.py")

    def left_out(about):
        task = from_task(Task("t", "x", (), "", {"coding": about}), tmp_path)
        text = "".join(change(name).replace("new file mode 100644\n", "") for name in tried)
        return set(patches.keep(text, task.protected, patches.STEERS)[1])

    tests = {"lib/Tests/b.py", "lib/Tests/data.csv", "lib/tests/new.py"}
    assert left_out(about) == tests | {"pkg/c.txt", "x.ini"}
    # Of a published row the tests' folder; of one whose oracle changes that folder, the tests.
    assert left_out(about | {"image": "i"}) == tests
    assert left_out(about | {"image": "i", "patch": ONE.replace("foo.txt", "lib/Tests/b.py")}) == set()
    assert patches.test_folder("a/testing/tests/test_a.py") == "a/testing/tests" and not patches.test_folder(
        "test_a.py"
    )


def test_what_the_harness_brought_is_not_counted():
    kept = patches.keep(change("PROBLEM_STATEMENT.md"), [], patches.HARNESS)
    assert kept == ("", ())


def test_likeness_of_patches():
    """The cases of SWE-RL's own tests."""
    assert 0.9 < patches.likeness(TWO, ONE) < 1.0
    assert patches.likeness(ONE, ONE) == 1.0
    assert patches.likeness(THREE, ONE) == 0.0
    assert patches.likeness(ONE + THREE, ONE) == 0.5
    assert patches.likeness("", "") == 1.0


def test_likeness_by_hand():
    """12 and 10 characters, of which the first 8 and the last one are equal: 2 * 9 / 22."""
    old, new = (patches.FileChange("a", text) for text in ("@@ -1 +1 @@\n-a\n+bc", "@@ -1 +1 @@\n-a\n+d"))
    assert (old.hunks, new.hunks) == ("@@ -1,1 +1,1 @@\n-a\n+bc", "@@ -1,1 +1,1 @@\n-a\n+d")
    head = "diff --git a/a b/a\n--- a/a\n+++ b/a\n"
    same = len("@@ -1,1 +1,1 @@\n-a\n+")
    assert patches.likeness(head + new.text, head + old.text) == 2 * same / (2 * same + 3)


LOG = """
PASSED tests/forged.py::test_before
=========================== short test summary info ============================
\x1b[32mPASSED\x1b[0m tests/a.py::test_a
PASSED tests/a.py::test_b[x y]
FAILED tests/a.py::C::test_c - assert 1 == 2
ERROR tests/b.py - ImportError
SKIPPED [1] tests/a.py:3: no reason
XFAIL tests/a.py::test_d - reason
FAILED tests/a.py::test_e
PASSED tests/a.py::test_e
1 failed, 2 passed
"""


def test_logs_of_pytest():
    found = outcomes.of_pytest(LOG)
    assert found == {
        "tests/a.py::test_a": "PASSED",
        "tests/a.py::test_b[x y]": "PASSED",
        "tests/a.py::C::test_c": "FAILED",
        "tests/b.py": "ERROR",
        "[1] tests/a.py:3: no reason": "SKIPPED",
        "tests/a.py::test_d": "XFAIL",
        "tests/a.py::test_e": "FAILED",
    }
    assert outcomes.required_passed(found, ["tests/a.py::test_a", "tests/a.py::test_b[x", "tests/a.py::test_d"])
    for missing in ("tests/a.py::C::test_c", "tests/a.py::test_e", "tests/a.py::none", "tests/forged.py::test_before"):
        assert not outcomes.required_passed(found, ["tests/a.py::test_a", missing])
    assert not outcomes.required_passed(found, [])
    assert not outcomes.forged(found, 1) and outcomes.forged({"a": "PASSED"}, 1) and not outcomes.forged({}, 0)


def test_maps_of_r2e():
    found = outcomes.of_r2e(LOG)
    assert found["C.test_c"] == "FAILED" and found["test_a"] == "PASSED" and "test_before" not in found
    assert outcomes.same_map({"a - x": "PASSED"}, {"\x1b[1ma": "PASSED"})
    assert not outcomes.same_map({"a": "PASSED", "": "ERROR"}, {"a": "PASSED"})  # a file that could not be read counts
    assert outcomes.same_map({"a": "PASSED", "": "ERROR"}, {"a": "PASSED", "": "FAILED"})  # its status does not
    assert not outcomes.same_map({"a": "PASSED"}, {"a": "PASSED", "b": "FAILED"})
    assert not outcomes.same_map({"a": "PASSED", "b": "PASSED"}, {"a": "PASSED", "b": "FAILED"})
