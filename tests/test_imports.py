"""Imports go one way only, and worker processes start without jax: the house rules, read from the source."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What stands right may import what stands left; rooms of one level do not import each other.
LEVELS = (
    ("config",),
    ("types", "io", "hidden", "contract"),
    ("sandbox", "rewards", "models", "algorithms", "data", "agents", "tools"),
    ("envs", "engine", "observe", "fleet"),
    ("roles",),
    ("rollout", "learner"),
    ("gateway",),
    ("runs",),
    ("plan", "service", "view"),
    ("loop",),
    ("main", "join", "evaluate", "serve", "doctor", "__main__"),
    ("evaluate_lengths", "replay"),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# Kept so that it could be a package of its own.
SELF_CONTAINED = {"sandbox": {"config", "io"}}
# May import the rooms, never the other way. Subpackages by name (jaxagent.launch), folders beside the rooms.
TOP = ("configs", "launch", "data_pipelines", "tests", "benchmarks")
NO_JAX_ROOMS = (
    "config", "types", "io", "contract", "rewards", "envs", "sandbox", "data", "agents", "tools", "roles", "fleet",
)  # fmt: skip
COMPUTED = "a name that is computed"
# Where a name from a config or a table of names is imported.
DOORS = ("config/choice.py", "data/rows.py", "envs/__init__.py")
NO_JAX = ("jax", "flax", "optax", "orbax", "jaxlib")


def _files() -> list[pathlib.Path]:
    return sorted((ROOT / "jaxagent").rglob("*.py"))


def _room(path: pathlib.Path) -> str:
    return path.relative_to(ROOT / "jaxagent").with_suffix("").parts[0]


def _imports(path: pathlib.Path) -> set[str]:
    """Full dotted names of everything the file imports, late imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and re.search(r"(^|\.)(import_module|__import__)$", ast.unparse(node.func)):
            found.add(node.args[0].value if isinstance(node.args[0], ast.Constant) else COMPUTED)
    return found


def _wrong(room: str, names: set[str]) -> str:
    """What is wrong with the imports of a file of a room; "" where nothing is."""
    if room not in LEVEL and room != "__init__":
        return "it stands on no floor: add its room to LEVELS"
    for name in sorted(names):
        parts = name.split(".")
        if parts[0] in TOP or (parts[0] == "jaxagent" and parts[1:2] and parts[1] in TOP):
            return f"it imports {name}"  # `Choice`s name what stands there by its path
        if parts[0] == "jaxagent" and parts[1:2] != [room]:
            if room == "__init__" or LEVEL.get(".".join(parts[1:2]), len(LEVELS)) >= LEVEL[room]:
                return f"{room} must not import {name}"
            if parts[1] not in SELF_CONTAINED.get(room, LEVEL):
                return f"{room} must not import {name}: it stands alone"
    return ""


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    assert _wrong(_room(path), _imports(path)) == ""


@pytest.mark.parametrize(
    ("room", "code"),
    [
        ("engine", "from jaxagent.runs import parts"),
        ("engine", "import jaxagent.runs.parts as p"),
        ("engine", "from jaxagent import runs"),
        ("engine", "def f():\n    import os, jaxagent.rollout.workers"),
        ("engine", "if TYPE_CHECKING:\n    from jaxagent.learner.state import TrainState"),
        ("engine", "import jaxagent"),  # by which any room could be reached
        ("engine", "from jaxagent import *"),
        ("engine", "from jaxagent.envs.base import Attempt"),  # of one level
        ("engine", "import importlib\ndef f():\n    importlib.import_module('jaxagent.runs.parts')"),
        ("runs", "from jaxagent.no_such_room import x"),
        ("runs", "import configs.search_r1"),
        ("runs", "from jaxagent.launch import sweep"),
        ("sandbox", "from jaxagent.types import Task"),  # below, and still not its own
        ("config", "import jaxagent.config.run, jaxagent.io.files"),
        ("new_room", "import os"),
        ("__init__", "from jaxagent.config import Config"),
    ],
)
def test_an_import_that_runs_up_is_seen(room, code, tmp_path):
    (tmp_path / "file.py").write_text(code)
    assert _wrong(room, _imports(tmp_path / "file.py"))
    (tmp_path / "file.py").write_text("import os\nfrom jaxagent.config import ConfigError\nfrom jaxagent.runs import a")
    assert not _wrong("runs", _imports(tmp_path / "file.py"))


# The core trains. Everything else is a guest, and comes in by a door: the import path of a class that a config names,
# `Environment.rollout`, `Seams`, a `Choice`'s table of names. The commands (main, join, ...) open the doors.
CORE = (
    "config", "types", "io", "hidden", "contract", "models", "algorithms", "data", "rewards", "engine", "envs",
    "observe", "roles", "rollout", "learner", "runs", "loop",
)  # fmt: skip
GUESTS = (
    "sandbox", "gateway", "agents", "tools", "fleet", "service", "plan", "view", "replay", "runs.fleet", "main",
    "join", "evaluate", "serve", "doctor", "evaluate_lengths",
    *(f"envs.{folder.name}" for folder in (ROOT / "jaxagent/envs").iterdir() if (folder / "__init__.py").is_file()),
)  # fmt: skip


def _guest(module: str) -> str:
    """The guest that a module below `jaxagent` belongs to; "" for one of the core."""
    return next((guest for guest in GUESTS if f"{module}.".startswith(f"{guest}.")), "")


@pytest.mark.parametrize("path", [p for p in _files() if _room(p) in CORE], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_imports_no_guest(path):
    if _guest(".".join(path.relative_to(ROOT / "jaxagent").with_suffix("").parts)):
        return
    imported = {name for name in _imports(path) if name.startswith("jaxagent.")}
    assert not {name for name in imported if _guest(name.removeprefix("jaxagent."))}
    assert COMPUTED not in _imports(path) or str(path.relative_to(ROOT / "jaxagent")) in DOORS


def test_every_room_is_of_the_core_or_a_guest():
    rooms = {room for level in LEVELS for room in level} - {"__main__"}
    assert rooms == {*CORE, *(guest for guest in GUESTS if "." not in guest)}
    assert _guest("fleet.settings") == "fleet" and _guest("envs.search.environment") and not _guest("config.fleet")


@pytest.mark.parametrize("path", [p for p in _files() if _room(p) == "algorithms"], ids=lambda p: p.name)
def test_algorithms_import_no_model(path):
    assert not any(name.startswith("jaxagent.models") for name in _imports(path))


@pytest.mark.parametrize("path", [p for p in _files() if _room(p) in NO_JAX_ROOMS], ids=lambda p: p.name)
def test_types_config_rewards_envs_and_data_name_no_jax(path):
    assert not {name.split(".")[0] for name in _imports(path)} & set(NO_JAX)


def test_types_config_rewards_envs_and_data_start_without_jax():
    # grain itself loads jax, so the one kind of module that may load it late or not at all is the one that uses
    # grain: it runs beside the learner. A program that another interpreter starts, with a package of its own, is none
    # of ours to import. Everything else is what worker processes import.
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in _files()
        if _room(path) in NO_JAX_ROOMS and not {"grain", "verifiers"} & {name.split(".")[0] for name in _imports(path)}
    ]
    # One subprocess for all; the first module that brings jax in is named.
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [m for m in {NO_JAX!r} if m in sys.modules]\n"
        "    if loaded: sys.exit(f'{name} brings in {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_run_starts_without_torch_where_that_is_installed():
    """Two seconds of every process, for a library that wants it only because it is there."""
    code = (
        "import jaxagent.loop, jaxagent.join, jaxagent.runs.fleet.trainer, jaxagent.runs.fleet.player, sys\n"
        "assert 'tensorboardX' in sys.modules and not {'torch', 'transformers'} & set(sys.modules)\n"
        "from jaxagent.hidden import hidden\n"
        "import json\n"
        "with hidden('json', 'json.scanner', 'colorsys'):\n"
        "    try: import colorsys\n"
        "    except ImportError: print('hidden')\n"
        "    try: import json.scanner\n"
        "    except ImportError: print('hidden')\n"
        "import colorsys\n"
        "assert sys.modules['json'] is json and 'json.scanner' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "hidden\n" * 2


def test_the_folders_beside_the_package_are_its_subpackages():
    # One mechanism for checkouts and editable installs: jaxagent/__init__.py; wheels are tests/test_wheel.py's.
    code = (
        "import jaxagent.configs, jaxagent.launch.grid, jaxagent.data_pipelines.write as w\n"
        "assert list(jaxagent.configs.__path__) == ['configs'], jaxagent.configs.__path__\n"
        "import sys; assert not {'configs', 'launch', 'data_pipelines'} & set(sys.modules)\n"
    )
    code = code.replace("['configs']", repr([str(ROOT / "configs")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_data_pipelines_stand_below_the_runs():
    """A run makes its data set with them, so none of them may need a run."""
    for path in (ROOT / "data_pipelines").rglob("*.py"):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "jaxagent" and len(parts) > 1 and parts[1] in LEVEL:
                assert LEVEL[parts[1]] < LEVEL["runs"], f"{path} must not import {parts[1]}"


def test_every_test_module_has_a_name_of_its_own():
    """pytest imports a test file by its name alone: of two in different folders it refuses one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
