"""The environment `speedup`: how turns are read and paid, its tasks and their solutions, what it refuses."""

import asyncio
import dataclasses
import json

import pytest

from configs import speedup
from data_pipelines import speedup_tasks
from jaxagent import config as schema
from jaxagent import main as cli
from jaxagent.config import ConfigError, SandboxConfig
from jaxagent.data import rows as data_rows
from jaxagent.envs import check
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.speedup import rows, station, texts
from jaxagent.envs.speedup.environment import Speedup, SpeedupAttempt, gain
from jaxagent.envs.speedup.station import Measured
from jaxagent.rollout.workers import Workers
from jaxagent.runs import checks
from jaxagent.sandbox.base import SandboxError
from jaxagent.types import StopReason, Task, TokenKind
from tests import tiny_run

PLAIN = schema.parse(speedup.get_config()).env
KERNELBENCH = {
    "level": 1,
    "name": "1_Square_matrix_multiplication_.py",
    "problem_id": 1,
    "code": "import torch\nclass Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n",
}


def task_of(row):
    return Task(row["id"], row["prompt"], (), row["kind"], row["metadata"])


FOLD = task_of(speedup_tasks.fold_row("sum_times", 2000, "p, q", "plain"))


class Scripted:
    """Stations that say what they are told."""

    def __init__(self, *measured):
        self.measured, self.programs = list(measured), []

    async def measure(self, problem, code, rounds, calls, seconds):
        self.programs.append(code)
        return self.measured.pop(0)


def played(actions, stations, **changes):
    """(verdict, attempt, last step) of an attempt."""

    async def play():
        attempt = SpeedupAttempt(FOLD, dataclasses.replace(PLAIN, **changes), stations)
        await attempt.start()
        for action in actions:
            step = await attempt.step(action)
        return await attempt.verify(Transcript("", ())), attempt, step

    return asyncio.run(play())


# ---- what a turn says


@pytest.mark.parametrize(
    ("style", "text", "code", "is_done"),
    [
        ("plain", "<code>p @ q</code>", "p @ q", False),
        ("plain", "<code>a</code><code>b</code>", "a", False),  # a generation ends there
        ("plain", "<code>p @ q", None, False),
        ("plain", "<code> </code>", None, False),
        ("plain", "<done>", None, True),
        ("plain", "<code><done></code>", "<done>", False),
        ("fenced", "```python\na\n```\nor\n```c\nb\n```", "b\n", False),
        ("fenced", "```\na\n```\n<done>", "a\n", True),
        ("fenced", "<think>```\na\n```\n<done></think>no", None, False),
        ("fenced", f"```\n{'x' * 30_001}\n```", None, False),
    ],
)
def test_turns_are_read(style, text, code, is_done):
    assert texts.find_program(style, text) == (code, is_done)


def test_a_program_stands_behind_the_tasks_head_and_is_shown_what_came_of_it():
    stations = Scripted(Measured("wrong: call 0 is off by 3"), Measured("", 30.0, 25.0))
    verdict, attempt, step = played(["no", "<code>p</code>", "<code>p @ q</code>"], stations, max_turns=4)
    assert stations.programs[1] == "import numpy as np\n\n\ndef f(p, q):\n    return p @ q"
    assert step.observation.parts == (("<out>correct, 30.0 times as fast</out>\n", TokenKind.OBSERVATION),)
    assert attempt.counters == {"revisions": 2.0, "failed_revisions": 1.0, "invalid_actions": 1.0}
    assert verdict.reward == 1.0 and verdict.components["fast_2"] == 1.0 and verdict.components["speedup"] == 30.0
    assert played(["<done>"], Scripted())[2].stop_reason is StopReason.ANSWER
    assert played(["no"] * 3, Scripted())[2].stop_reason is StopReason.TURN_LIMIT


# ---- what is paid


def test_the_formula():
    """By hand: log(2.3 / 1.15) / log(4.6 / 1.15) = log 2 / log 4."""
    assert gain(2.3, 4.6, 0.15) == pytest.approx(0.5)
    assert [gain(s, 4.6, 0.15) for s in (0.0, 0.5, 1.0, 1.15, 4.6, 1e9)] == pytest.approx([0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("counts", "floor", "reward"),
    [("best", 0.0, 1.0), ("last", 0.0, 0.0), ("best", 0.3, 1.0), ("last", 0.3, 0.3)],
)
def test_the_best_correct_revision_counts_or_the_last(counts, floor, reward):
    measured = Measured("", 9.0, 8.0), Measured("", 1.2, 1.1)
    actions = ["<code>1</code>", "<code>2</code>"]
    verdict, _, _ = played(actions, Scripted(*measured), counts=counts, correct_reward=floor)
    assert verdict.reward == pytest.approx(reward)
    verdict, _, _ = played(actions, Scripted(Measured("no"), Measured("no")), counts=counts, correct_reward=floor)
    assert verdict.reward == verdict.components["correct"] == 0.0


def test_what_is_only_faster_in_the_best_round_is_not_paid():
    verdict, _, _ = played(["<code>1</code>", "<done>"], Scripted(Measured("", 5.0, 1.1)))
    assert verdict.reward == 0.0 and verdict.components["speedup"] == 5.0


# ---- tasks


def test_a_family_in_a_shape_is_of_one_split_whatever_its_arguments_are_called():
    split_of = {}
    for split, row in speedup_tasks.generate(0, "all", "plain"):
        pair = row["kind"], row["id"].split("/")[2]
        assert split_of.setdefault(pair, split) == split
    assert set(split_of.values()) == {"train", "heldout", "heldout_families"}
    unseen = {kind for (kind, _), split in split_of.items() if split == "heldout_families"}
    assert unseen == {f"folds/{family}" for family in speedup_tasks.UNSEEN}
    assert [row["id"] for _, row in speedup_tasks.generate(0, "folds", "plain")] == [
        row["id"] for _, row in speedup_tasks.generate(0, "folds", "fenced")
    ]


@pytest.mark.slow
def test_solutions_earn_everything_and_doing_nothing_nothing(tmp_path, capsys):
    """A fold of each kind, and every other family in its smallest and largest size, through the command."""
    wanted = [speedup_tasks.fold_row(f"{fold}_square", 2000, "x, y", "fenced") for fold in speedup_tasks.FOLDS]
    for name, family in speedup_tasks.FAMILIES.items():
        wanted += [speedup_tasks.family_row(name, n) for n in (family.sizes[0], family.sizes[-1])]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wanted))
    flags = ["--config=speedup", "--config.env.format=fenced", "--config.env.sandbox.memory_mb=512"]
    assert check.main(["check", str(tmp_path), *flags, f"--config.workdir={tmp_path}/run"]) == 0, (
        capsys.readouterr().out
    )
    assert f"{len(wanted)} tasks: {len(wanted)} proven" in capsys.readouterr().out


def test_demonstrations_are_of_folds_in_the_plain_style(tmp_path):
    speedup_tasks.write(tmp_path / "folds", 0, "folds", "plain", 40, 0.5)
    shown = [json.loads(line) for line in (tmp_path / "folds/full.jsonl").read_text().splitlines()]
    assert len(shown) == 40 and {row["turns"][-1]["action"] for row in shown} == {texts.DONE}
    observed = PLAIN.observation(shown[0]["turns"][0]["action"], shown[0]["turns"][0]["observation"])
    assert observed.text.startswith("<out>correct, ") and observed.parts[0][1] is TokenKind.OBSERVATION
    with pytest.raises(ConfigError, match="'plain' only, not 'fenced'"):
        speedup_tasks.write(tmp_path / "more", 0, "folds", "fenced", 40, 0.5)


@pytest.mark.parametrize("preset", ["laptop", "laptop+gspo", "qwen2.5-1.5b"])
def test_presets(preset):
    checks.check(schema.parse(speedup.get_config(preset)))


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": []}, "inputs': must not be empty: what is always the same"),
        ({"language": "rust"}, "language': must be one of 'numpy', 'c', got"),
        ({"full_speedup": 1.1}, r"full_speedup must be more than 1 \+ env.margin = 1.15"),
        ({"output": {"dtype": "float64", "shape": [0]}}, "shapes must be whole numbers above 0"),
        ({"output": {"dtype": "float64", "shape": [2**24]}}, "2,097,152 numbers in all"),
        ({"output": {"dtype": "object", "shape": []}}, "output.dtype': must be one of"),
    ],
)
def test_a_task_that_cannot_be_measured_is_named(changes, message):
    metadata = {rows.KEY: FOLD.metadata[rows.KEY] | changes}
    with pytest.raises(ConfigError, match=f"task 't'.*{message}"):
        PLAIN.problem(Task("t", "", (), "", metadata))


def test_kernelbenchs_rows_are_read_and_refused_by_name():
    task = data_rows.to_task(KERNELBENCH, need_answers=False)
    assert task.kind == "level1/1_Square_matrix_multiplication_.py" and "get_inputs" in task.prompt
    with pytest.raises(ConfigError, match=r"kernelbench/level1/1_Square.* measured on a GPU with torch in the sandbox"):
        Speedup().problem(task)
    with pytest.raises(data_rows.RowError, match="must define get_inputs"):
        data_rows.to_task(KERNELBENCH | {"code": "class Model: ..."}, need_answers=False)


def test_slow_programs_must_fit_into_an_episode():
    with pytest.raises(ConfigError, match=r"env.episode_timeout_s=200 must be more than .* = 200"):
        Speedup(episode_timeout_s=200.0, max_turns=4)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"cc": False}, "tasks in C need a compiler there, and cc is not found: install gcc"),
        ({"numpy": None, "python": [2, 7]}, "its python3 has no NumPy, .* install Debian's python3-numpy"),
        ({"able": ["it can write files"]}, "a program that is measured is not shut in: it can write files"),
    ],
)
def test_what_a_sandbox_lacks_is_said_in_one_sentence_at_open(monkeypatch, about, message):
    async def look(stations):
        return {"numpy": "1.24", "python": [3, 11], "cc": True, "able": []} | about

    monkeypatch.setattr(station.Stations, "look", look)
    with Workers(1) as workers, pytest.raises(ConfigError, match=message):
        opening = Opening(None, [], workers.run, lambda line: None)
        with station.open_stations(opening, SandboxConfig(), 1, compiler=True):
            pass


def test_a_task_that_fails_itself_is_no_candidates_fault_and_a_dead_station_is_replaced():
    notes = []
    with Workers(1) as workers:
        opening = Opening(None, [], workers.run, notes.append)
        with station.open_stations(opening, SandboxConfig(), 1, compiler=False) as stations:
            problem = PLAIN.problem(FOLD)

            def measure(**changes):
                return workers.run(stations.measure(problem | changes, problem["reference"], 1, 1, 5.0), 60.0)

            with pytest.raises(RuntimeError, match="reference or inputs fail: line 1: NameError: name 'g'"):
                measure(reference="g()")
            with pytest.raises(RuntimeError, match=r"gives float64\(3,\), not float64\[2000\]"):
                measure(inputs=[problem["inputs"][0] | {"draw": "rng.random(3)"}] * 2)
            assert measure().error == ""
            workers.run(stations._free._queue[0].stop_processes(), 30.0)
            with pytest.raises(SandboxError):
                workers.run(asyncio.wait_for(stations.measure(problem, "", 1, 1, -48.0), 60.0), 90.0)
            assert measure().error == ""
    assert notes[-1].startswith("measuring: processor time, NumPy ")


# ---- a run


RUN = (
    "--config.numerics=fast --config.data.source.num_demonstrations=200 --config.env.turn_tokens=24 "
    "--config.env.observation_tokens=24 --config.env.context_tokens=192 --config.warm_start.batch.row_tokens=192 "
    "--config.warm_start.curriculum_steps=0 --config.warm_start.max_steps=3 --config.rl.steps=2 "
    "--config.rl.batch.row_tokens=192"
)


@pytest.mark.slow
def test_a_tiny_run(tmp_path, sandbox, capsys):
    """Warm start, gate, RL and evaluation. A random policy gains nothing, but no attempt fails."""
    assert cli.main(tiny_run.argv(tmp_path / "run", *RUN.split(), config="speedup")) == 0
    assert "measuring: processor time, NumPy " in capsys.readouterr().out
    summary, _ = tiny_run.ended(tmp_path / "run")
    assert summary["eval/n"] == 8 and summary["eval/gain_before_rl"] == summary["eval/gain_after_rl"] == 0.0
    assert "eval/gain_folds_after_rl" in summary and "eval/revisions_after_rl" in summary
