"""Harbor tasks that really run: oracle 1, idle agent 0, and what goes wrong is an error and never a 0."""

import asyncio
import random

import pytest

from data_pipelines import harbor, terminal_check
from data_pipelines.sandbox_workspaces import ImageWorkspaces
from jaxagent.data.sources import HELD_OUT, TRAIN, load_tasks
from jaxagent.envs.terminal import folders, rows
from jaxagent.envs.terminal.verify import VerifierError, prepare, verify
from jaxagent.sandbox.base import SandboxError
from tests.envs.terminal import terminal_folders as made


def test_both_schemas_check(tmp_path, images, capsys):
    made.harbor(tmp_path / "one")
    made.harbor(tmp_path / "two", made.HARBOR_2, made.TEST_JSON)
    assert harbor.main(["check", str(tmp_path)]) == 0
    assert "2 tasks (1 of level 1, 1 of level 3): oracle scores 1 on 2, an idle agent 0 on 2, 0 errors" in (
        capsys.readouterr().out
    )


def test_what_is_wrong_is_named(tmp_path, images, capsys):
    made.write(made.harbor(tmp_path / "a") / "solution" / "solve.sh", "echo I cannot\n")
    made.harbor(tmp_path / "b", test="mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n")
    made.harbor(tmp_path / "c", test="exit 0\n")
    made.write(made.harbor(tmp_path / "d") / "environment" / "Dockerfile", "FROM x\nRUN echo oh no; false\n")
    assert harbor.main(["check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "a: the oracle scored 0 and an idle agent 0. The oracle printed: I cannot" in out
    assert "b: the oracle scored 1 and an idle agent 1." in out
    assert "c: c: neither /logs/verifier/reward.txt nor" in out
    assert "d: image d: step 1 (RUN echo oh no; false) ended with status 1. It printed: oh no" in out
    assert "4 tasks (4 of level 1): oracle scores 1 on 1, an idle agent 0 on 1, 2 errors" in out


def test_tasks_with_images_of_their_own(tmp_path, images, capsys):
    """In sandboxes that start from what the Dockerfile made; an image that cannot be built is one error, named."""
    made.harbor(tmp_path / "tasks/one")
    broken = made.harbor(tmp_path / "tasks/broken")
    made.write(broken / "environment" / "Dockerfile", "FROM debian:12\nRUN echo oh no; false\n")
    flags = (f"--images={images}", "--base=debian:12=host")
    assert harbor.main(["check", str(tmp_path / "tasks"), *flags]) == 1
    out = capsys.readouterr().out
    assert "broken: image broken: step 1 (RUN echo oh no; false) ended with status 1. It printed: oh no" in out
    assert "2 tasks (2 of level 1): oracle scores 1 on 1, an idle agent 0 on 1, 1 errors" in out
    assert harbor.main(["check", str(tmp_path / "tasks"), flags[0], "--base=x"]) == 2


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


def test_a_sandbox_that_fails_is_one_tasks_error(tmp_path, capsys):
    """And not the end of the check."""
    tasks = [folders.read_task(made.harbor(tmp_path / name)) for name in "ab"]

    async def nowhere(task):
        raise SandboxError(f"no room for {task.id}")

    assert terminal_check.report(tasks, nowhere, 1) == 1
    out = capsys.readouterr().out
    assert "a: no room for a" in out and "b: no room for b" in out and "2 errors" in out


def test_no_tasks_is_no_success():
    assert terminal_check.report([], None, 1) == 1
