"""How much of the package one RL step runs: what somebody has to read who wants to know what a step does."""

import ast
import pathlib
import sys
import threading

import pytest

from jaxagent import main
from jaxagent.observe.episode_store import EpisodeStore
from jaxagent.runs.attempts import collect
from jaxagent.runs.logs import Logs
from jaxagent.runs.workdir import Workdir
from tests import tiny_run

PACKAGE = tiny_run.ROOT / "jaxagent"
LOGS = {Logs.keep.__code__, EpisodeStore._append.__code__}  # the caller's part, and that of the store's own thread
MOST_FILES, MOST_LINES = 45, 1900  # outside the engine; the lines without data/, too


def functions_of_a_step(workdir: pathlib.Path) -> set[tuple[str, int]]:
    """(file, first line) of every function of the package that one exact step of the search recipe calls.

    The step begins where its groups are asked for and ends where it is decided whether to evaluate: rollouts, streams,
    updates and the new weights are in it, start-up, evaluation, logs and bundles are not. Programs are compiled before.
    The log of episodes is written inside the step: what runs below `LOGS`, in whatever thread, is left out.
    """
    called, inside, thread = set(), False, threading.local()

    def look(frame, event, _):
        nonlocal inside
        code = frame.f_code
        if code in LOGS and event in ("call", "return"):
            thread.logs = getattr(thread, "logs", 0) + (1 if event == "call" else -1)
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        inside = (inside or code is collect.__code__) and code is not Workdir.evaluates.__code__
        if inside and not getattr(thread, "logs", 0):
            called.add((code.co_filename, code.co_firstlineno))

    # After a warm start that suffices for searches and form, so that episodes have observations and groups signal.
    learnt = "--config.warm_start.max_steps=80 --config.warm_start.curriculum_steps=20"
    form = "--config.warm_start.batch_sequences=8 --config.env.reward=em_format --config.env.turn_tokens=12"
    alone = "--config.numerics=exact --config.rl.tasks_per_step=4 --config.rl.steps=1 --config.eval.sampled=false"
    no_bundle = "--config.checkpoint.every=0 --config.checkpoint.replay=newest"  # which a thread would write meanwhile
    argv = tiny_run.argv(workdir, *f"{learnt} {form} {alone} {no_bundle}".split())
    before = sys.getprofile()
    threading.setprofile(look)  # the threads of the engine and of the rollouts, which start in the run
    sys.setprofile(look)
    try:
        assert main.main(argv) == 0
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return called


def lines_of(file: str, first_lines: set[int]) -> set[int]:
    """The lines of the functions that begin at these lines, decorators and docstrings included, each once."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(pathlib.Path(file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first_lines & {first, node.lineno}:
                lines |= set(range(first, node.end_lineno + 1))
    return lines


@pytest.mark.slow
def test_what_one_step_runs_is_short(tmp_path):
    first_lines: dict[str, set[int]] = {}
    for file, line in functions_of_a_step(tmp_path):
        first_lines.setdefault(file, set()).add(line)
    sizes = {
        str(pathlib.Path(file).relative_to(PACKAGE)): len(lines_of(file, lines))
        for file, lines in sorted(first_lines.items())
        if not file.startswith(str(PACKAGE / "engine"))
    }
    whole = {"runs/attempts.py", "rollout/conversation.py", "learner/update.py", "envs/search/retriever/bm25.py"}
    assert whole <= set(sizes), f"of a whole step this one did not run {whole - set(sizes)}"
    listing = "\n".join(f"{lines:5} {name}" for name, lines in sorted(sizes.items(), key=lambda item: item[1]))
    lines = sum(size for name, size in sizes.items() if not name.startswith("data/"))
    assert len(sizes) <= MOST_FILES and lines <= MOST_LINES, (
        f"{len(sizes)} files outside the engine, {lines} lines of functions outside engine and data:\n{listing}"
    )
