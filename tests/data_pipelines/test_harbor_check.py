"""Harbor tasks that really run: oracle 1, idle agent 0, and what goes wrong is an error and never a 0."""

import asyncio
import dataclasses
import json
import random

import pytest

from data_pipelines import harbor, terminal_folders
from data_pipelines.sandbox_workspaces import ImageWorkspaces
from jaxagent.config import SoftwareConfig
from jaxagent.config.flags import parse_config
from jaxagent.data.sources import HELD_OUT, TRAIN, load_tasks
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.terminal import folders, rows
from jaxagent.envs.terminal.verify import VerifierError, prepare, verify
from jaxagent.rollout.workers import Workers
from jaxagent.types import StopReason, Task
from tests.envs.terminal import harbor_tasks
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


def test_artifacts_that_cannot_be_judged_are_0_and_no_failure(tmp_path, images, capsys):
    """Else an agent that fails could have its attempt left out of the group."""
    hows = {
        "big": "mkdir -p /logs/artifacts; for i in 1 2; do head -c 40000000 /dev/zero > /logs/artifacts/$i; done",
        "file": "echo x > out",
        "folder": "mkdir -p out/log; echo x > out/log/x",
    }
    for name, how in hows.items():
        folder = harbor_tasks.with_own_verifier(tmp_path / "tasks" / name)
        made.write(folder / "solution/solve.sh", how)
        image = (folder / "tests/Dockerfile").read_text()
        made.write(folder / "tests/Dockerfile", f"{image}RUN mkdir out; touch out/log\n")
    _, table = checked(capsys, tmp_path / "tasks", f"--images={images}", "--base=*=host")
    assert table == dict.fromkeys(hows, "0 0 wrong")


@pytest.mark.slow
def test_twenty_three_tasks_of_every_feature(tmp_path, images, capsys):
    """Oracle 1 and idle 0: steps, an MCP server, a user, skills, a healthcheck, verifiers of their own."""
    names = harbor_tasks.write_all(tmp_path)
    status, table = checked(capsys, tmp_path, f"--images={images}", "--base=*=host")
    assert table == dict.fromkeys(names, "1 0 proven") and status == 0 and len(names) >= 23


def test_generated_tasks_as_folders_are_proven_and_demonstrations_are_of_other_tasks(tmp_path, images, capsys):
    out, again, wide = tmp_path / "laptop", tmp_path / "again", tmp_path / "wide"
    flags = ["--laptop", "--num=12", "--demonstrations=40", "--early_done_frac=0.5"]
    assert [terminal_folders.main([f"--out={folder}", *flags]) for folder in (out, again)] == [0, 0]
    assert [f.read_bytes() for f in sorted(out.rglob("*.*"))] == [f.read_bytes() for f in sorted(again.rglob("*.*"))]
    assert terminal_folders.main([f"--out={wide}", "--num=83", "--seed=1"]) == 0
    assert terminal_folders.main([f"--out={wide}", "--num=1"]) == 2
    instructions = [task.instruction for task in folders.read_tasks(out)]
    shown = [json.loads(line)["prompt"] for line in (out / "full.jsonl").read_text().splitlines()]
    assert len(set(instructions)) == 12 and len(shown) == 40 and not set(shown) & set(instructions)
    tokenizer = Tokenizer.load(out / "tokenizer")
    assert len(tokenizer.encode("<done>")) == 1 and tokenizer.decode(tokenizer.encode(shown[0])) == shown[0]
    for folder in sorted(wide.iterdir())[::9]:
        folder.rename(out / folder.name)
    capsys.readouterr()
    status, table = checked(capsys, out, f"--images={images}", "--base=*=host")
    assert status == 0 and len(table) >= 20 and set(table.values()) == {"1 0 proven"}
    broken = next(out.glob("copy_file_*"))
    made.write(broken / "steps/work/tests/final_state.py", "raise SystemExit(2)\n")
    assert "reward.txt nor" in checked(capsys, broken, f"--images={images}", "--base=*=host")[1][broken.name]


@pytest.fixture
def played(tmp_path, images):
    """Plays a task's folder with what a policy writes: gives the prompt, what it was shown, and the verdict."""
    env = parse_config(["t", "--config=endless_terminals:laptop", "--config.env.tools=endless"]).env
    software = SoftwareConfig(images=str(images), bases=("*=host",))
    sandbox = dataclasses.replace(env.sandbox, memory_mb=512, disk_mb=64, files=10_000, warm=0, software=software)
    env = dataclasses.replace(env, sandbox=sandbox, max_turns=9)

    def play(folder, *actions):
        task = Task("t", "", (), "", {"terminal": {"folder": str(folder)}})

        async def whole(attempt_at):
            attempt, shown, step = attempt_at(task), [], None
            try:
                prompt = await attempt.start()
                for action in actions:
                    step = await attempt.step(action)
                    shown.append(step.observation.text if step.observation else step.stop_reason)
                ended = step.stop_reason if step else StopReason.ANSWER
                return prompt[-1].content, shown, await attempt.verify(Transcript("", (), (), ended)), attempt.counters
            finally:
                await attempt.close()

        with Workers(1) as workers, env.open(Opening(None, [task], workers.run, lambda line: None)) as attempt_at:
            return workers.run(whole(attempt_at), 60)

    return play


DONE = "<action>done</action>"


def test_a_servers_tools_are_the_agents(tmp_path, played):
    folder = harbor_tasks.with_server(tmp_path / "server")
    call = '<tool_call>{{"name": "{}", "arguments": {{"door": "red"}}}}</tool_call>'
    prompt, shown, verdict, counters = played(
        folder, call.format("secret"), call.format("public"), "<command>echo red-sesame > word</command>", DONE
    )
    assert "Says the word of a door." in prompt and prompt.startswith("Ask for the word")
    assert shown[:2] == ["red-sesame\n", "There is no function 'public'.\n"] and verdict.reward == 1.0
    assert (counters["calls"], counters["commands"], counters["invalid_actions"]) == (1, 1, 1)
    kill = "<command>kill -9 $(cat /proc/[0-9]*/stat | awk '/python3/ {print $1}'); rm -f word</command>"
    _, shown, verdict, counters = played(folder, kill, call.format("secret"), DONE)  # its own doing, and no failure
    assert shown[1].startswith("The call failed: ") and counters["failed_calls"] == 1 and verdict.reward == 0.0
    harbor_tasks.write(folder / "environment" / "server.py", "import sys\nsys.exit(3)\n")
    with pytest.raises(VerifierError, match="server: the MCP server 'doors'"):
        played(folder)


def test_each_step_is_said_when_the_one_before_has_ended(tmp_path, played):
    folder = harbor_tasks.of_steps(tmp_path / "steps", harbor_tasks.STEPS.format(strategy="", first="min_reward = 1\n"))
    command = "<command>{}</command>".format
    prompt, shown, verdict, _ = played(
        folder, command("echo one > a"), DONE, command("ls /tests; cat given made > b"), DONE, DONE
    )
    assert prompt.startswith("Write one into a.") and shown[1].startswith("Write what given and made hold into b.")
    assert "lib.sh" not in shown[2] and "Append three to a." in shown[3] and shown[4] == StopReason.ANSWER
    assert verdict.reward == pytest.approx(2 / 3) and verdict.components["solved"] == 0.0
    _, shown, verdict, _ = played(folder, DONE)  # less than min_reward: there is no second step
    assert shown == [StopReason.ANSWER] and verdict.reward == 0.0
    _, _, verdict, _ = played(folder, command("echo one > a; mkdir made"), DONE)
    assert verdict.reward == pytest.approx(1 / 2)  # whoever keeps a step's setup from working gains nothing by it


def test_a_skill_is_told_of(tmp_path, played):
    prompt, *_ = played(harbor_tasks.with_skills(tmp_path / "skills"))
    assert "<name>greet</name>" in prompt and "<description>How to greet &lt;here&gt;.</description>" in prompt
    assert "<location>/skills/greet/SKILL.md</location>" in prompt and "broken" not in prompt


def test_what_a_verifier_gets_of_the_agent_are_files_and_nothing_else(tmp_path, played):
    """A link to the verifier's own files, and a file in the place of its tests, do not come over."""
    folder = harbor_tasks.with_own_verifier(tmp_path / "own")
    forge = "mkdir -p /logs/artifacts out; ln -s /verifiers-own /logs/artifacts/answer; echo 7 > out/seven"
    _, _, verdict, _ = played(folder, f"<command>{forge}; echo 42 > real</command>", DONE)
    assert verdict.reward == 0.0
    honest = "mkdir -p /logs/artifacts out; echo 42 > /logs/artifacts/answer; echo 7 > out/seven"
    assert played(folder, f"<command>{honest}</command>", DONE)[2].reward == 1.0


def test_two_users_in_one_sandbox_are_refused(tmp_path, played):
    folder = harbor_tasks.with_user(tmp_path / "user")
    assert played(folder, "<command>id -un > me</command>", DONE)[2].reward == 1.0
    text = (folder / "task.toml").read_text().replace("user = 1234", 'user = "root"')
    (folder / "task.toml").write_text(text)
    with pytest.raises(VerifierError, match=r"key 'verifier\.user' is root, and a sandbox has one user"):
        played(folder)


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
