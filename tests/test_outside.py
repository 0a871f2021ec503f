"""Classes of another package, named by import path: docs/add_an_environment.md, run as it stands."""

import dataclasses
import functools
import hashlib
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from jaxagent import loop
from jaxagent.config import ConfigError, flags
from jaxagent.data.dataset import Generated
from jaxagent.envs import Environment
from jaxagent.observe import jsonl
from jaxagent.rollout.workers import Workers
from jaxagent.runs import checks, parts, provenance
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Task
from tests import tiny_run
from tests.algorithms.test_add_an_algorithm import write_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/add_an_environment.md").read_text()
TINY = (
    "--config.rl.steps=3 --config.rl.tasks_per_step=2 --config.rl.group_size=4 --config.data.num_eval=4 "
    "--config.engine.slots=8 --config.engine.pages=64 --config.engine.prefill_tokens=256 "
    "--config.rl.batch.row_tokens=128 --config.tokenizer.vocab_size=300 "
    "--config.rl.advantage.drop_zero_signal=false --config.checkpoint.every=0"
)
MODEL = [flag for flag in tiny_run.FLAGS.split() if flag.startswith("--config.model.")]


def write_package(folder: pathlib.Path) -> None:
    """The page's code as my_package/guess.py."""
    code = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "asyncio.run" not in block]
    assert len(code) == 3
    (folder / "my_package").mkdir()
    (folder / "my_package/guess.py").write_text("\n\n".join(code))


def run(folder: pathlib.Path, *flags: str) -> subprocess.CompletedProcess:
    command, *_ = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)  # the others are of environments that exist
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "jaxagent.main"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": f"{ROOT}:{folder}"}
    return subprocess.run(
        [sys.executable, *words[1:], *TINY.split(), *MODEL, *flags],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_the_pages_own_command_trains_an_environment_an_advantage_and_an_objective(tmp_path, monkeypatch):
    write_package(tmp_path)
    write_files(tmp_path, monkeypatch)  # my_advantage.py and my_objective.py of docs/add_an_algorithm.md
    done = run(
        tmp_path,
        "--config.env.max_turns=2",
        "--config.engine.tile_rows=0",
        "--config.rl.advantage=my_advantage:GroupQuantile",
        "--config.rl.objective=my_objective:Quadratic",
        "--config.rl.objective.epsilon=0.3",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    workdir = tmp_path / "runs/guess"
    config = json.loads((workdir / "config.json").read_text())
    assert config["env"] == {
        "name": "my_package.guess:Guess", "hints": True, "max_turns": 2, "turn_tokens": 8, "observation_tokens": 16,
        "context_tokens": 128, "episode_timeout_s": 600.0, "concurrent_episodes": 0, "max_failed_steps": 3,
    }  # fmt: skip
    assert config["engine"]["tile_rows"] == 64  # what suits a CPU; told again below, it is no change
    assert config["rl"]["objective"] == {"name": "my_objective:Quadratic", "epsilon": 0.3}
    assert config["rl"]["advantage"]["name"] == "my_advantage:GroupQuantile"
    assert config["data"]["source"] == {"name": "my_package.guess:Numbers", "below": 5, "count": 60}
    steps = [record for record in jsonl.read(workdir / "metrics.jsonl") if record["stage"] == "rl"]
    assert [record["step"] for record in steps] == [0, 1, 2, 3]
    for record in steps[1:]:
        assert record["episode/guesses"] + record["episode/invalid_actions"] > 0 and "reward/guessed" in record
        assert not record["stop/env_error"] and record["logprob_gap/max"] == 0.0
    summary = json.loads((workdir / "summary.json").read_text())
    assert "eval/guessed_after_rl" in summary and summary["compiles_after_warmup"] == 0
    assert "held-out guessed, greedy" in (workdir / "report.html").read_text()
    (folder,) = workdir.glob("numbers-*")
    assert len(list(jsonl.read(folder / "train.jsonl"))) == 60

    # Their code is part of the run: what has changed since the checkpoint is told, and changes nothing else.
    files = ["my_advantage.py", "my_objective.py", "my_package/guess.py"]
    kept = json.loads((workdir / "run.json").read_text())["starts"][-1]["own_code"]
    assert kept == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in files}
    with (tmp_path / "my_package/guess.py").open("a") as file:
        file.write("# the reward is halved\n")
    more = ("--config.env.max_turns=2", "--config.rl.advantage=my_advantage:GroupQuantile", "--config.rl.steps=4",
            "--config.rl.objective=my_objective:Quadratic", "--config.rl.objective.epsilon=0.3")  # fmt: skip
    done = run(tmp_path, *more)
    assert done.returncode == 0, done.stderr[-3000:]
    code = "code of my_package.guess (my_package/guess.py)"
    assert f"changed since the checkpoint: rl.steps 3 -> 4, {code}" in " ".join((done.stdout + done.stderr).split())
    assert json.loads((workdir / "summary.json").read_text())["code_changed"] == [f"rl, step 3: {code}"]
    starts = json.loads((workdir / "run.json").read_text())["starts"]
    assert [start["own_code"] == kept for start in starts] == [True, False]


BROKEN = {  # what else may be wrong with a class is in test_choices.py
    "does not import": ("import no_such_thing", "env", "Python finds no module 'no_such_thing'"),
    "is none of the kind": ("@dataclass(frozen=True)\nclass Mine: pass", "env", "must extend jaxagent.config.env.Env"),
    "has no attempts": (
        "@dataclass(frozen=True)\nclass Mine(Environment): pass",
        "env",
        "needs a method attempt(task)",
    ),
    "writes no tasks": ("@dataclass(frozen=True)\nclass Mine(Generated): pass", "data.source", "needs a method write("),
    "raises when it is made": (
        "@dataclass(frozen=True)\nclass Mine(Environment):\n    def __post_init__(self): 1 / 0",
        "env",
        "Mine: ZeroDivisionError: division by zero (outside_",
    ),
    "is no reward": ("@dataclass(frozen=True)\nclass Mine: pass", "env.reward", "needs a method __call__(view)"),
}
HEAD = "\n".join(
    (
        "from dataclasses import dataclass",
        "from jaxagent.data.dataset import Generated",
        "from jaxagent.envs import Environment\n",
    )
)


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_with_a_class_of_ones_own_is_one_line(what, tmp_path, monkeypatch, capsys):
    from jaxagent import main as cli

    code, field, message = BROKEN[what]
    name = f"outside_{list(BROKEN).index(what)}"
    (tmp_path / f"{name}.py").write_text(HEAD + code + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["main", "--config=search_r1", f"--config.{field}={name}:Mine"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Mine" in error, error
    assert error.count("\n") == 1 and error.startswith("error: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("stop_strings = ('</guess>')", "Mine: the environment's stop_strings must be a tuple of texts"),
        ("stop_strings = ('',)", "stop_strings must be a tuple of texts that are not empty"),
        ("stop_strings = ('a' * 500,)", "engine.stop_states leaves 128 states, and a stop string has 500 bytes"),
        ("tokens = 5", "TypeError: 'int' object is not iterable"),
        ("most_turns = 0", "most_turns must be at least 1, got 0"),
        ("max_turns: str = 'x'", "config.env.max_turns must be int, got str 'x'"),
        ("rollout = 'no_such_module:Player'", "rollout='no_such_module:Player': Python finds no module"),
    ],
)
def test_what_an_environment_of_ones_own_says_of_itself_is_checked(body, message):
    scope = {"Environment": Environment, "dataclass": dataclasses.dataclass, "__name__": __name__}
    exec(f"@dataclass(frozen=True)\nclass Mine(Environment):\n    {body}\n    def attempt(self, task): ...", scope)
    cfg = dataclasses.replace(flags.parse_argv(["main", "--config=search_r1"]).config, env=scope["Mine"]())
    with pytest.raises(ConfigError) as error:
        checks.check(cfg)
    assert message in str(error.value) and "\n" not in str(error.value)


def own_package(folder: pathlib.Path, monkeypatch) -> None:
    files = {
        "own_game/__init__.py": "",
        "own_game/nim.py": HEAD + "from . import rules\nimport own_shared.tables as t, json\n"
        "@dataclass(frozen=True)\nclass Nim(Environment):\n    def attempt(self, task):\n"
        "        from own_late import x\n        return task\n",
        "own_game/rules.py": "import numpy, jaxagent.types\nfrom .deep.more import y\ndef of_python2():\n"
        "    import own_old\n    import own_null\n",
        "own_old.py": "import own_game.unread\nprint 'hello'\n",
        "own_null.py": "x = 1\0",
        "own_game/deep/more.py": "y = 1\n",
        "own_game/unread.py": "",
        "own_shared/tables.py": "from own_game import rules, nim\n",
        "own_late.py": "x = 1\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)


def test_code_of_ones_own_is_its_file_and_what_that_imports(tmp_path, monkeypatch):
    own_package(tmp_path, monkeypatch)
    cfg = flags.parse_argv(["main", "--config=search_r1", "--config.env=own_game.nim:Nim"]).config
    found = provenance.own_code(cfg)
    wanted = ("own_game/__init__.py", "own_game/deep/more.py", "own_game/nim.py", "own_game/rules.py", "own_late.py",
              "own_null.py", "own_old.py", "own_shared/tables.py")  # fmt: skip
    assert found == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in wanted}
    assert provenance.own_code(flags.parse_argv(["main", "--config=search_r1"]).config) == {}
    assert provenance.own_code(("own_late:x", "localhost:8000", "python:3.11", {"a": "own_late:x"})).keys() == {
        "own_late.py"
    }
    (tmp_path / "own_game/deep/more.py").write_text("y = 2\n")
    (tmp_path / "own_game/unread.py").write_text("z = 2\n")
    assert provenance.code_changes(found, provenance.own_code(cfg)) == [
        "code of own_game.deep.more (own_game/deep/more.py)"
    ]
    assert provenance.code_changes(None, found) == []  # of a bundle that did not keep it
    assert provenance.code_changes({}, {"a/__init__.py": ""}) == ["code of a (a/__init__.py)"]


@dataclasses.dataclass(frozen=True)
class Holder:
    inner: object = None


def test_code_of_ones_own_is_that_of_bases_and_of_what_a_choice_holds_too(tmp_path, monkeypatch):
    for folder, name, text in (
        ("one", "own_base.py", "class Base:\n    def method(self): ...\n"),
        ("two", "own_class.py", "import dataclasses, own_base\n@dataclasses.dataclass(frozen=True)\n"
         "class Choice(own_base.Base): ...\ndef function(): ...\n"),
        ("site-packages", "own_installed.py", "class Base: ...\n"),
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path / folder)
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        archive.writestr("own_zipped/__init__.py", "class Zipped: ...\n")
    monkeypatch.syspath_prepend(tmp_path / "own.zip")
    own = {name: importlib.import_module(name) for name in ("own_class", "own_zipped", "own_installed")}
    choice = own["own_class"].Choice()
    for inner in (choice, [choice], (choice,), {"a": [choice]}, type(choice), choice.method,
                  functools.partial(max, choice), functools.partial(max, key=choice)):  # fmt: skip
        assert provenance.own_code(inner).keys() == {"own_base.py", "own_class.py"}, inner
    assert provenance.own_code(Holder(choice)).keys() > {"own_base.py", "own_class.py"}
    for function in (own["own_class"].function, jax.jit(own["own_class"].function)):
        assert provenance.own_code([function]).keys() == {"own_class.py"}
    assert provenance.own_code([own["own_zipped"].Zipped()]).keys() == {"own.zip"}
    assert provenance.own_code([own["own_installed"].Base()]) == {}  # a version says what it is
    assert (
        provenance.without_file([choice, own["own_zipped"].Zipped, 1.0, jax.jit(max), "own_nowhere:x", "localhost:x"])
        == []
    )
    notebook = types.ModuleType("own_notebook")
    exec("class Choice: ...", vars(notebook))
    monkeypatch.setitem(sys.modules, "own_notebook", notebook)
    assert provenance.without_file([notebook.Choice()]) == ["own_notebook"]
    note = mock.Mock(side_effect=InterruptedError)
    opening = SimpleNamespace(host={}, cfg=[notebook.Choice()], progress=SimpleNamespace(note=note))
    with pytest.raises(InterruptedError):
        Workdir.begin(opening, {}, None)
    assert note.call_args.args[0].startswith("no file has the code of own_notebook: ")
    notebook.__file__ = str(tmp_path / "one/own_base.py")  # as that of a script that is __main__
    assert provenance.own_code([notebook.Choice()]).keys() == {"own_base.py"}


def test_of_an_installed_package_its_own_files_count(tmp_path, monkeypatch):
    (tmp_path / "site-packages/own_kit").mkdir(parents=True)
    (tmp_path / "site-packages/own_kit/__init__.py").write_text("import own_other, own_kit.part\n")
    (tmp_path / "site-packages/own_kit/part.py").write_text("")
    (tmp_path / "site-packages/own_other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert list(provenance.own_code("own_kit:Thing")) == ["own_kit/__init__.py", "own_kit/part.py"]


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        (
            "return None",
            "Mine.attempt returned an object that is None (is a `return` missing?) without start where one ",
        ),
        ("return Half()", "Mine.attempt returned an object that is a Half without verify where one with the methods "),
        ("return Plain()", "Plain.step is `def`, not `async def`: unless it returns something to await, episodes "),
        ("return Whole()", ""),
        ("raise KeyError(task.id)", ""),  # perhaps of this task alone: its episodes tell it
    ],
)
def test_an_attempt_of_ones_own_is_looked_at_when_a_run_begins(attempt, told):
    scope = {"Environment": Environment, "dataclass": dataclasses.dataclass, "__name__": __name__, "closed": []}
    exec(
        "class Half:\n    async def start(self): ...\n    async def step(self, action): ...\n"
        "class Whole(Half):\n    async def verify(self, transcript): ...\n"
        "    async def close(self): closed.append(self)\n"
        "class Plain(Whole):\n    def step(self, action): ...\n"
        f"@dataclass(frozen=True)\nclass Mine(Environment):\n    def attempt(self, task):\n        {attempt}",
        scope,
    )
    notes, environment = [], scope["Mine"]()
    with Workers(1) as workers:
        try:
            parts._try_attempt(environment, environment.attempt, [Task("t", "p", ())], workers, notes.append)
        except ConfigError as error:
            notes.append(str(error))
    assert len(notes) == bool(told) and all(told in note and "\n" not in note for note in notes), notes
    assert len(scope["closed"]) == (attempt in ("return Plain()", "return Whole()"))


def test_a_data_set_is_there_whole_or_not_at_all(tmp_path):
    """A source that fails half-way leaves nothing that the next run would take for its tasks."""

    @dataclasses.dataclass(frozen=True)
    class Broken(Generated):
        fails: bool = True

        def settings(self, seed, env):
            return {}

        def write(self, folder, seed, env):
            folder.mkdir()
            (folder / "train.jsonl").write_text("{}")
            if self.fails:
                raise KeyError("answers")

    def make(fails):
        return Broken(fails).folder(str(tmp_path / "run"), 0, None, lambda line: None)

    with pytest.raises(ConfigError, match=r"Broken.write: KeyError: 'answers' \(test_outside.py, line \d+\)\.$"):
        make(True)
    assert list((tmp_path / "run").iterdir()) == []
    folder = make(False)
    assert [file.name for file in folder.iterdir()] == ["train.jsonl"] and list(folder.parent.iterdir()) == [folder]
    assert make(True) == folder  # it is there: not written again
    left = folder.with_name(f".{folder.name}.partial-0")  # as a run leaves it that is killed while it writes
    left.mkdir()
    (left / "lock").touch()
    folder.rename(left / folder.name)
    assert make(False) == folder and list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("alike", [True, False])
def test_processes_that_start_at_once_in_a_new_workdir_make_one_data_set(tmp_path, monkeypatch, locks, alike):
    """With locks, and as on file systems without them, where each makes its own, and the quickest one's is everybody's.

    Where no lock is seen, what one process is still writing must not be taken for what a killed one has left.
    """
    made, notes, seen = [], [], []

    @dataclasses.dataclass(frozen=True)
    class Slow(Generated):
        def write(self, folder, seed, env):
            number = 0 if alike else len(made)
            made.append(folder)
            folder.mkdir()
            for name in ("train", "test"):
                time.sleep(0.1)
                (folder / f"{name}.jsonl").write_text(f"{{}}{number}")

    def begin(number: int) -> None:
        folder = Slow().folder(str(tmp_path), 0, None, notes.append)
        tokenizer = parts._tokenizer(cfg, folder, None, world, notes.append)
        seen.append((folder, (folder / "test.jsonl").read_text(), tokenizer.encode("text"), tokenizer._files))

    no, world = SimpleNamespace(path="", vocab_size=300), SimpleNamespace(tokens=(), corpus=lambda folder: ())
    cfg = SimpleNamespace(tokenizer=no, model=no, workdir=str(tmp_path))
    monkeypatch.setattr(parts, "texts_of_dataset", lambda *_: [f"some text {i}" for i in range(1000)])
    whole, turns = parts.Tokenizer.save_files, iter([0.4, 0.0, 0.0, 0.0])
    monkeypatch.setattr(
        parts.Tokenizer, "save_files", lambda *args: time.sleep(next(turns)) or whole(*args)
    )  # half is there
    if not locks:
        monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError))
    with ThreadPoolExecutor(4) as pool:  # threads stand for processes: the locks are of open files
        list(pool.map(begin, range(4)))
    assert len(seen) == 4 and all(one == seen[0] for one in seen)
    assert sorted(file.name for file in seen[0][0].iterdir()) == ["test.jsonl", "train.jsonl"]
    assert set(tmp_path.iterdir()) == {seen[0][0], tmp_path / "tokenizer"}
    assert (len(made) == 1) == locks
    assert any("made other files than another process" in note for note in notes) == (not locks and not alike)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('server')", r"^config\.env: Mine\.open: KeyError: 'server'\.$"),
        (
            "yield self.attempt",
            r"^config\.env: Mine\.open: TypeError: .*generator' object does not support the context",
        ),
    ],
)
def test_an_environment_that_does_not_open_is_one_line(body, message):
    scope = {"Environment": Environment, "dataclass": dataclasses.dataclass, "__name__": __name__}
    code = f"@dataclass(frozen=True)\nclass Mine(Environment):\n    def open(self, here):\n        {body}"
    exec(code, scope)
    with pytest.raises(ConfigError, match=message), parts.open_environment(scope["Mine"](), None):
        pass


@dataclasses.dataclass(frozen=True)
class Scalar:
    """The commonest habit: a mean in place of one number per token."""

    def __call__(self, tokens):
        return -(tokens.logprobs * tokens.advantages).mean(), tokens.mask


def test_a_stage_that_samples_tries_its_choices_before_anything_is_trained():
    cfg = flags.parse_argv(["main", "--config=search_r1"]).config
    cfg = dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, objective=Scalar()))
    with pytest.raises(
        ConfigError, match=r":Scalar returned a loss of shape \(\) and type float32 where one number per "
    ):
        loop.check_rl(cfg, SimpleNamespace(cfg=cfg, tokenizer=None, train=[]))
