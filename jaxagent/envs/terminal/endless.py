"""Endless Terminals (arXiv 2601.16443): task directories, and the list of tasks in its repository.

    task_000012_0a1b2c3d/
      task.json                {"description", "truth", "name"}; the agent sees only the description
      test_initial_state.py    pytest: preconditions
      test_final_state.py      pytest: the verdict
      container.def            Apptainer definition (container.sif, once built)
      solutions/*.json         what models did; no oracle script is published

`tasks.json` of the repository is a list of {"task_id", "instruction", "metadata", "config"}: no tests, no container.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.envs.terminal import fields
from jaxagent.envs.terminal.fields import Fields
from jaxagent.envs.terminal.task import HOME, Image, Script, TaskLimits, TerminalTask, level_of

FINAL_TEST = f"{HOME}/test_final.py"  # where the published environment writes the final test
AGENT_TIMEOUT_S = 300.0  # `max_time` of the published rows
VERIFIER_TIMEOUT_S = 300.0


def read(folder: Path) -> TerminalTask:
    """One task directory.

    Raises:
      ConfigError: a file or key that is missing or malformed, or a test that does not compile.
    """
    about = Fields(fields.read_json(folder / "task.json"), folder / "task.json", ("description", "truth", "name"))
    initial = fields.python_file(folder / "test_initial_state.py")
    final = fields.python_file(folder / "test_final_state.py")
    definition = folder / "container.def"
    fields.read_text(definition)
    oracle = folder / "solve.sh"  # ours: the published directories have none
    return TerminalTask(
        id=folder.name,
        instruction=about.text("description"),
        format="endless",
        limits=TaskLimits(AGENT_TIMEOUT_S, VERIFIER_TIMEOUT_S),
        image=Image(definition=definition, context=folder),
        workdir=HOME,
        initial_test=_pytest(initial, f"{HOME}/test_initial.py"),
        final_test=_pytest(final, FINAL_TEST),
        oracle=Script("bash /tmp/solve.sh", {"/tmp/solve.sh": oracle}) if oracle.is_file() else None,
        folder=folder,
        metadata={"name": about.text("name", folder.name), "truth": about.values.get("truth", "")},
    )


def read_list(path: Path) -> list[TerminalTask]:
    """The tasks of a `tasks.json` list. They have no container and no tests (`missing` says so).

    Raises:
      ConfigError: naming the row and the key.
    """
    rows = fields.read_json(path)
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{path}: expected a list of tasks, got {type(rows).__name__}.")
    tasks = [_row(row, path, f"row {number}: ") for number, row in enumerate(rows)]
    seen: dict[str, int] = {}
    for number, task in enumerate(tasks):
        if task.id in seen:
            raise ConfigError(f"{path}: row {number}: task_id '{task.id}' is also that of row {seen[task.id]}.")
        seen[task.id] = number
    return tasks


# Of the image's own variables, what leads into directories that the agent may write comes last or is left out.
_PYTEST = """
system() {
  IFS=:; set -f
  for d in $1; do case $d in *..*) ;; /usr/*|/opt/*|/bin|/sbin|/lib*) printf '%s:' "$d";; esac; done
}
PATH=$(system "$PATH")$PATH
LD_LIBRARY_PATH=$(system "$LD_LIBRARY_PATH"); LD_LIBRARY_PATH=${LD_LIBRARY_PATH%:}
unset LD_PRELOAD LD_AUDIT PYTEST_ADDOPTS PYTEST_PLUGINS
found=$(command -v pytest) || exit 127
read -r line < "$found"
case $line in
  '#!'*python*) set -- ${line#??} -I "$found";;
  *) export PYTHONNOUSERSITE=1; unset PYTHONPATH PYTHONHOME PYTHONSTARTUP; set -- "$found";;
esac
folder=$(mktemp -d) && mv PLACE "$folder" || exit 126
"$@" -q --noconftest -c /dev/null --import-mode=importlib -p no:cacheprovider "$folder/NAME"
status=$?; rm -rf "$folder"; exit $status
"""


def _pytest(test: Path, place: str) -> Script:
    """Runs a test in the home directory, judged by pytest's exit status, as published.

    Unlike the published command it reads nothing of the agent's: no conftest.py and no configuration; no modules of the
    home directory or of ~/.local (a .pth file there runs at the start of every python), which `python -I` leaves out
    for pytest itself but not for the programs that the test starts; no __init__.py and no compiled test beside the
    test, which is moved to a new folder. PYTHONPATH of the image is not read either.
    """
    return Script(_PYTEST.replace("PLACE", place).replace("NAME", place.rpartition("/")[2]), {place: test})


def _row(row: Any, path: Path, place: str) -> TerminalTask:
    task = Fields(row, path, ("task_id", "instruction", "metadata", "config"), place)
    config = Fields(
        row.get("config", {}),
        path,
        ("verifier_timeout_sec", "agent_timeout_sec", "environment"),
        f"{place}config.",
    )
    environment = config.section("environment", ("build_timeout_sec", "cpus", "memory_mb", "storage_mb"))
    metadata = Fields(row.get("metadata", {}), path, ("difficulty", "category"), f"{place}metadata.")
    return TerminalTask(
        id=task.text("task_id"),
        instruction=task.text("instruction"),
        format="endless",
        limits=TaskLimits(
            config.number("agent_timeout_sec", AGENT_TIMEOUT_S),
            config.number("verifier_timeout_sec", VERIFIER_TIMEOUT_S),
            environment.number("build_timeout_sec", TaskLimits.build_timeout_s),
            environment.number("cpus", TaskLimits.cpus),
            int(environment.number("memory_mb", TaskLimits.memory_mb)),
            int(environment.number("storage_mb", TaskLimits.storage_mb)),
        ),
        workdir=HOME,
        level=level_of(metadata.text("difficulty", "unknown")),
        metadata=dict(metadata.values),
    )
