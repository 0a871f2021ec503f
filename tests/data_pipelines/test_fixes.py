"""Generated repositories: each has one mistake, which looking always mends and assuming only sometimes."""

import itertools
import json
import subprocess
import sys

import pytest

from data_pipelines import fixes
from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.coding import verify
from jaxagent.envs.terminal import dialogue, replies
from jaxagent.rollout import demonstrations


def drafts(number, seed=0):
    return list(itertools.islice(fixes.generate(seed), number))


def play(folder, row, commands):
    """What the commands print, with their statuses, in a fresh copy of the repository; and the test's status."""
    folder.mkdir()
    about = row["metadata"]["coding"]
    for name, text in about["files"].items():
        (folder / name).write_text(text)
    shell = {"cwd": folder, "shell": True, "capture_output": True, "text": True, "timeout": 60}
    said = [subprocess.run(command, **shell) for command in commands]
    test = subprocess.run("python3 -", input=about["check_status"]["script"], **shell)
    return [(done.stdout.rstrip(), done.returncode) for done in said], test


HAND = fixes.Draft(
    kind="bound",
    wording=0,
    module="oak",
    name="cedar",
    right=fixes.Expression("elm", "<", 37),
    wrong=fixes.Expression("elm", "<=", 37),
    others={"fig": fixes.Expression("", "-", 11), "elm": fixes.Expression("", "+", 20)},
    position=1,
)


def test_a_hand_computed_draft():
    assert HAND.issue == "In oak.py cedar(x) must give elm(x) < 37."
    assert HAND.source(mended=False) == (
        "def fig(x):\n    return x - 11\n\n\n"
        "def cedar(x):\n    return elm(x) <= 37\n\n\n"
        "def elm(x):\n    return x + 20\n"
    )
    assert HAND.shows() == [17]  # 17 + 20 = 37
    assert "assert oak.cedar(17) == False" in HAND.test()
    assert fixes.look(HAND) == "grep -A1 'def cedar(' oak.py"
    assert fixes.repair(HAND, HAND.wrong) == "sed -i 's/return elm(x) <= 37/return elm(x) < 37/' oak.py"


def test_the_test_is_red_before_and_green_after():
    """`value` is arithmetic of its own; here Python reads the module's text."""
    for draft, row in drafts(400):
        module = f"{draft.module}.py"
        assert row["metadata"]["coding"]["files"] == {module: draft.source(mended=False)}
        assert sum(a != b for a, b in zip(*(draft.source(m).splitlines() for m in (False, True)), strict=True)) == 1
        for mended in (False, True):
            functions: dict = {}
            exec(draft.source(mended), functions)
            checks = [line for line in draft.test().splitlines() if line.startswith("assert ")]
            passed = [eval(check.removeprefix(f"assert {draft.module}."), functions) for check in checks]
            assert len(checks) >= 7 and all(passed) == mended, row
        assert len(verify.calls_of(draft.test())[1]) >= 5  # the judge compares them, and runs no script
        assert draft.source(mended=False).count(f"return {draft.wrong}\n") == 1  # sed changes one place


def test_looking_mends_every_task_and_assuming_mends_flips_alone(tmp_path):
    """With the real grep, sed and python3: what demonstrations show is what the commands print."""
    chosen = {}
    for draft, row in drafts(40):
        chosen.setdefault(draft.kind, (draft, row))
    assert sorted(chosen) == sorted(fixes.KINDS)
    for kind, (draft, row) in chosen.items():
        for guess_frac, right in ((0.0, True), (1.0, kind == "flip")):
            shown = fixes.demonstration(draft, row, guess_frac)
            assert demonstrations._problem(shown) == "" and len(shown["turns"]) == (2 if guess_frac else 3)
            said = [replies.parse("plain", turn["action"]) for turn in shown["turns"]]
            assert [reply.done for reply in said] == [False] * (len(said) - 1) + [True]
            commands = [reply.command for reply in said[:-1]]
            printed, test = play(tmp_path / f"{kind}{right}{guess_frac}", row, commands)
            observed = [dialogue.observation("plain", c, *p) for c, p in zip(commands, printed, strict=True)]
            assert observed == [turn["observation"] for turn in shown["turns"][:-1]]
            assert (test.returncode == 0) == right, test.stderr
        (tmp_path / "fix.patch").write_text(row["metadata"]["coding"]["patch"])
        applied, test = play(tmp_path / f"{kind}-patched", row, [f"patch -p1 < {tmp_path}/fix.patch"])
        assert applied[0][1] == test.returncode == 0


def test_rows_are_reproducible_distinct_and_split_by_issue_alone():
    first = drafts(400)
    assert first == drafts(400) and first != drafts(400, seed=1)
    assert len({row["prompt"] for _, row in first}) == 400
    assert [row["kind"] for _, row in first[:8]] == [*fixes.KINDS, *fixes.KINDS]
    held = [fixes.split_of(draft) for draft, _ in first].count("heldout")
    assert 0.1 < held / 400 < 0.3
    assert not sys.stdlib_module_names & set(fixes.WORDS)  # a module of such a name would be another one


def test_how_many_demonstrations_do_not_look():
    shown = [fixes.demonstration(draft, row, 0.8) for draft, row in drafts(600)]
    blind = [len(demonstration["turns"]) == 2 for demonstration in shown]
    assert 0.75 < sum(blind) / len(blind) < 0.85
    assert {demonstration["kind"] for demonstration, b in zip(shown, blind, strict=True) if not b} == set(fixes.KINDS)


def test_a_whole_dataset(tmp_path, capsys):
    arguments = ["--num=300", "--demonstrations=40", "--guess_frac=0.8", f"--out={tmp_path / 'data'}"]
    assert fixes.main(arguments) == 0 and "wrote" in capsys.readouterr().out
    train = sources.load_tasks(tmp_path / "data", "train", need_answers=False)
    heldout = sources.load_tasks(tmp_path / "data", "heldout", need_answers=False)
    assert len(train) > len(heldout) > 10 and not {t.prompt for t in train} & {t.prompt for t in heldout}
    assert [row["id"] for row in demonstrations.load(tmp_path / "data/full.jsonl")][:20] == [t.id for t in train][:20]
    texts = [json.loads(line)["text"] for line in (tmp_path / "data/texts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.train(texts, 1280, dialogue.TAGS["plain"])
    assert all(len(tokenizer.encode(f" {word}")) == 1 for word in (*fixes.WORDS, *fixes.NUMBERS))
    assert fixes.main(arguments) == 2 and "exists" in capsys.readouterr().err  # nothing is overwritten
    with pytest.raises(ConfigError, match="too few"):
        fixes.write(tmp_path / "few", 1, 0, 0)
    assert not (tmp_path / "few").exists()
