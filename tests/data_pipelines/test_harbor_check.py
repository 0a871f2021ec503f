"""Harbor tasks that really run: oracle 1, idle agent 0, and what goes wrong is an error and never a 0."""

import asyncio
import random

import pytest

from data_pipelines import harbor
from data_pipelines.sandbox_workspaces import ImageWorkspaces
from jaxagent.data.sources import HELD_OUT, TRAIN, load_tasks
from jaxagent.envs.terminal import folders, rows
from jaxagent.envs.terminal.verify import VerifierError, prepare, verify
from tests.envs.terminal import terminal_folders as made


def checked(capsys, folder, *flags):
    """The exit status of a check, and what it says of each task."""
    status = harbor.main(["check", str(folder), *flags])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    table = lines[lines.index("task oracle idle") + 1 : -1]
    return status, {line.partition(" ")[0]: line.partition(" ")[2] for line in table}


def test_both_schemas_check(tmp_path, images, capsys):
    made.harbor(tmp_path / "one")
    made.harbor(tmp_path / "two", made.HARBOR_2, made.TEST_JSON)
    assert checked(capsys, tmp_path) == (0, {"one": "1 0 proven", "two": "1 0 proven"})


def test_what_is_wrong_is_named_and_what_changes_is_checked_again(tmp_path, images, capsys):
    made.write(made.harbor(tmp_path / "a") / "solution" / "solve.sh", "echo I cannot\n")
    made.harbor(tmp_path / "b", test="mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n")
    made.harbor(tmp_path / "c", test="exit 0\n")
    made.write(made.harbor(tmp_path / "d") / "environment" / "Dockerfile", "FROM x\nRUN echo oh no; false\n")
    status, table = checked(capsys, tmp_path, f"--images={images}", "--base=*=host")
    assert status == 1 and table["a"] == "0 0 wrong" and table["b"] == "1 1 wrong"
    assert table["c"].startswith("- - failed: VerifierError: c: neither /logs/verifier/reward.txt nor")
    assert "image d: step 1 (RUN echo oh no; false) ended with status 1. It printed: oh no" in table["d"]
    made.write(tmp_path / "a" / "solution" / "solve.sh", "cp greeting.txt hello.txt\n")
    assert checked(capsys, tmp_path)[1]["a"] == "1 0 proven"
    assert len((tmp_path / "proven.jsonl").read_text().splitlines()) == 5  # nothing else was played again
    assert harbor.main(["check", str(tmp_path / "a"), f"--images={images}", "--base=x"]) == 2


@pytest.mark.slow
def test_what_an_agent_left_at_the_tests_paths_is_gone(tmp_path, images):
    """A forged reward, a reward that is a link to a file with a 1, a prepared /tests: none counts."""

    async def attempt(folder, agent):
        task = folders.read_task(folder)
        workspace = await workspaces.open(task)
        try:
            await prepare(workspace, task)
            done = await workspace.run(agent, timeout_s=20)
            assert done.exit_code == 0, done.output
            return await verify(workspace, task)
        finally:
            await workspace.close()

    def run(folder, agent):
        nonlocal workspaces
        workspaces = ImageWorkspaces(images, ["*=host"], network=False)  # for one event loop
        try:
            return asyncio.run(attempt(folder, agent))
        finally:
            workspaces.close()

    workspaces = None
    silent = made.harbor(tmp_path / "silent", test="exit 0\n")
    forge = "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt"
    with pytest.raises(VerifierError, match="neither"):
        run(silent, forge)
    linked = made.harbor(tmp_path / "linked", test="ln -s ../../tmp/one /logs/verifier/reward.txt\n")
    with pytest.raises(VerifierError, match="neither"):  # a reward is never read through a link
        run(linked, "echo 1 > /tmp/one")
    honest = made.harbor(tmp_path / "honest")
    tamper = "mkdir -p /tests && echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh && chmod 444 /tests/test.sh"
    assert run(honest, tamper) == 0.0
    assert run(honest, "cd /app && echo 'Hello, world!' > hello.txt") == 1.0


def test_the_command_names_a_malformed_task(tmp_path, capsys):
    (made.harbor(tmp_path / "t") / "instruction.md").unlink()
    assert harbor.main(["check", str(tmp_path)]) == 2
    assert "instruction.md is missing" in capsys.readouterr().err


def test_a_dataset_of_directories(tmp_path, capsys, monkeypatch):
    """Rows that name the folders, from wherever they are read; held out is the end of the published shuffle."""
    for name in "abcde":
        made.endless(tmp_path / "tasks" / name)
    monkeypatch.chdir(tmp_path)
    assert harbor.main(["write", "tasks", "--out=dataset", "--heldout=2"]) == 0
    assert "wrote dataset: 3 and 2 held-out tasks, 0 without a test left out" in capsys.readouterr().out
    monkeypatch.chdir("/")
    ids = list("abcde")
    random.Random(42).shuffle(ids)
    for split, expected in ((TRAIN, ids[:3]), (HELD_OUT[0], ids[3:])):
        tasks = load_tasks(tmp_path / "dataset", split, need_answers=False)
        assert [task.id for task in tasks] == expected
        assert rows.from_task(tasks[0]) == folders.read_task(tmp_path / "tasks" / expected[0])
    for flags, message in (
        (["--out", str(tmp_path / "dataset")], "exists; remove it"),
        ([], "write needs --out"),
        (["--out=x", "--heldout=5"], "--heldout=5 must be 1 or more and less than the 5 tasks with a test"),
    ):
        assert harbor.main(["write", str(tmp_path / "tasks"), *flags]) == 2
        assert message in capsys.readouterr().err
