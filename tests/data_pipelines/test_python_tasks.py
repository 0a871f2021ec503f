"""Generated programming tasks and word problems: reproducible, split cleanly, solvable, shown as they really are."""

import ast
import itertools
import json
import re

import pytest

from configs import code_agent
from data_pipelines import arithmetic, python_tasks
from jaxagent import config as schema
from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Transcript
from jaxagent.envs.python import formats, hidden_tests
from jaxagent.envs.python.environment import PythonAttempt
from jaxagent.rollout import demonstrations
from jaxagent.types import StopReason, Task
from tests.envs.opened import opened_sandboxes


def drafts(number, seed=0):
    return list(itertools.islice(python_tasks.generate(seed), number))


def problems(number, seed=0):
    return list(itertools.islice(arithmetic.generate(seed), number))


def to_task(row):
    return Task(row["id"], row["prompt"], tuple(row["answers"]), row["kind"], row["metadata"])


# ---- programming tasks


def test_a_hand_computed_draft():
    draft = python_tasks.Draft("nested", 0, "", {"a": "fig", "b": "oak"}, 11, (3, 5, 2, 7))
    assert draft.description == "Write f(x) = lib.fig of lib.oak(x)." and draft.kind == "first/nested"
    assert draft.program(False) == "import lib\ndef f(x): return lib.fig(lib.oak(x))\nprint(f(2))"
    assert draft.value(4) == 3 * (2 * 4 + 7) + 5 == 50
    old = python_tasks.Draft("minus", 1, "renamed", {"a": "fig", "b": "oak", "new": "elm"}, 40, (3, 5, 2, 7))
    assert old.description == "Write f(x) = lib.fig(x) and 40 less." and old.kind == "revise/renamed"
    assert "lib.fig(x) - 40" in old.program(False) and "lib.elm(x) - 40" in old.program(True)
    assert python_tasks.play(old.program(False), old.library()) == ("AttributeError: lib.fig is now lib.elm", True)
    assert python_tasks.play(old.program(True), old.library()) == ("-29", False)  # 3 x 2 + 5 - 40


def test_programs_compute_the_hidden_values():
    """`value` is arithmetic of its own; the mended programs run on the library's text."""
    for draft, row in drafts(120):
        tests = row["metadata"]["hidden_tests"].values()
        calls = ", ".join(test["call"] for test in tests)
        said, failed = python_tasks.play(f"{draft.program(True)}\nprint([{calls}])", row["metadata"]["files"]["lib.py"])
        assert not failed and ast.literal_eval(said.splitlines()[-1]) == [test["value"] for test in tests], row
        assert python_tasks.play(draft.program(False), row["metadata"]["files"]["lib.py"])[1] == bool(draft.fault)


def test_rows_are_reproducible_distinct_and_split_by_description_alone():
    first = drafts(400)
    assert first == drafts(400) and first != drafts(400, seed=1)
    assert len({row["prompt"] for _, row in first}) == 400
    assert {row["kind"] for _, row in first} == {
        *(f"first/{form}" for form in python_tasks.FORMS), "revise/renamed", "revise/text",
    }  # fmt: skip
    splits = {row["prompt"]: python_tasks.split_of(draft) for draft, row in first}
    assert 0.1 < list(splits.values()).count("heldout") / 400 < 0.3
    # The library is not part of it: the same words with another library fall on the same side.
    for draft, row in drafts(20):
        other = python_tasks.Draft(draft.form, draft.wording, draft.fault, draft.names, draft.number, (2, 1, 3, 1))
        assert python_tasks.split_of(other) == splits[row["prompt"]]


def test_demonstrations_run_read_and_revise_or_stop_there():
    counts = {"stops": 0, "revises": 0}
    for draft, row in drafts(300):
        shown = python_tasks.demonstration(draft, row, "plain", 0.8)
        assert demonstrations._problem(shown) == "" and shown["turns"][-1] == {"action": "<done>", "observation": ""}
        failed = ["Error: " in turn["observation"] for turn in shown["turns"][:-1]]
        if draft.fault:
            assert failed in ([True], [True, False])
            counts["stops" if len(failed) == 1 else "revises"] += 1
        else:
            assert failed == [False]
    assert 0.7 < counts["stops"] / sum(counts.values()) < 0.9
    every = [python_tasks.demonstration(draft, row, "plain", 0.0) for draft, row in drafts(40)]
    assert all(len(shown["turns"]) == 2 + shown["kind"].startswith("revise/") for shown in every)


# ---- word problems


def test_answers_are_those_of_the_programs():
    for row in problems(240):
        said, failed = python_tasks.play(row["metadata"]["program"], "")
        assert not failed and row["answers"] == [said], row
        numbers = set(re.findall(r"\d+", row["metadata"]["program"]))
        assert numbers == set(re.findall(r"\d+", row["prompt"])) and all(int(number) > 11 for number in numbers)
    assert arithmetic.value("two_step/pack_take", 287, 46, 118) == 287 * 46 - 118 == 13084


def test_no_wording_and_no_numbers_cross_the_splits():
    split = {"train": [], "heldout": [], "heldout_templates": [], "": []}
    for row in problems(3000):
        numbers = tuple(sorted(map(int, re.findall(r"\d+", row["metadata"]["program"]))))
        pattern = next(
            i
            for i, wording in enumerate(arithmetic.KINDS[row["kind"]][1])
            if re.fullmatch(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(wording)), row["prompt"])
        )
        split[row["metadata"]["split"]].append((numbers, (row["kind"], pattern)))
    seen = {name: ({n for n, _ in rows}, {w for _, w in rows}) for name, rows in split.items()}
    train, heldout, new = seen["train"], seen["heldout"], seen["heldout_templates"]
    assert not train[0] & (heldout[0] | new[0]) and train[1] == heldout[1] and not train[1] & new[1]
    assert {wording for _, wording in new[1]} == {2} and 0.1 < len(split["heldout"]) / len(split["train"]) < 0.4


def test_an_estimate_is_never_right():
    assert [arithmetic.estimate(n) for n in (13084, 468, 300, 99999, 27, 18044)] == [
        "13000", "470", "310", "100000", "30", "18000",
    ]  # fmt: skip
    rows = [row for row in problems(600) if row["kind"].startswith("two_step/")]
    shown = [arithmetic.demonstration(row, "plain", 0.8) for row in rows]
    estimates = [(d, r) for d, r in zip(shown, rows, strict=True) if len(d["turns"]) == 1]
    assert 0.7 < len(estimates) / len(rows) < 0.9
    for demonstration, row in estimates:
        found = formats.find_answer("plain", demonstration["turns"][0]["action"])
        assert found not in row["answers"] and abs(int(found) - int(row["answers"][0])) < 0.1 * int(row["answers"][0])
    easy = [arithmetic.demonstration(row, "plain", 1.0) for row in problems(60) if row["kind"].startswith("one_step/")]
    assert all(len(demonstration["turns"]) == 2 for demonstration in easy)


# ---- both


@pytest.mark.parametrize("pipeline", [python_tasks, arithmetic])
def test_a_whole_dataset(tmp_path, pipeline, capsys):
    arguments = ["--num=300", "--demonstrations=40", "--early_frac=0.8", f"--out={tmp_path / 'data'}"]
    assert pipeline.main(arguments) == 0 and "wrote" in capsys.readouterr().out
    train = sources.load_tasks(tmp_path / "data", "train", need_answers=pipeline is arithmetic)
    heldout = sources.load_tasks(tmp_path / "data", "heldout", need_answers=pipeline is arithmetic)
    assert len(train) > len(heldout) > 10
    if pipeline is python_tasks:
        assert all(len(hidden_tests.of_task(task)) == 4 and hidden_tests.files_of(task) for task in heldout)
        firsts = [(task, next(iter(hidden_tests.of_task(task).values()))[1]) for task in heldout]
        assert not any(str(value) in task.prompt for task, value in firsts)
    assert [row["id"] for row in demonstrations.load(tmp_path / "data/full.jsonl")][:20] == [t.id for t in train][:20]
    texts = [json.loads(line)["text"] for line in (tmp_path / "data/texts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.train(texts, 1536 if pipeline is python_tasks else 2560, formats.TAGS["plain"])
    for text in (".lagoon", " 37") if pipeline is python_tasks else ("084", "13", " 287", " 46"):
        assert len(tokenizer.encode(text)) == 1 + text.startswith("."), text
    assert pipeline.main(arguments) == 2 and "exists" in capsys.readouterr().err  # nothing is overwritten
    with pytest.raises(ConfigError, match="too few"):
        pipeline.write(tmp_path / "few", 1, 0, 0, "plain")
    assert not (tmp_path / "few").exists()


@pytest.mark.parametrize("style", ["plain", "fenced"])
def test_demonstrations_are_what_a_real_sandbox_says(style):
    """Every action of a demonstration, played in the environment: the same observations, and a reward of 1."""
    raw = code_agent.get_config()
    raw.env.update(format=style)
    raw.env.sandbox.warm = 2
    cfg, chosen = schema.parse(raw), {}
    for draft, row in drafts(60):
        chosen.setdefault(row["kind"], (draft, row))
    with opened_sandboxes(cfg.env.sandbox) as (sandboxes, workers):
        for draft, row in chosen.values():
            shown = python_tasks.demonstration(draft, row, style, 0.0)

            async def play(row=row, shown=shown):
                environment = PythonAttempt(to_task(row), cfg.env, sandboxes.take)
                try:
                    steps = [await environment.step(turn["action"]) for turn in shown["turns"]]
                    return steps, await environment.verify(Transcript("", ()))
                finally:
                    await environment.close()

            steps, verdict = workers.run(play(), 120.0)
            said = [step.observation.text for step in steps[:-1]]
            assert said == [turn["observation"] for turn in shown["turns"][:-1]], row["kind"]
            assert steps[-1].stop_reason == StopReason.ANSWER and verdict.reward == 1.0
