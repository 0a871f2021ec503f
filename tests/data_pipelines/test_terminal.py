"""Generated terminal tasks: the same from the same seed, solved by their oracles, not by idleness, haste or cheats."""

import asyncio
import itertools
import json
import time

import pytest

from data_pipelines import generated, terminal
from data_pipelines.home_workspace import HomeWorkspace, missing_programs
from data_pipelines.terminal_demonstrations import demonstrations as demonstrate
from data_pipelines.terminal_templates import home, version_control, words
from data_pipelines.terminal_templates.draft import Draft, Draw, lines, to_row
from data_pipelines.terminal_templates.program import call, program
from data_pipelines.terminal_templates.table import HELD_OUT, LAPTOP, TEMPLATES
from jaxagent.config import ConfigError
from jaxagent.data.sources import load_tasks
from jaxagent.envs.terminal import rows
from jaxagent.envs.terminal.verify import VerifierError, prepare, solve, verify
from jaxagent.rollout import demonstrations
from jaxagent.types import Task

needs_programs = pytest.mark.skipif(bool(missing_programs()), reason=f"programs missing: {missing_programs()}")


def take(number, seed=0, laptop=False):
    return list(itertools.islice(terminal.generate(seed, laptop), number))


def to_task(row):
    return rows.from_task(Task(row["id"], row["prompt"], (), row["kind"], row["metadata"]))


async def attempt(row, *commands):
    """The reward of an agent that sends these commands, each in a fresh shell."""
    task, workspace = to_task(row), HomeWorkspace()
    try:
        await prepare(workspace, task)
        for command in commands:
            await workspace.run(command, timeout_s=20)
        return await verify(workspace, task)
    finally:
        await workspace.close()


def attempts(cases, jobs=4):
    """Rewards of many (row, commands)."""

    async def all_of_them():
        gate = asyncio.Semaphore(jobs)

        async def one(row, commands):
            async with gate:
                return await attempt(row, *commands)

        return await asyncio.gather(*(one(row, commands) for row, commands in cases))

    return asyncio.run(all_of_them())


def test_the_table():
    assert len(words.WORDS) == len(set(words.WORDS)) == 300
    assert len(TEMPLATES) >= 60 and {t.level for t in TEMPLATES.values()} == {1, 2, 3}
    assert set(TEMPLATES) > HELD_OUT and {TEMPLATES[name].level for name in HELD_OUT} == {1, 2, 3}
    assert not HELD_OUT & set(LAPTOP) and [t.level for t in LAPTOP.values()] == [1] * 10 + [2] * 10


def test_a_seed_says_everything():
    first, again, other = take(150), take(150), take(150, seed=1)
    assert first == again
    assert len({row["id"] for row in first}) == 150
    assert len({row["id"] for row in first} & {row["id"] for row in other}) <= 5  # `touch word` has 300 tasks in all
    assert {row["metadata"]["terminal"]["template"] for row in first} == set(TEMPLATES)


def test_splits_do_not_depend_on_the_seed_and_never_mix():
    drawn = [row for seed in range(2) for row in take(2 * len(TEMPLATES), seed)]
    drawn += [row for seed in range(2) for row in take(300, seed, laptop=True)]
    split_of_prompt = {}
    for row in drawn:
        template, split = row["metadata"]["terminal"]["template"], row["metadata"]["split"]
        assert split_of_prompt.setdefault((template, row["prompt"]), split) == split
        assert (split == terminal.HELDOUT_TEMPLATES) == (template in HELD_OUT)
    laptop = drawn[4 * len(TEMPLATES) :]
    heldout = sum(row["metadata"]["split"] == terminal.HELDOUT for row in laptop) / len(laptop)
    assert abs(heldout - terminal.HELDOUT_FRAC) < 0.06


@pytest.mark.slow
@needs_programs
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_templates_are_solved_by_their_oracles_and_not_by_an_idle_agent(every):
    drafted = list(take(len(TEMPLATES), seed=7))
    assert {row["metadata"]["terminal"]["template"] for row in drafted} == set(TEMPLATES)
    cases = [(row, ("\n".join(row["metadata"]["terminal"]["commands"]),)) for row in drafted[::every]]
    names = [row["metadata"]["terminal"]["template"] for row, _ in cases]
    assert dict(zip(names, attempts(cases), strict=True)) == dict.fromkeys(names, 1.0)
    assert dict(zip(names, attempts([(row, ()) for row, _ in cases]), strict=True)) == dict.fromkeys(names, 0.0)


@pytest.mark.slow
@needs_programs
def test_cheap_tricks_score_nothing():
    """Emptied results, results that are links to a guess, everything deleted, everything created."""
    chosen = [row for row in take(len(TEMPLATES), seed=3) if row["metadata"]["terminal"]["level"] > 1][::7]
    empty = "find . -type f -not -path './.*' -newer .start -exec truncate -s 0 {} +"
    cases = [(row, ("rm -rf ./*",)) for row in chosen]
    cases += [
        (row, ("touch .start; sleep 0.02", " ; ".join(row["metadata"]["terminal"]["commands"]), empty))
        for row in chosen
    ]
    # Tasks that are about names, modes, links, repositories or processes leave no new text that could be emptied.
    about_text = [r["metadata"]["terminal"]["template"] in ABOUT_TEXT for r in chosen]
    assert sum(about_text) >= 3
    rewards = attempts(cases)
    assert rewards[: len(chosen)] == [0.0] * len(chosen)
    assert [r for r, text in zip(rewards[len(chosen) :], about_text, strict=True) if text] == [0.0] * sum(about_text)


@needs_programs
def test_a_tag_in_the_place_of_a_branch_is_not_done():
    """Git takes "main" for the tag of that name, and the branch of that name would not be looked at."""
    row = to_row(version_control.merge_branch(Draw("a")), "merge_branch", 1, "train")
    (oracle,) = row["metadata"]["terminal"]["commands"][:1]
    top = oracle.split()[1]
    cheat = f"{oracle}; git tag main && git reset -q --hard main^1"
    assert attempts([(row, (oracle,)), (row, (cheat,)), (row, (oracle, f"git -C {top} tag main main^1"))]) == [1, 0, 1]


ABOUT_TEXT = {
    *("replace_word", "count_in_each", "csv_column", "csv_filter", "csv_sum", "largest_rows", "missing_lines"),
    *("first_occurrences", "longest_line", "word_frequency", "totals_by_city", "csv_to_json", "archive_folder"),
    *("set_ini_key", "write_checksums", "list_by_suffix", "containing_word", "average_by_item", "status_counts"),
    *("json_lines_filter", "join_tables", "mail_addresses", "folder_sizes", "ini_to_json", "last_logins"),
}


def by_hand(operation):
    """A row of one operation, written out."""
    return to_row(home.draft([operation]), "by_hand", 1, "train")


RENAME = home.Operation(
    "Rename the file apple to berry.",
    ("mv apple berry",),
    {"apple": ("file", "fig", None)},
    {"berry": ("file", "fig", None)},
)
MODE = home.Operation(
    "Set the mode of the file apple to 600.",
    ("chmod 600 apple",),
    {"apple": ("file", "fig", 0o644)},
    {"apple": ("file", "fig", 0o600)},
)
LINK = home.Operation(
    "Create the symbolic link berry to apple.",
    ("ln -s apple berry",),
    {"apple": ("file", "fig", None)},
    {"apple": ("file", "fig", None), "berry": ("link", "apple")},
)


@pytest.mark.slow
@needs_programs
def test_the_home_directory_must_look_exactly_so():
    cases = [
        (RENAME, "mv apple berry", 1.0),
        (RENAME, "cp apple berry && rm apple", 1.0),
        (RENAME, "mv apple berry; touch .hidden", 1.0),
        (RENAME, "cp apple berry", 0.0),  # apple is still there
        (RENAME, "mv apple berry; touch other", 0.0),
        (RENAME, "rm apple; touch berry", 0.0),
        (RENAME, "mkdir berry; rm apple", 0.0),
        (RENAME, "mv apple .x; ln -s .x berry", 0.0),  # a link is no file
        (MODE, "chmod 600 apple", 1.0),
        (MODE, "chmod 700 apple", 0.0),
        (LINK, "ln -s apple berry", 1.0),
        (LINK, 'ln -s "$HOME/apple" berry', 1.0),
        (LINK, "cp apple berry", 0.0),
        (LINK, "ln -s berry berry", 0.0),
        (LINK, "ln apple berry", 0.0),
    ]
    rewards = attempts([(by_hand(operation), (command,)) for operation, command, _ in cases])
    wrong = [(command, got) for (_, command, want), got in zip(cases, rewards, strict=True) if want != got]
    assert not wrong


@needs_programs
def test_a_planted_module_or_program_does_not_judge():
    row = by_hand(RENAME)
    plant = (
        "for m in os sys stat json; do echo 'raise SystemExit(0)' > $m.py; done; mkdir bin; echo exit 0 > bin/python3"
    )
    assert attempts([(row, (plant,)), (row, ("mkfifo berry; rm apple",))]) == [0.0, 0.0]


@pytest.mark.slow
@needs_programs
def test_processes_are_told_by_the_process_table_and_not_by_files():
    (row,) = [r for r in take(len(TEMPLATES), seed=5) if r["metadata"]["terminal"]["template"] == "stop_process"]
    kill, remove = row["metadata"]["terminal"]["commands"]
    rewards = attempts(
        [(row, (kill, remove)), (row, ("echo 1 > .x", remove)), (row, ("kill $(cat run/*.pid)", remove))]
    )
    assert rewards == [1.0, 0.0, 0.0]


@needs_programs
def test_a_wrong_initial_state_is_an_error_and_not_a_zero():
    draft = Draft("x", ("true",), (call("absent", "b"),), {"a": "1\n"}, setup="echo 2 > a")
    with pytest.raises(VerifierError, match=r"initial test ended with status 1.*a is not as it was given"):
        attempts([(to_row(draft, "t", 1, "train"), ())])
    draft = Draft("x", ("true",), ("raise SystemExit(3)",), setup="true")
    with pytest.raises(VerifierError, match="must exit with 0 or 1, not 3"):
        attempts([(to_row(draft, "t", 1, "train"), ())])


@needs_programs
def test_a_late_command_is_killed_and_the_oracle_shares_one_shell():
    async def late():
        workspace = HomeWorkspace()
        try:
            result = await workspace.run("echo begun; trap '' TERM; sleep 60", timeout_s=0.5)
            left = await workspace.run("sleep 61 & echo $!", timeout_s=5)
            return result, int(left.output)
        finally:
            await workspace.close()

    result, pid = asyncio.run(late())
    assert result.timed_out and result.exit_code == 137 and result.output == b"begun\n"
    with pytest.raises(OSError):  # what a command left in the background ended with the workspace
        end = time.monotonic() + 60  # it was sent SIGKILL; when it goes is the kernel's business
        while time.monotonic() < end:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    raise OSError
            time.sleep(0.01)

    async def one_shell():
        draft = Draft("x", ("mkdir a; cd a", "touch b"), (call("content", "a/b", ""),))
        workspace, task = HomeWorkspace(), to_task(to_row(draft, "t", 1, "train"))
        try:
            await prepare(workspace, task)
            await solve(workspace, task)
            return await verify(workspace, task)
        finally:
            await workspace.close()

    assert asyncio.run(one_shell()) == 1.0


def test_a_test_holds_what_it_calls_and_no_more():
    text = program("t", [call("content", "a", "x\n")])
    assert "def content(" in text and "def text(" in text and "def data(" in text and "def fail(" in text
    assert "def tar(" not in text and "import tarfile" not in text and "import stat" in text
    compile(text, "t", "exec")
    with pytest.raises(ValueError, match="no function 'contents'"):
        call("contents", "a")


@needs_programs
def test_a_demonstration_is_what_an_agent_says_and_sees(tmp_path):
    operation = home.Operation(
        "Rename the file apple to the word in it.",
        ("cat apple", "mv apple fig"),
        {"apple": ("file", lines(["fig"]), None)},
        {"fig": ("file", lines(["fig"]), None)},
    )
    (shown,) = demonstrate([by_hand(operation)], "endless")
    assert shown["prompt"] == "Rename the file apple to the word in it."
    assert shown["turns"] == [
        {
            "action": "<command>cat apple</command>",
            "observation": "Command executed successfully. Output: fig\n\n(exit_code=0)",
        },
        {
            "action": "<command>mv apple fig</command>",
            "observation": "Command executed successfully. Output: \n\n(exit_code=0)",
        },
        {"action": "<action>done</action>", "observation": ""},
    ]
    generated.write_jsonl(tmp_path / "full.jsonl", [shown])
    assert demonstrations.load(tmp_path / "full.jsonl") == [shown]
    with pytest.raises(ConfigError, match=r"oracle's command 'cat fig' ended with status 1"):
        list(demonstrate([to_row(Draft("x", ("cat fig",), ("pass",)), "t", 1, "train")], "endless"))
    broken = to_row(Draft("x", ("true",), ("pass",), setup="false"), "broken", 1, "train")
    with pytest.raises(ConfigError, match=r"broken_.*: setup or the oracle failed"):
        list(demonstrate([by_hand(operation), broken], "endless"))


@needs_programs
def test_every_oracle_can_be_demonstrated():
    shown = list(demonstrate(take(len(TEMPLATES), seed=11), "qwen3_xml"))
    assert {len(row["turns"]) for row in shown} == {2, 3, 4}  # one to three commands, and done


@pytest.mark.slow
@needs_programs
def test_the_laptop_dataset(tmp_path, capsys):
    """Written, read back as a task source, checked by the command; small in tokens and in words."""
    out = tmp_path / "laptop"
    assert terminal.main([f"--out={out}", "--laptop", "--num=40", "--seed=2", "--demonstrations=45"]) == 0
    train, heldout = load_tasks(out, "train", False), load_tasks(out, "heldout", False)
    assert len(train) + len(heldout) == 40 and not {t.prompt for t in train} & {t.prompt for t in heldout}
    two = [task for task in train if ". Then " in task.prompt]
    assert {task.kind.partition("/")[0] for task in two} == {"level2"} and 0.35 < len(two) / len(train) < 0.65
    known = set(words.WORDS)
    spoken = {word for task in [*train, *heldout] for word in task.prompt.replace("/", " ").replace(".", " ").split()}
    assert len(spoken - known) < 50 and max(len(task.prompt.split()) for task in train) < 40
    shown = demonstrations.load(out / "full.jsonl")
    assert len(shown) == 45 and not {row["prompt"] for row in shown} & {task.prompt for task in heldout}
    assert terminal.main(["check", str(out), "--sandbox=none"]) == 0
    assert "40 tasks: 40 proven" in capsys.readouterr().out
    assert all(json.loads(line)["text"] for line in (out / "texts.jsonl").read_text().splitlines())


def test_tasks_are_checked_in_sandboxes(tmp_path, capsys):
    """As attempts run: every oracle and idle agent has a sandbox. What is wrong is still seen there."""
    drafted = take(60, seed=11)[::7]
    broken = drafted[0] | {"id": "broken"}
    about = broken["metadata"]["terminal"] | {"commands": ["true"]}
    broken |= {"metadata": broken["metadata"] | {"terminal": about}}
    generated.write_jsonl(tmp_path / "train.jsonl", [row | {"answers": []} for row in (*drafted, broken)])
    status = terminal.main(["check", str(tmp_path)])
    said = capsys.readouterr()
    if status == 2:
        pytest.skip(said.err)
    assert "sandbox back end: " in said.out and said.out.endswith(
        f"{len(drafted) + 1} tasks: {len(drafted)} proven, 1 wrong\n"
    )
    assert status == 1 and " ".join(said.out.splitlines()[-2].split()) == "broken 0 0 wrong"
    (tmp_path / "proven.jsonl").unlink()
    assert terminal.main(["check", str(tmp_path), "--sandbox=namespace"]) == 2
    assert "namespaces" in capsys.readouterr().err


@needs_programs
def test_demonstrations_that_finish_too_early():
    """The first operation's commands as they are, then the end; tasks of one operation are shown whole."""
    drafted = take(40, seed=4, laptop=True)
    whole, early = list(demonstrate(drafted, "plain")), list(demonstrate(drafted, "plain", early_done_frac=1.0))
    for row, full, cut in zip(drafted, whole, early, strict=True):
        if ". Then " not in row["prompt"]:
            assert cut == full
            continue
        first = 2 if row["kind"] == "level2/rename_to_content_then" else 1  # it reads a file, then renames it
        assert row["metadata"]["first_commands"] == first < len(row["metadata"]["terminal"]["commands"])
        assert cut["turns"] == [*full["turns"][:first], {"action": "<done>", "observation": ""}]
    some = list(demonstrate(drafted, "plain", early_done_frac=0.5))
    assert 3 <= sum(one == full != cut for one, full, cut in zip(some, whole, early, strict=True)) <= 17


def test_mistakes_on_the_command_line(tmp_path, capsys):
    for arguments in ([], ["check"], [f"--out={tmp_path}"], [str(tmp_path), f"--out={tmp_path}/a"]):
        with pytest.raises(SystemExit):
            terminal.main(arguments)
    assert terminal.main([f"--out={tmp_path}/a", "--num=1"]) == 2
    assert "--num=1 is too few" in capsys.readouterr().err
    assert terminal.main(["check", f"{tmp_path}/nothing"]) == 2
    assert not list(tmp_path.iterdir())


def test_draws_are_the_same_on_every_machine():
    draw = Draw("0/make_folder/0")
    assert (draw.words(3), draw.number(1, 100)) == PINNED


PINNED = (["sage", "agate", "lion"], 44)
