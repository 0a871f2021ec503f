"""Every row with a solution is played: it scores 1 and doing nothing 0, or the row is named. Real sandboxes."""

import asyncio
import dataclasses
import json
import os
import signal

import pytest

from jaxagent.config import ConfigError, flags
from jaxagent.config.parse import modern, to_dict
from jaxagent.data import proofs, sources
from jaxagent.envs import check
from jaxagent.envs.base import Environment, Step, Verdict
from jaxagent.envs.ragen.bandit import Bandit
from jaxagent.envs.ragen.environment import Ragen, RagenAttempt
from jaxagent.envs.ragen.frozen_lake import FrozenLake
from jaxagent.envs.ragen.sokoban import Sokoban
from jaxagent.types import StopReason, Task
from tests.envs.coding import tiny
from tests.envs.coding.conftest import play as play


@dataclasses.dataclass(frozen=True, kw_only=True)
class Echo(Environment):
    """Solved by the answer; by nothing, too, where the row's kind says so. `broken` fails."""

    def oracle(self, task):
        return task.answers[:1] or None

    def attempt(self, task):
        return _Echo(task)


class _Echo:
    def __init__(self, task):
        self._task = task
        self.stop_strings, self.counters, self.closed = (), {}, False

    async def start(self):
        if self._task.kind == "broken":
            raise RuntimeError("nobody listens")
        if self._task.kind == "ended":
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(10)
        return ()

    async def step(self, action):
        return Step(stop_reason=StopReason.ANSWER)

    async def verify(self, transcript):
        right = transcript.actions in self._task.answers or self._task.kind == "free"
        reward = {"paid": 0.5}.get(self._task.kind, 2.0 * right)  # some pay for doing nothing, solved or not
        return Verdict(reward, {"solved": float(right and self._task.kind != "wrong")})

    async def close(self):
        pass


def _argv(folder, *more):
    (folder.parent / "echo.py").write_text(
        "from configs import search_r1\n\n\ndef get_config():\n"
        f"    c = search_r1.get_config('laptop')\n    c.env = {{'name': '{__name__}:Echo'}}\n    return c\n"
    )
    fields = (f"--config.data.source={folder}", f"--config.workdir={folder.parent}/run")
    return ["check", f"--config={folder.parent}/echo.py", *fields, *more]


def _row(id, **changes):
    return {"id": id, "prompt": f"What is {id}?", "answers": [id.upper()]} | changes


def _write(path, *data):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in data), "utf-8")


def test_what_became_of_every_row_is_written_and_a_run_counts_what_is_not_proven(tmp_path, capsys):
    data = tmp_path / "data"
    good = [_row(f"good{i}") for i in range(3)]
    bad = [
        _row("broken", kind="broken"),
        _row("free", kind="free"),
        _row("wrong", kind="wrong"),
        _row("none", answers=[]),
    ]
    _write(data / "train.jsonl", *good, *bad)
    _write(data / "test.jsonl", _row("held"))
    assert check.main(_argv(data, "--tasks=2")) == 0
    assert check.main(_argv(data)) == 1  # goes on
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said[0] == "3 tasks to check, of 3" and "5 tasks to check, of 8" in said
    for line in ("good2 1 0 proven", "free 1 2 wrong", "wrong 0 0 wrong"):
        assert line in said
    assert said[-1] == "8 tasks: 4 proven, 2 wrong, 1 failed, 1 without a solution"
    assert any(line.startswith("broken - - failed: RuntimeError: nobody listens") for line in said)
    assert "none - - without a solution: the row has no solution that this environment can play" in said
    lines = [json.loads(line) for line in (data / "proven.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines if proofs.is_proven(line)] == ["good0", "good1", "held", "good2"]
    assert len(lines) == 8 and check.main(_argv(data, "--json")) == 1  # nothing is left to do, and not all is proven
    told = json.loads(capsys.readouterr().out)
    assert [(one["id"], one["idle"]) for one in told["tasks"]][4] == ("free", 2.0) and told["proven"] == 4
    assert check.main(_argv(data, "--again")) == 1  # the bad ones, again
    train, held_out = sources.load_tasks(data, "train", need_answers=False), sources.load_tasks(data, "test")
    told = proofs.check(train, held_out, [data], Echo().content, False)
    assert (
        told == "4 of 7 training and 0 of 1 held-out tasks are not proven by their solutions (4 were tried and failed)"
    )
    with pytest.raises(ConfigError, match=r"data\.unchecked=refuse: 4 of 7 .*, the first broken, free, wrong\. pyth"):
        proofs.check(train, held_out, [data], Echo().content, True)
    with (data / "proven.jsonl").open("a") as file:
        file.write('{"id": "cut off')  # by a kill
    _write(data / "train.jsonl", *good, _row("good0x", prompt="another"))
    train = sources.load_tasks(data, "train")
    assert proofs.check(train, held_out, [data], Echo().content, False).startswith(
        "1 of 4 training and 0 of 1 held-out tasks are not"
    )
    _write(data / "train.jsonl", good[0] | {"answers": ["other"]})  # a row that changed is another one
    assert "1 of 1 training" in proofs.check(sources.load_tasks(data, "train"), held_out, [data], Echo().content, False)


def test_what_pays_for_doing_nothing_is_not_proven(tmp_path, capsys):
    _write(tmp_path / "data/train.jsonl", _row("good"), _row("paid", kind="paid"))
    assert check.main(_argv(tmp_path / "data")) == 1
    assert "paid 1 0.5 wrong" in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_check_goes_on_behind_a_line_that_a_kill_has_cut(tmp_path):
    data = tmp_path / "data"
    _write(data / "train.jsonl", _row("one"), _row("two"))
    assert check.main(_argv(data, "--tasks=1")) == 0
    with (data / "proven.jsonl").open("a") as file:
        file.write('{"id": "cut off')
    assert check.main(_argv(data)) == 0
    assert check.main(_argv(data)) == 0  # and what it wrote can be read


def test_sigterm_ends_a_check_as_ctrl_c_does(tmp_path, capsys, monkeypatch):
    data, handler, folders = tmp_path / "data", signal.getsignal(signal.SIGTERM), tmp_path / "temporary"
    _write(data / "train.jsonl", _row("one"), _row("ended", kind="ended"))
    folders.mkdir()
    monkeypatch.setattr(check.tempfile, "tempdir", str(folders))
    assert check.main(_argv(data, "--jobs=1")) == 143 and signal.getsignal(signal.SIGTERM) is handler
    assert capsys.readouterr().err.splitlines()[-1] == "SIGTERM: the same command goes on"
    assert not list(folders.glob("jaxagent-check-*"))


def test_a_folder_that_has_changed_since_its_check_is_not_proven(tmp_path):
    data = tmp_path / "data"
    _write(data / "train.jsonl", _row("one"))
    train = sources.load_tasks(data, "train")
    _write(data / "proven.jsonl", {"task": train.digests[0], "oracle": 1.0, "idle": 0.0, "error": "", "content": "a"})
    assert proofs.check(train, train, [data], lambda task: "a", True) == ""
    with pytest.raises(ConfigError, match=r"1 of 1 training .* \(0 were tried and failed\)"):
        proofs.check(train, train, [data], lambda task: "b", True)


def test_what_earlier_versions_called_it_still_holds(tmp_path):
    def unchecked(*more):
        return flags.parse_config(["t", "--config=search_r1", *more]).data.unchecked

    assert unchecked() is None and unchecked("--config.data.unchecked=warn") == "warn"
    assert (
        unchecked("--config.data.only_proven=True") == "refuse" and unchecked("--config.data.only_proven=False") is None
    )
    stored = to_dict(flags.parse_config(["t", "--config=search_r1"]))
    assert modern(stored | {"data": stored["data"] | {"only_proven": True}})["data"]["unchecked"] == "refuse"
    assert "only_proven" not in modern(stored | {"data": stored["data"] | {"only_proven": False}})["data"]


def test_who_has_no_solutions_is_told(tmp_path, capsys):
    assert check.main(["check", "--config=memagent", f"--config.workdir={tmp_path}"]) == 2
    assert "MemAgent's rows do not say how they are solved" in capsys.readouterr().err
    _write(tmp_path / "rows.jsonl", _row("a"))
    assert check.main(["check", str(tmp_path / "rows.jsonl")]) == 2
    assert "Which environment plays the rows of" in capsys.readouterr().err


@pytest.mark.parametrize("world", [Bandit(), FrozenLake(), Sokoban()], ids=lambda world: type(world).__name__)
@pytest.mark.parametrize("think", [True, False])
def test_a_text_world_is_solved_by_the_shortest_way(world, think):
    environment = Ragen(world=world, think=think, max_turns=10)

    async def all_of_them():
        tasks = [Task(f"t{seed}", f"seed {seed}", (), "", {}) for seed in range(12)]
        return [await check.check(environment, environment_attempt(environment), task) for task in tasks]

    proofs_made = asyncio.run(all_of_them())
    assert [proof["idle"] for proof in proofs_made] == [0.0] * 12
    assert sum(proof["oracle"] == 1.0 for proof in proofs_made) >= 10  # a bandit may pay for no arm


def environment_attempt(environment):
    return lambda task: RagenAttempt(task, environment)


def test_software_tasks_are_checked_in_sandboxes(tmp_path, play):
    """A gold patch, rows as published, whose bug is there, and one that is solved as it stands; the same judgement."""
    del play  # skips where no sandbox works
    task = tiny.unittest_task()
    about = task.metadata["coding"]
    solved = {**about, "files": about["files"] | {"calc.py": tiny.GOOD}}
    unappliable = {**about, "patch": about["patch"].replace("a - b", "a * b")}
    silent = {name: value for name, value in about.items() if name != "patch"}
    data = tmp_path / "train.jsonl"
    kinds = {"gold": about, "solved": solved, "unappliable": unappliable, "silent": silent}
    _write(data, *({"id": name, "prompt": name, "answers": [], "metadata": {"coding": a}} for name, a in kinds.items()))
    _write(tmp_path / "held.jsonl", {"id": "held", "prompt": "h", "answers": [], "metadata": {"coding": about}})
    fields = [f"--config.data.source={data}", f"--config.data.eval_source={tmp_path}/held.jsonl", "--jobs=2"]
    assert check.main(["check", "--config=configs/coding_agent.py", f"--config.workdir={tmp_path}/run", *fields]) == 1
    found = {p["id"]: p for p in map(json.loads, (tmp_path / "train.jsonl.proven.jsonl").read_text().splitlines())}
    assert [name for name in kinds if proofs.is_proven(found[name])] == ["gold"]
    assert found["solved"]["idle"] == 1.0
    assert "the row's patch cannot be applied" in found["unappliable"]["error"]
    assert "no solution" in found["silent"]["error"]
    assert proofs.is_proven(json.loads((tmp_path / "held.jsonl.proven.jsonl").read_text()))
