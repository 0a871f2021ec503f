"""The commands of jaxagent: one table that the list, the dispatch, bash's completion and the documentation read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxagent.config import ConfigError, flags, nearest
from jaxagent.config.command import exit_code

COMMANDS = {  # name: module, an example of what is behind the name, what it does
    "train": ("jaxagent.main", "--config=search_r1", "train; the same again goes on, --dry_run says what it needs"),
    "evaluate": ("jaxagent.evaluate", "--config.workdir=RUN", "pass@k of a checkpoint"),
    "view": ("jaxagent.view", "runs", "curves, every episode, two runs side by side, on a page"),
    "report": ("jaxagent.observe.report", "RUN", "write RUN/report.html anew, also while the run trains"),
    "replay": ("jaxagent.replay", "--config.workdir=RUN", "make recorded steps again, and compare them"),
    "check": ("jaxagent.envs.check", "tasks/", "of every task: its own solution earns 1, doing nothing 0"),
    "serve": ("jaxagent.serve", "--model=RUN/policy", "serve a policy over HTTP"),
    "track": ("jaxagent.observe.track", "RUN mlflow", "tell a tracker afterwards what it was not told"),
    "sweep": ("jaxagent.launch.sweep", "--config=... --grid=...", "many runs, one after the other"),
    "join": ("jaxagent.join", "--role=ROLE ...", "one process of a run of many"),
    "sandbox": ("jaxagent.sandbox", "", "which sandboxes work on this machine"),
    "doctor": ("jaxagent.launch.doctor", "", "what this machine has for a run, and what brings the rest"),
}
_COMPLETION = """\
_jaxagent() {{
  if ((COMP_CWORD == 1)); then COMPREPLY=($(compgen -W "{commands} --help --version" -- "$2"))
  elif [[ $COMP_LINE =~ --config=[^[:space:]]*$ ]]; then COMPREPLY=($(compgen -W "{configs}" -f -- "${{2#=}}")); fi
}}
complete -o default -F _jaxagent jaxagent"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line: becomes the command's module, or says what commands there are; returns the exit code."""
    name, *rest = [*(sys.argv if argv is None else argv)[1:]] or ["--help"]
    if name in COMMANDS:
        # In this process's place: signals and exit codes are the command's own, and it finds a class of yours in the
        # working folder, as it does when Python is told to run its module.
        os.execv(sys.executable, [sys.executable, "-m", COMMANDS[name][0], *rest])
    return exit_code(lambda: print(_answer(name, rest), flush=True))


def _answer(name: str, rest: Sequence[str]) -> str:
    """What is printed where no command's module runs."""
    configs = [file.stem for file in flags.preset_files()]
    if name in ("--help", "-h", "help"):
        return f"{overview()}\n\nConfigs that come along: {', '.join(configs)}"
    if name == "--version":
        return f"jaxagent {sys.modules['jaxagent'].__version__}"
    if name == "completion":
        if list(rest) != ["bash"]:
            raise ConfigError("There is completion for one shell: jaxagent completion bash.")
        return _COMPLETION.format(commands=" ".join(COMMANDS), configs=" ".join(configs))
    raise ConfigError(f"There is no command '{name}'. {nearest(name, COMMANDS)}")


def overview() -> str:
    """The table of commands as text."""
    rows = [(f"jaxagent {name} {words}", module, meaning) for name, (module, words, meaning) in COMMANDS.items()]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{command:<{first}}  {module:<{second}}  {meaning}" for command, module, meaning in rows]
    title = "jaxagent: reinforcement learning of language-model agents in JAX. Each command says more with --help."
    end = '`python -m MODULE` is the same. eval "$(jaxagent completion bash)" has bash complete the commands.'
    return "\n".join([title, "", *lines, "", end])


if __name__ == "__main__":
    sys.exit(main())
