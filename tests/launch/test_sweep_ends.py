"""A sweep that is ended: its run gets one signal, saves, and is gone when the sweep is; with the right exit code."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.fleet.tiny_fleet import alive
from tests.tiny_run import ROOT

# A run that notes its process and every signal, and saves for a while; and a sweep of two of them.
RUN = """
import os, pathlib, signal, sys, time
folder, saves_s = pathlib.Path(sys.argv[1]), float(sys.argv[2])
heard = []
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda number, _: heard.append(number))
(folder / "pid").write_text(str(os.getpid()))
while not heard:
    time.sleep(0.02)
time.sleep(saves_s)
(folder / "saved").write_text(str(len(heard)))
sys.exit(143)
"""
SWEEP = f"""
import pathlib, sys
from jaxagent.launch import grid, sweep
folder, saves_s, *flags = sys.argv[1:]
runs = []
for name in ("first", "second"):
    workdir = pathlib.Path(folder) / name
    runs.append(grid.Run((), 0, workdir, (sys.executable, "-c", {RUN!r}, str(workdir), saves_s)))
grid.runs = lambda *_: runs
sys.exit(sweep.main(["--config=x", f"--workdir={{folder}}", *flags]))
"""


@contextlib.contextmanager
def sweeping(folder: pathlib.Path, saves_s: float, *flags: str):
    """A sweep in a group of its own, as a terminal's foreground job is, whose first run is under way; and its id."""
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(folder), str(saves_s), *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = 0
    try:
        run = int(when(folder / "first/pid"))
        yield process, run
    finally:
        for pid in (process.pid, run):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL) if pid else None
        process.wait(20)
        process.stdout.close()


def when(path: pathlib.Path) -> str:
    for _ in range(1000):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} did not come")


def lives(pid: int) -> bool:
    """Whether it does, or will be reaped; a moment is given to a process that is being killed."""
    for _ in range(100):
        if not alive(pid):
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("signum", "whom", "code"),
    [(signal.SIGINT, os.killpg, 130), (signal.SIGTERM, os.kill, 143), (signal.SIGTERM, os.killpg, 143)],
)
def test_a_sweep_that_is_ended_has_its_run_save_first(tmp_path, signum, whom, code):
    with sweeping(tmp_path, 1.0) as (process, run):
        whom(process.pid, signum)
        said, _ = process.communicate(timeout=30)
        assert (process.returncode, (tmp_path / "first/saved").read_text(), lives(run)) == (code, "1", False), said
        assert not (tmp_path / "second").exists() and "asked to end, ended with 143" in said


def test_what_does_not_end_is_killed_after_the_grace_time(tmp_path):
    with sweeping(tmp_path, 60.0, "--grace_s=0.5") as (process, run):
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
        assert (process.returncode, lives(run), (tmp_path / "first/saved").exists()) == (143, False, False), said
        assert "asked to end, and killed after 0.5 s" in said


def test_a_second_interrupt_ends_at_once(tmp_path):
    with sweeping(tmp_path, 60.0) as (process, run):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=15)
        assert (process.returncode, lives(run), (tmp_path / "first/saved").exists()) == (130, False, False), said


def test_a_run_that_takes_too_long_saves_and_the_next_one_begins(tmp_path):
    with sweeping(tmp_path, 0.2, "--run_timeout_s=1") as (process, run):
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and not lives(run), said
        assert [(tmp_path / name / "saved").read_text() for name in ("first", "second")] == ["1", "1"]
        assert "stopped after 1 s, ended with 143" in said


def test_a_sweep_that_is_killed_takes_its_run_with_it(tmp_path):
    with sweeping(tmp_path, 0.0) as (process, run):
        process.kill()
        process.wait(20)
        assert not lives(run)
