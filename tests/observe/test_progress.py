"""Progress on a terminal and in a log file; numbers as people write them."""

import io
import math
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from jaxagent.observe import progress as progress_module
from jaxagent.observe import text
from jaxagent.observe.progress import Progress


def _run(terminal: bool, log_every_s: float = 0.0) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, force_interactive=terminal, width=300)
    with Progress(console, log_every_s) as progress:
        progress.stage("rl", total=3)
        progress.update(1, {"reward/mean": 0.25, "unknown": 5.0})
        progress.update(2, {"reward/mean": 0.5, "reward/em": 0.25, "eval/em": 0.75, "eval/em_hard": 0.5})
        progress.note("saved")
        progress.update(3, {"reward/mean": 1})
    return out.getvalue()


def test_plain_lines_in_a_file():
    lines = _run(terminal=False).splitlines()
    assert lines[0] == "rl: 3 steps"
    assert lines[1].startswith("rl 1/3  reward/mean 0.25")
    assert "reward/em 0.25  eval/em 0.75  eval/em_hard 0.5  reward/mean 0.5" in lines[2]
    assert lines[3] == "saved"
    assert lines[4].startswith("rl 3/3  reward/mean 1") and lines[4].endswith("left 0:00")
    assert "\x1b" not in "".join(lines)


def test_a_quiet_log_still_shows_evaluations_and_the_end():
    lines = _run(terminal=False, log_every_s=1e9).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("rl ")] == ["1/3", "2/3", "3/3"]
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False), log_every_s=1e9) as progress:
        progress.stage("rl", total=100)
        for step in range(1, 50):
            progress.update(step, {"reward/em": 0.0})
    assert len(out.getvalue().splitlines()) == 2


def test_failures_are_shown_once_there_are_some_and_nothing_measured_is_a_dash():
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False, width=300), 0.0) as progress:
        progress.stage("rl", total=3)
        progress.update(1, {"reward/mean": 0.5, "stop/env_error": 0.0})
        progress.update(2, {"reward/mean": None, "stop/env_error": 1.0, "eval/failed": 8.0})
        progress.update(3, {"reward/mean": 0.0, "stop/env_error": 0.0})
    lines = out.getvalue().splitlines()
    assert "env_error" not in lines[1]
    assert "reward/mean -" in lines[2] and "stop/env_error 1" in lines[2] and "eval/failed 8" in lines[2]
    assert "reward/mean 0 " in lines[3] and "stop/env_error 0" in lines[3]
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=100)
    with Progress(console) as progress:
        progress.stage("rl", total=3)
        progress.update(1, {"reward/mean": None, "stop/timeout": 0.25})
    assert "stop/timeout" in console.file.getvalue() and "nan" not in console.file.getvalue()


def test_brackets_in_the_kind_of_a_task_are_text_and_no_markup():
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=100)
    with Progress(console) as progress:
        progress.stage("rl", total=3)
        progress.update(1, {"eval/em": 0.5, "eval/em_[/INST]": 0.25, "eval/em_[red]": 0.25})
    assert "em_[/INST]" in console.file.getvalue() and "em_[red]" in console.file.getvalue()


def test_a_terminal_gets_a_table_and_a_bar():
    shown = _run(terminal=True)
    assert "reward/mean" in shown and "3/3" in shown and "█" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.8125, "0.8125"), (1.23456e-6, "1.235e-06"), (14210.4, "14210"), (0, "0"), (3.0, "3"), (math.nan, "nan")],
)
def test_numbers(value, shown):
    assert text.number(value) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (7.4, "0:07"), (200, "3:20"), (3909, "1:05:09")])
def test_durations(seconds, shown):
    assert text.duration(seconds) == shown


def test_sparkline():
    assert text.sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert text.sparkline([2.0, 2.0]) == "▁▁"
    assert text.sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert text.sparkline([math.nan]) == ""


RUN = r"""
import pathlib, sys
from jaxagent.config.command import exit_code
from jaxagent.observe.progress import Progress
def run():
    with Progress(log_every_s=0.0) as progress:
        progress.note("the model\u2019s first line")
        progress.append_lines_to(pathlib.Path(sys.argv[1]))
        progress.stage("rl", total=2)
        sys.stdin.readline()  # until the display is gone
        for step in (1, 2):
            progress.update(step, {"reward/mean": 0.5 * step})
    print("at last")
    print("and an error", file=sys.stderr)
    return 7
sys.exit(exit_code(run))
"""


def _without(display: str, path) -> tuple[int, str]:
    """Runs it with a display that goes away after the first output; (exit code, what is left of stderr)."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"} if display == "ascii" else {}
    terms = {"terminal": {"TERM": "xterm"}, "dumb terminal": {"TERM": "dumb"}}  # a dumb one cannot redraw in place
    ours, theirs = os.openpty() if display in terms else os.pipe()
    command = [sys.executable, "-c", RUN, str(path)]
    if display == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    both = theirs if display == "both streams" else subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=theirs, stderr=both, env=os.environ | ascii_only | terms.get(display, {})
    ) as child:
        os.close(theirs)
        assert display == "closed" or os.read(ours, 1)
        if display != "ascii":
            os.close(ours)
        time.sleep(0.6 if display == "terminal" else 0.0)  # the bar's own thread writes meanwhile
        _, error = child.communicate(b"\n", timeout=60)
    return child.returncode, (error or b"").decode()


@pytest.mark.parametrize("display", ["pipe", "both streams", "terminal", "dumb terminal", "closed", "ascii"])
def test_a_run_does_not_end_with_its_display(display, tmp_path):
    code, error = _without(display, tmp_path / "console.txt")
    assert code == 7 and error == ("" if display == "both streams" else "and an error\n")
    lines = (tmp_path / "console.txt").read_text(encoding="utf-8").splitlines()
    shown = [line[20:] for line in lines if line[:2] == "20"]  # each behind its time
    assert shown[:2] == ["the model\u2019s first line", "rl: 2 steps"]
    assert [line.split("  ")[0] for line in shown[2:]] == ["rl 1/2", "rl 2/2"]
    told = [line for line in lines if line.startswith("The display is gone")]
    assert len(told) == (display not in ("closed", "ascii"))


def test_a_display_that_goes_after_the_last_line_is_told_too(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        gone = False

        def isatty(self):
            return True

        def write(self, text):
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    with Progress(log_every_s=0.0) as progress:
        progress.append_lines_to(tmp_path / "console.txt")
        progress.stage("rl", total=1)
        progress.update(1, {"reward/mean": 0.5})
        terminal.gone = True
    assert "The display is gone (Input/output error)" in (tmp_path / "console.txt").read_text()


def test_the_file_of_lines_is_bounded_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "MOST_BYTES", 200)
    for part in range(2):
        with Progress(Console(file=io.StringIO()), 0.0) as progress:
            progress.append_lines_to(tmp_path / "console.txt")
            for number in range(10):
                progress.note(f"line {10 * part + number}")
    lines = "".join((tmp_path / f"console{old}.txt").read_text() for old in (".old", ""))
    assert len(lines) < 500 and lines.splitlines()[-1].endswith("line 19") and len(list(tmp_path.iterdir())) == 2
