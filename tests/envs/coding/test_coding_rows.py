"""Rows of software tasks in every published layout, and mistakes in them: one line that names file, row and field."""

import json

import pytest

from jaxagent.config import ConfigError
from jaxagent.data import rows, sources
from jaxagent.envs.coding import task as tasks
from jaxagent.types import Task

SWE_BENCH = {
    "instance_id": "pallets__flask-1",
    "repo": "pallets/flask",
    "base_commit": "abc",
    "problem_statement": "It fails.",
    "hints_text": "",
    "patch": "diff --git a/x.py b/x.py\n",
    "test_patch": "diff --git a/tests/test_x.py b/tests/test_x.py\n",
    "FAIL_TO_PASS": '["tests/test_x.py::test_a"]',
    "PASS_TO_PASS": ["tests/test_x.py::test_b"],
}
R2E = {
    "docker_image": "namanjain12/x:1",
    "repo_name": "x",
    "commit_hash": "ff",
    "problem_statement": "It fails.",
    "expected_output_json": '{"test_a": "PASSED"}',
}
SLIME = {
    "prompt": [{"role": "user", "content": "It fails."}],
    "label": "x-1",
    "metadata": {"image": "x:1", "workdir": "/app", "eval_cmd": "make test"},
}
PRO = {
    "fail_to_pass": "['a', 'b']",
    "pass_to_pass": [],
    "selected_test_files": ["t.py"],
    "run_script_path": "run.sh",
    "parser_script_path": "parse.py",
    "before_repo_set_cmd": "git checkout x",
}
OURS = {
    "id": "a",
    "prompt": "It fails.",
    "answers": [],
    "metadata": {"coding": {"files": {"a.py": ""}, "check_tests": {"fail_to_pass": ["t.py::a"]}}},
}


def read(row):
    return tasks.from_task(rows.to_task(row, need_answers=False))


def test_swe_bench():
    task = read(SWE_BENCH)
    assert (task.id, task.statement, task.workdir) == ("pallets__flask-1", "It fails.", "/testbed")
    assert task.check == tasks.Tests(("tests/test_x.py::test_a",), ("tests/test_x.py::test_b",))
    assert task.test_files == ("tests/test_x.py",) and task.patch == SWE_BENCH["patch"]
    django = SWE_BENCH | {"repo": "django/django", "test_patch": "diff --git a/tests/a/b.py b/tests/a/b.py\n"}
    assert read(django).check.command.endswith(" a.b")


def test_polar():
    row = {"prompt": [], "label": "", "metadata": {"instance": SWE_BENCH, "base_image": "i:1", "split": "train"}}
    assert read(row).image == "i:1" and read(row).check.fail_to_pass == ("tests/test_x.py::test_a",)
    row["metadata"]["instance"] = json.dumps(SWE_BENCH)
    assert read(row).image == "i:1"


def test_r2e():
    task = read(R2E)
    assert task.id == "x/ff" and task.check.expected == {"test_a": "PASSED"} and "r2e_tests" in task.hidden
    assert read(R2E | {"expected_output_json": {"test_a": "FAILED"}}).check.expected == {"test_a": "FAILED"}


def test_slime(tmp_path):
    task = read(SLIME)
    assert (task.id, task.image, task.workdir, task.check) == ("x-1", "x:1", "/app", tasks.Status("make test"))
    rest = {"image_url": "y:1", "workdir": "/w", "f2p_script": "pass", "pre_commands": "a\\nb", "instance_id": "n"}
    task = read({"prompt": "It fails.", "metadata": {"remote_env_info": rest}})
    assert (task.id, task.image, task.setup) == ("n", "y:1", ("a\nb",)) and task.check == tasks.Status(script="pass")
    for name in ("run.sh", "parse.py"):
        (tmp_path / name).write_text("x")
    both = {**SLIME, "metadata": SLIME["metadata"] | {"swepro": PRO}}  # it counts before eval_cmd
    task = tasks.from_task(rows.to_task(both, False), tmp_path)
    assert task.check == tasks.SwePro(("a", "b"), ("t.py",), tmp_path / "run.sh", tmp_path / "parse.py")
    assert task.setup == ("git checkout x",)


def test_our_own():
    task = read(OURS)
    assert task.files == {"a.py": ""} and task.check.required == ("t.py::a",) and task.workdir == tasks.WORKDIR


def coding(**changes):
    about = {**OURS["metadata"]["coding"], **changes}
    return {**OURS, "metadata": {"coding": {k: v for k, v in about.items() if v is not None}}}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (SWE_BENCH | {"FAIL_TO_PASS": "test_a"}, "column 'FAIL_TO_PASS': must be a list, or text that holds one"),
        (SWE_BENCH | {"FAIL_TO_PASS": [3]}, r"column 'FAIL_TO_PASS\[0\]': must be non-empty text"),
        (SWE_BENCH | {"FAIL_TO_PASS": [], "PASS_TO_PASS": "[]"}, "no test is named"),
        ({k: v for k, v in SWE_BENCH.items() if k != "PASS_TO_PASS"}, "column 'PASS_TO_PASS': missing"),
        ({"metadata": {"instance": None, "image": "i"}}, "column 'metadata.instance': must be an object"),
        ({"metadata": {"instance": "[]", "image": "i"}}, "column 'metadata.instance': must be an object"),
        (
            {"metadata": {"image": "i", "workdir": "/w", "eval_cmd": ""}},
            "column 'metadata': needs one of swepro, eval_cmd",
        ),
        (coding(workdir="repo"), r"column 'metadata\.coding\.workdir': must be an absolute path, got 'repo'"),
        (SWE_BENCH | {"repo": "swesmith/a__b.1fd5"}, "is SWE-smith's: its `patch` puts the bug in"),
        ({"metadata": {"instance": {"instance_id": "x"}}}, r"column 'metadata\.instance\.problem_statement': missing"),
        (R2E | {"expected_output_json": "["}, "column 'expected_output_json': is no JSON object"),
        (R2E | {"expected_output_json": {}}, "must map the names of tests"),
        ({**SLIME, "metadata": {"eval_cmd": "x", "workdir": "/"}}, r"column 'metadata\.image': missing"),
        ({**SLIME, "metadata": SLIME["metadata"] | {"swepro": {}, "eval_cmd": 3}}, r"column 'metadata\.eval_cmd'"),
        ({**SLIME, "metadata": SLIME["metadata"] | {"swepro": {"fail_to_pass": ["a"]}}}, r"swepro\.run_script_path"),
        (coding(check_tests=None), "needs one of check_tests"),
        (coding(check_status={"command": "x"}), "needs one of"),
        (coding(chek=1), r"column 'metadata\.coding\.chek': unknown"),
        (coding(files={"../a": ""}), r"coding\.files': must map relative paths"),
        (coding(files={".git/config": ""}), r"coding\.files': must map relative paths"),
        (coding(check_tests={"fail_to_pass": ["a"], "framework": "nose"}), "must be one of 'pytest', 'unittest'"),
        (coding(check_tests={"fail_to_pass": []}), "no test is named"),
    ],
)
def test_a_mistake_is_one_line(row, told, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(OURS) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=told) as error:
        sources.load_tasks(file, need_answers=False)
    assert f"{file}, line 2" in str(error.value) and "\n" not in str(error.value)


def test_a_row_of_something_else_is_no_software_task():
    with pytest.raises(ConfigError, match="it is no software task"):
        tasks.from_task(Task("a", "b", ()))


def test_a_published_row_that_asks_nothing_is_left_out_and_named(tmp_path):
    file = tmp_path / "train.jsonl"
    empty = SWE_BENCH | {"problem_statement": " ", "instance_id": "a__b-9"}
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in (empty, OURS, SWE_BENCH | {"docker_image": "swerebench/x"}))
    )
    source = sources.load_tasks(file, need_answers=False)
    assert len(source) == 2 and source[0].id == source.ids[0] == OURS["id"]
    assert "line 3" in source.place(source[1]) and source[1].metadata["coding"]["image"] == "swerebench/x"
    (left_out,) = source.left_out
    assert left_out == f"{file}, line 1: column 'problem_statement': is empty, of instance 'a__b-9'."
    file.write_text(json.dumps(empty) + "\n")
    with pytest.raises(ConfigError, match=r"has no row that is a task: .*of instance 'a__b-9'"):
        sources.load_tasks(file, need_answers=False)
