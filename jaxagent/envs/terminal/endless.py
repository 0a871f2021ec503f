"""Endless Terminals' task directories (arXiv 2601.16443).

    task_000012_0a1b2c3d/
      task.json                {"description", "truth", "name"}; the agent sees only the description
      test_initial_state.py    pytest: preconditions
      test_final_state.py      pytest: the verdict
      container.def            Apptainer definition (container.sif, once built)
      solutions/*.json         what models did; no oracle script is published

(`tasks.json` of its repository has instructions alone, without tests and containers: there is nothing to play.)
"""

from __future__ import annotations

from pathlib import Path

from jaxagent.envs.forms import TEXT
from jaxagent.envs.terminal import fields
from jaxagent.envs.terminal.task import HOME, Image, Script, TaskLimits, TerminalTask

FINAL_TEST = f"{HOME}/test_final.py"  # where the published environment writes the final test
AGENT_TIMEOUT_S = 300.0  # `max_time` of the published rows
VERIFIER_TIMEOUT_S = 300.0


def read(folder: Path) -> TerminalTask:
    """One task directory.

    Raises:
      ConfigError: a file that is missing, or a test that does not compile.
      RowError: a key that is missing or malformed.
    """
    about = fields.read(folder / "task.json", {"description": TEXT, "truth~": object, "name~": object})
    initial = fields.python_file(folder / "test_initial_state.py")
    final = fields.python_file(folder / "test_final_state.py")
    definition = folder / "container.def"
    fields.read_text(definition)
    oracle = folder / "solve.sh"  # ours: the published directories have none
    return TerminalTask(
        id=folder.name,
        instruction=about["description"],
        format="endless",
        limits=TaskLimits(AGENT_TIMEOUT_S, VERIFIER_TIMEOUT_S),
        image=Image(definition=definition, context=folder),
        workdir=HOME,
        initial_test=_pytest(initial, f"{HOME}/test_initial.py"),
        final_test=_pytest(final, FINAL_TEST),
        oracle=Script("bash /tmp/solve.sh", {"/tmp/solve.sh": oracle}) if oracle.is_file() else None,
        folder=folder,
    )


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
