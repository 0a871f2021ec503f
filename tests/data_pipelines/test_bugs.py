"""Tasks made from repositories: bugs in source text, candidates, statements, and whole runs on a tiny repository."""

import ast
import asyncio
import json
import os
import subprocess

import pytest

from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.data_pipelines.bugs import __main__ as command
from jaxagent.data_pipelines.bugs import candidates, make, mutate, repositories, tasks
from jaxagent.data_pipelines.bugs.bench import Run
from jaxagent.data_pipelines.bugs.repositories import Repository
from jaxagent.envs.coding import patches
from jaxagent.sandbox import choose
from tests.envs.coding import tiny

SOURCE = '''"""Text: 1 + 2 < 3."""

LIMIT = 3 + 4


def clamp(x: int = 1 + 1, low=0, /, *, high=10) -> int:
    """Returns x < high."""
    if not x:
        return None
    if (x < low  # lower
            or x is None):
        x = max(low, -1)
    é = x[low:] if False else "ü" + "a"
    while x not in (high,):
        x += f(low, high) // 2
    return (x - 1)
'''
# kind -> (line as it is, line as it becomes); by hand
HAND = {
    "compare": {
        ("    while x not in (high,):", "    while x in (high,):"),
        ("    if (x < low  # lower", "    if (x <= low  # lower"),
        ("            or x is None):", "            or x is not None):"),
    },
    "arithmetic": {
        ("        x += f(low, high) // 2", "        x += f(low, high) * 2"),
        ("    return (x - 1)", "    return (x + 1)"),
    },
    "boolean": {
        ("    if not x:", "    if x:"),
        ("    if not x:", "    if not (not x):"),
        ("    while x not in (high,):", "    while not (x not in (high,)):"),
    },
    "constant": {
        ("        x = max(low, -1)", "        x = max(low, -2)"),
        ('    é = x[low:] if False else "ü" + "a"', '    é = x[low:] if True else "ü" + "a"'),
        ("        x += f(low, high) // 2", "        x += f(low, high) // 3"),
        ("    return (x - 1)", "    return (x - 2)"),
    },
    "bound": {('    é = x[low:] if False else "ü" + "a"', '    é = x[low + 1:] if False else "ü" + "a"')},
    "return": {("    return (x - 1)", "    return (None)")},
    "branch": {("        return None", "        pass"), ("        x = max(low, -1)", "        pass")},
    "arguments": {
        ("        x = max(low, -1)", "        x = max(-1, low)"),
        ("        x += f(low, high) // 2", "        x += f(high, low) // 2"),
    },
}


def changed(old: str, new: str) -> tuple[str, str] | None:
    """The line that differs, where one does."""
    pairs = [(a, b) for a, b in zip(old.split("\n"), new.split("\n"), strict=False) if a != b]
    return pairs[0] if len(pairs) == 1 and old.count("\n") == new.count("\n") else None


def test_bugs_are_those_that_hands_find():
    found = mutate.mutations(SOURCE)
    by_kind = {}
    for mutation in found:
        text = mutation.apply(SOURCE)
        ast.parse(text)
        assert text.split("\n")[:6] == SOURCE.split("\n")[:6] and text != SOURCE  # nothing outside of functions
        if (pair := changed(SOURCE, text)) is not None:
            by_kind.setdefault(mutation.kind, set()).add(pair)
    assert by_kind == HAND
    several = [m.apply(SOURCE) for m in found if changed(SOURCE, m.apply(SOURCE)) is None]
    assert len(several) == 1 and "if (not (x < low  # lower\n            or x is None)):" in several[0]


def test_a_diff_is_one_that_git_applies(tmp_path):
    old, new = "a\x0cb\nü\r\nlast", "a\x0cc\nü\r\nlast\n"
    (tmp_path / "x.py").write_bytes(old.encode())
    (tmp_path / "p").write_bytes(candidates.diff("x.py", old, new).encode())
    subprocess.run(["git", "apply", "p"], cwd=tmp_path, check=True)
    assert (tmp_path / "x.py").read_bytes() == new.encode()
    assert [c.path for c in patches.split(candidates.diff("x.py", old, new))] == ["x.py"]


MORE = """from calc import add


def largest(xs):
    best = xs[0]
    for x in xs:
        if x > best:
            best = x
    return best


def mean(xs):
    return sum(xs) / len(xs)
"""
TEST_MORE = """from calc import more


def test_largest():
    assert more.largest([1, 3, 2]) == 3


def test_mean():
    assert more.mean([1, 2]) == 1.5
"""
FILES = {
    "calc/__init__.py": tiny.GOOD,
    "calc/more.py": MORE,
    "calc/unused.py": "def f(x):\n    return x + 1\n",
    "tests/test_calc.py": tiny.PYTEST,
    "tests/test_more.py": TEST_MORE,
    "tests/test_broken.py": "import no_such_module\n",
    "setup.py": "print(1 + 1)\n",
}


def repository(name="calc", **files) -> Repository:
    return Repository(name, "1", {path: text.encode() for path, text in (FILES | files).items()})


def test_sources_and_tests_are_told_apart():
    found = repository()
    assert list(found.sources) == ["calc/__init__.py", "calc/more.py", "calc/unused.py"]
    assert found.tests == ("tests/test_broken.py", "tests/test_calc.py", "tests/test_more.py")


def test_the_order_of_candidates_is_the_seeds():
    first, again, other = ([c.id for c in candidates.of_mutations(repository(), seed)] for seed in (0, 0, 1))
    assert first == again != other and sorted(first) == sorted(other) and len(set(first)) == len(first) > 10
    kinds = [(c.module, c.kind) for c in candidates.of_mutations(repository(), 0)]
    assert len(set(kinds[:5])) == 5  # by turns


def test_a_statement_names_tests_and_not_the_change():
    broken = tiny.GOOD.replace("a + b", "a - b")
    candidate = candidates.Candidate(
        repository(), "x", "calc/__init__.py", {}, candidates.diff("c.py", broken, tiny.GOOD), ()
    )
    said = {"t::a": "AssertionError: assert <X at 0x7f0c630861d0> == 5\nwhere", "t::b": "it says return a + b here"}
    text = tasks.statement(candidate, ["t::a", "t::b", *map(str, range(9))], said)
    assert "- t::a: AssertionError: assert <X at ...> == 5\n" in text and "- t::b\n" in text and "- and 3 more" in text
    assert "a + b" not in text and "a - b" not in text and "where" not in text


def test_modules_are_not_divided():
    splits = {tasks.split_of("calc", f"m{i}.py", 0.5) for i in range(50)}
    assert splits == {"train", "heldout"} and {tasks.split_of("a", "b", 0.0)} == {"train"}
    assert tasks.split_of("a", "b", 1.0) == "heldout"


class FakeBench:
    """Tests of a candidate whose results are given."""

    def __init__(self, *runs):
        self.runs = list(runs)

    async def run(self, broken, good, files):
        return self.runs.pop(0)


@pytest.mark.parametrize(
    ("base", "runs", "why"),
    [
        ([{"t::a": "FAILED"}] * 2, [], "no test passes"),
        ([{"t::a": "PASSED"}, {"t::a": "FAILED"}], [], "no test passes"),
        ([{"t::a": "PASSED"}] * 2, [{"t::a": "PASSED"}], "no test fails"),
        ([{"t::a": "PASSED"}] * 2, [{}], "do not end"),
        ([{"t::a": "PASSED", "t::b": "PASSED"}] * 2, [{"t::a": "FAILED"}], "cannot be loaded"),
        ([{"t::a": "PASSED"}] * 2, [{"t::a": "FAILED"}, {"t::a": "FAILED"}, {"t::a": "PASSED"}], "flaky"),
        ([{"t::a": "PASSED", "t::b": "PASSED"}] * 2, [{"t::a": "FAILED", "t::b": "ERROR"}], "too many"),
    ],
)
def test_what_is_no_task(base, runs, why, tmp_path):
    candidate = next(candidates.of_mutations(repository(), 0))
    bench = FakeBench(*(Run(run, {}) for run in runs))
    made = tasks.make(candidate, [Run(run, {}) for run in base], bench, None, tmp_path, "", tasks.Options(1.0, 1, 0.2))
    with pytest.raises(tasks.Rejected, match=why):
        asyncio.run(made)
    assert not bench.runs


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A git repository with a fix in its history, and a data set that has its tools already."""
    place = tmp_path / "calc"
    place.mkdir()

    def git(*arguments):
        names = ["-c", "user.name=x", "-c", "user.email=x@y"]
        dates = {"GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z"}
        command = ["git", *names, *arguments]
        subprocess.run(command, cwd=place, check=True, capture_output=True, env={**os.environ, **dates})

    git("init", "-q")
    texts = FILES | {"calc/more.py": FILES["calc/more.py"].replace("x > best", "x < best")}
    texts["tests/test_more.py"] = FILES["tests/test_more.py"].replace("test_largest", "nothing")
    for state in (texts, FILES):
        for path, text in state.items():
            (place / path).parent.mkdir(exist_ok=True)
            (place / path).write_text(text)
        git("add", "-A")
        git("commit", "-qm", "x")

    def pack_tools(folder, needs):
        assert not needs
        (folder / "archives").mkdir(parents=True, exist_ok=True)
        (folder / "archives" / "tools.tar").write_bytes(tiny.packed_pytest())
        return "archives/tools.tar"

    monkeypatch.setattr(repositories, "pack_tools", pack_tools)
    try:
        asyncio.run(_one_sandbox())
    except ConfigError as failure:
        pytest.skip(str(failure))
    return place, tmp_path / "out"


async def _one_sandbox():
    async with make.sandboxes(tuple(choose.SAFE)):
        pass


@pytest.mark.slow
def test_a_repository_becomes_tasks(workplace, capsys):
    """Started, cut off, and started again: the same tasks as in one go; each verified by the real verifier."""
    place, out = workplace
    arguments = [f"--repository={place}", f"--out={out}", "--count=3", "--heldout_frac=0.7"]
    assert command.main(arguments) == 0
    rows = {split: [json.loads(line) for line in (out / f"{split}.jsonl").open()] for split in ("train", "heldout")}
    both = rows["train"] + rows["heldout"]
    assert len(both) == 3 and rows["train"] and rows["heldout"]
    assert not {r["metadata"]["module"] for r in rows["train"]} & {r["metadata"]["module"] for r in rows["heldout"]}
    assert all(row["metadata"]["coding"]["check_tests"]["fail_to_pass"] for row in both)
    assert "unused" not in str([row["metadata"]["module"] for row in both])
    assert len(sources.load_tasks(out, "train", need_answers=False)) == len(rows["train"])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["splits"] == {name: len(found) for name, found in rows.items()}
    (log,) = (out / "progress").glob("*.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    for split in rows:
        (out / f"{split}.jsonl").unlink()
    assert command.main([*arguments, "--jobs=1"]) == 0
    again = [json.loads(line) for split in rows for line in (out / f"{split}.jsonl").open()]
    assert again == both
    capsys.readouterr()
    assert command.main(["check", str(out)]) == 0
    assert "3 tasks: the oracle is 1 on 3, nothing done is 0 on 3, 0 errors" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fix_is_taken_back(workplace):
    place, out = workplace
    assert command.main([f"--repository={place}", f"--out={out}", "--from=commits", "--count=1"]) == 0
    (row,) = [json.loads(line) for path in out.glob("*.jsonl") for line in path.open()]
    assert row["kind"] == "calc/commit" and row["metadata"]["module"] == "calc/more.py"
    about = row["metadata"]["coding"]
    assert about["check_tests"]["fail_to_pass"] == ["tests/test_more.py::test_largest"]
    assert "x < best" in about["files"]["calc/more.py"] and "+        if x > best:" in about["patch"]


def test_mistakes_are_one_line(tmp_path, capsys):
    assert command.main([f"--repository={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
    assert "not a git repository" in capsys.readouterr().err
    for wrong in (["--out=x"], ["--package=a"], ["check"], ["--package=a", "--out=x", "--from=commits"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
