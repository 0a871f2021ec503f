"""SIGTERM and Ctrl-C, in processes of their own: what they end, when, and what they say."""

import signal
import subprocess
import sys

import pytest

from jaxagent.runs.stopping import Stopped

PREAMBLE = """
import signal, sys, time
from jaxagent.config.command import exit_code
from jaxagent.runs.stopping import Stopping
def run():
    with Stopping() as stopping:
        stopping.training = {training}
        print("ready", flush=True)
        {body}
sys.exit(exit_code(run))
"""
WAITING = "while stopping.end_signal is None: time.sleep(0.01)\n        stopping.end_if_asked(37)"
DEAF = "while True: time.sleep(0.01)"
# Minutes in C without the interpreter, as a compilation is.
COMPILING = "__import__('hashlib').pbkdf2_hmac('sha256', b'x', b'y', 10**9)"


def start(training: bool, body: str) -> subprocess.Popen:
    code = PREAMBLE.format(training=training, body=body)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize(
    ("signum", "code", "body"),
    [
        (signal.SIGINT, 130, DEAF),
        (signal.SIGTERM, 143, DEAF),
        (signal.SIGINT, 130, COMPILING),
        (signal.SIGTERM, 143, COMPILING),
        (signal.SIGHUP, 129, COMPILING),
    ],
)
def test_outside_a_stage_the_first_ends_the_run(signum, code, body):
    child = start(False, body)
    child.send_signal(signum)
    _, error = child.communicate(timeout=60)
    assert child.returncode == code and error.count("\n") <= 2  # an empty line first where a thread writes it
    assert "nothing is lost, and the same command continues." in error


@pytest.mark.parametrize(
    ("signum", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted: saved"),
        (signal.SIGTERM, 143, "SIGTERM: saved"),
        (signal.SIGHUP, 129, "SIGHUP: saved"),
    ],
)
def test_in_a_stage_the_run_is_asked_to_save(signum, code, said):
    child = start(True, WAITING)
    child.send_signal(signum)
    _, error = child.communicate(timeout=60)
    assert child.returncode == code and f"{said} at step 37; the same command continues." in error
    assert "Traceback" not in error


def test_under_nohup_the_end_of_the_terminal_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # children inherit what is ignored
    try:
        child = start(True, WAITING)
    finally:
        signal.signal(signal.SIGHUP, before)
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGTERM)
    assert "SIGTERM: saved" in child.communicate(timeout=60)[1] and child.returncode == 143


def test_a_second_interrupt_ends_at_once():
    child = start(True, DEAF)
    child.send_signal(signal.SIGINT)
    while "press Ctrl-C again" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 130 and "interrupted twice: ended at once" in error


def test_stopped_is_an_exit_with_the_signal_s_code():
    stopped = Stopped(signal.SIGTERM, ": saved at step 1.")
    assert isinstance(stopped, SystemExit) and stopped.code == 143 and str(stopped) == "SIGTERM: saved at step 1."
