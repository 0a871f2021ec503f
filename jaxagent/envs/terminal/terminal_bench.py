"""terminal-bench's older layout, from before Harbor.

task.yaml                 instruction, difficulty, category, tags, parser_name, max_agent_timeout_sec, ...
Dockerfile, docker-compose.yaml
run-tests.sh              run with TEST_DIR=/tests; prints pytest's short summary (`-rA`), which is the verdict
tests/                    becomes /tests at verification; most have test_outputs.py there, and some no such folder
solution.sh               the oracle (a solution.yaml of keystrokes is not supported and counts as none)
"""

from __future__ import annotations

from pathlib import Path

from jaxagent.config import ConfigError
from jaxagent.envs.forms import TEXT
from jaxagent.envs.terminal import fields
from jaxagent.envs.terminal.task import Image, Script, TaskLimits, TerminalTask, level_of

AGENT_TIMEOUT_S, TEST_TIMEOUT_S = 360.0, 60.0
TEST_DIR = "/tests"
RUN_TESTS = f"{TEST_DIR}/run-tests.sh"

_FORM = {
    **{"instruction": TEXT, "difficulty~": str, "parser_name~": ("pytest",), "run_tests_in_same_shell~": object},
    **dict.fromkeys(("max_agent_timeout_sec~", "max_test_timeout_sec~"), fields.positive),
    **dict.fromkeys(("author_name~", "author_email~", "category~", "tags~"), object),
}


def read(folder: Path) -> TerminalTask:
    """One task directory.

    Raises:
      ConfigError: a file that is missing or malformed, or a feature that is not supported.
      RowError: a key that is missing or malformed.
    """
    path = folder / "task.yaml"
    about = fields.read(path, _FORM)
    if about.get("run_tests_in_same_shell"):
        # An agent's own shell can make any test pass; see docs/terminal_tasks.md.
        raise ConfigError(f"{path}: key 'run_tests_in_same_shell': tests run in a fresh process only.")
    if (folder / "tests" / "test_outputs.py").is_file():
        fields.python_file(folder / "tests" / "test_outputs.py")
    fields.read_text(folder / "run-tests.sh")
    tests = {TEST_DIR: folder / "tests"} if (folder / "tests").is_dir() else {}
    fields.read_text(folder / "Dockerfile")
    solution = folder / "solution.sh"
    return TerminalTask(
        id=folder.name,
        instruction=about["instruction"],
        format="terminal_bench",
        limits=TaskLimits(
            about.get("max_agent_timeout_sec", AGENT_TIMEOUT_S),
            about.get("max_test_timeout_sec", TEST_TIMEOUT_S),
        ),
        image=Image(dockerfile=folder / "Dockerfile", context=folder),
        final_test=Script(f"bash {RUN_TESTS}", tests | {RUN_TESTS: folder / "run-tests.sh"}),
        oracle=Script("bash /oracle/solution.sh", {"/oracle/solution.sh": solution}) if solution.is_file() else None,
        reward_from="pytest_summary",
        verifier_env={"TEST_DIR": TEST_DIR},
        level=level_of(about.get("difficulty", "")),
        folder=folder,
    )
