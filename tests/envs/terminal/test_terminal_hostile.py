"""Attempts that go for the reward, or for a failure in the place of a 0, in real sandboxes: none gets either."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest

from jaxagent.envs.terminal import endless
from jaxagent.envs.terminal.verify import VerifierError, reward_of_summary
from jaxagent.sandbox.base import FileError
from tests.envs.terminal.test_terminal_attempts import attempt, cmd, harbor, layered, opened, task

__all__ = ["attempt", "layered", "opened"]  # fixtures
NEVER = "raise SystemExit(1)"
GNAWED = {
    "its home is gone": "cd /; rm -rf /home/user",
    "its home is a file": "cd /; rm -rf ~; touch /home/user",
    "its home is closed": "chmod 0 ~",
    "all is closed": "chmod 0 /",
    "all folders are closed": "chmod 0 /home /tmp ~; cd /",
    "no temporary files": "rm -rf /tmp; touch /tmp",
    "the disk is full": "cat /dev/zero > big 2>/dev/null; true",
    "no file is left": "/usr/bin/python3 -c 'for i in range(10**7): open(str(i), \"w\")' 2>/dev/null; true",
    "the loader is gone": "rm -rf /lib64 /lib /bin 2>/dev/null; true",
    "the terminal is gone": "rm -f /dev/ptmx; chmod 0 /dev/pts/ptmx; sleep 100 &",
    "process 1 without descriptors": "prlimit --pid 1 --nofile=3:3; prlimit --pid 1 --fsize=0:0; true",
}


@pytest.mark.parametrize("how", GNAWED)
def test_a_broken_place_is_0_and_no_failure(attempt, how):
    _, verdict, _ = attempt(cmd(GNAWED[how]), cmd("true"), "<done>", of=task(final_test=NEVER), max_turns=9)
    assert getattr(verdict, "reward", verdict) == 0.0


@pytest.mark.parametrize("how", GNAWED)
def test_a_broken_place_is_0_and_no_failure_in_images(attempt, layered, tmp_path, how):
    """Here a test must be brought in and a reward file written."""
    (tmp_path / "copy/tests/full").write_text("0.75\n" * 100_000)
    (tmp_path / "copy/tests/test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    _, verdict, _ = attempt(cmd(GNAWED[how]), cmd("true"), "<done>", of=layered, max_turns=9)
    assert getattr(verdict, "reward", verdict) == 0.0


def test_a_missing_working_directory_hides_no_work(attempt):
    """What was done elsewhere still counts."""
    final = "import os, sys; sys.exit(0 if os.path.exists('/tmp/done') and os.getcwd() == '/home/user' else 1)"
    said = (cmd("touch /tmp/done; cd /; rm -rf /home/user"), "<done>")
    _, verdict, environment = attempt(*said, of=task(final_test=final))
    assert verdict.reward == 1.0 and environment.counters["broken_places"] == 0


def test_a_broken_place_is_counted(attempt):
    _, verdict, environment = attempt(cmd(GNAWED["the disk is full"]), "<done>", of=task(final_test=NEVER))
    assert verdict.reward == 0.0 and environment.counters["broken_places"] == 1


def test_an_honest_failure_stays_one(attempt):
    """The workspace is as it should be: so the task is at fault."""
    _, failure, environment = attempt(cmd("true"), "<done>", of=task(final_test="raise SystemExit(7)"))
    assert isinstance(failure, VerifierError) and environment.counters["broken_places"] == 0


def test_a_test_that_is_killed_for_memory_is_0(attempt):
    """Shared memory that belongs to no process: the test that needs a little is killed."""
    counted = []

    async def then(environment):
        counted.append(await environment._sandbox.oom_kills())

    of = task(final_test="import sys\nx = bytearray(8 * 2**30)\nsys.exit(1)")
    _, verdict, environment = attempt(cmd("true"), "<done>", of=of, then=then)
    if counted == [None]:
        pytest.skip("nobody counts what is killed for memory here")
    assert getattr(verdict, "reward", verdict) == 0.0 and environment.counters["broken_places"] == 1


def test_a_library_that_ends_every_program(attempt):
    if not Path("/usr/bin/gcc").exists():
        pytest.skip("no /usr/bin/gcc")
    said = (
        cmd("printf 'void _Exit(int); __attribute__((constructor)) void f(void) { _Exit(0); }' > e.c"),
        cmd("gcc -shared -fPIC e.c -o e.so; echo ~/e.so > /etc/ld.so.preload; mkdir l; cp -r /lib64/. l; mv /lib64 /x"),
        "<done>",
    )
    _, verdict, _ = attempt(*said, of=task(final_test=NEVER), max_turns=9)
    assert getattr(verdict, "reward", verdict) == 0.0


POLLER = """
import os, time
if os.fork(): raise SystemExit
os.setsid()
while True:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{pid}/cmdline").read() == "python3\\0-I\\0-\\0":
                pipe = os.open(f"/proc/{pid}/fd/0", os.O_RDWR | os.O_NONBLOCK)
                try: os.read(pipe, 1 << 20)
                except BlockingIOError: pass
                os.write(pipe, b"import os; os._exit(0)\\n")
        except OSError: pass
"""


def test_a_process_task_is_judged_alone(attempt):
    """Somebody who waits for the test to rewrite it is killed; what setup started is seen, what it sleeps in too."""
    setup = "sleep 91919 </dev/null >/dev/null 2>&1 &\nuntil pgrep -f '^sleep 91919'; do sleep 0.01; done\n"
    alive = """
import os, sys
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try: found.append((open(f"/proc/{pid}/cmdline").read(), os.readlink(f"/proc/{pid}/cwd")))
    except OSError: pass
sys.exit(0 if ("sleep\\0" + "91919\\0", os.getcwd()) in found and len(found) < 5 else 1)
"""
    of = {"setup": setup, "initial_test": alive, "final_test": alive, "processes": True}
    watch = cmd(f"cat > p.py <<'E'\n{POLLER}\nE\n/usr/bin/python3 p.py >/dev/null 2>&1 </dev/null; sleep 0.2")
    _, verdict, _ = attempt(watch, "<done>", of=task(**{**of, "final_test": "import time; time.sleep(.2)\n" + NEVER}))
    assert verdict.reward == 0.0
    _, verdict, _ = attempt(cmd("true"), "<done>", of=task(**of), initial_test=True)
    assert verdict.reward == 1.0
    _, verdict, _ = attempt(cmd("sleep 100 & sleep 100 &"), "<done>", of=task(**of))
    assert verdict.reward == 1.0
    _, verdict, _ = attempt(cmd("kill $(pgrep -f 'sleep 91919'); sleep 91919 &"), "<done>", of=task(**of))
    assert verdict.reward == 0.0  # one of its own is not the one that was there


END = "import os; os._exit(0)"
SITE = "d=$(/usr/bin/python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d; "
PREPARED = {
    "a path file": f"{SITE}echo '{END}' > $d/x.pth",
    "usercustomize": f"{SITE}echo '{END}' > $d/usercustomize.py",
    "a plugin": f"{SITE}echo '{END}' > $d/pytest.py; mkdir $d/_pytest; echo '{END}' > $d/_pytest/__init__.py",
    "a package around the test": f"echo '{END}' > ~/__init__.py; echo '{END}' > /home/__init__.py",
    "conftest": f"echo '{END}' > ~/conftest.py; echo '{END}' > /tmp/conftest.py",
    "settings": "printf '[pytest]\\naddopts = --collect-only\\n' | tee ~/pytest.ini > /tmp/pytest.ini",
    "a module of the same name": f"for m in os json site pytest; do echo '{END}' > ~/$m.py; done",
    "folders in the way of the test": "mkdir -p ~/test_final.py.{1..400}.part/x ~/test_final.py/x",
    "start-up files": f"echo '{END}' > ~/.pythonrc.py; echo 'exit 0' | tee ~/.profile ~/.bashrc ~/.env > /dev/null",
}
# A stand-in where the machine's /usr has no pytest: what counts is what its interpreter loads before it runs a line.
STAND_IN = """#!/usr/bin/python3
import runpy, sys
tests = runpy.run_path(sys.argv[-1])
try:
    [test() for name, test in tests.items() if name.startswith("test_")]
except AssertionError:
    sys.exit(1)
"""


@pytest.fixture
def with_pytest(opened):
    """Sandboxes whose /opt/bin has a pytest that is found first, as an image with a virtual environment has it."""
    sandboxes, _ = opened
    if sandboxes._backend.name != "namespaces":
        pytest.skip("the back end that works here has no layers")
    top = Path(tempfile.mkdtemp(prefix="jaxagent-test-images-"))  # pytest's own is closed to the sandboxes' user
    top.chmod(0o711)
    layers = top / "layers"
    (layers / "copy/opt/bin").mkdir(parents=True)
    program = layers / "copy/opt/bin/pytest"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    of = harbor(top)
    folder = top / "copy"
    (folder / "test_final_state.py").write_text("def test_state():\n    assert open('/home/user/n').read() == '7\\n'\n")
    software = sandboxes._software
    sandboxes._software = dataclasses.replace(software, layers=str(layers))
    try:
        yield of, endless._pytest(folder / "test_final_state.py", endless.FINAL_TEST)
    finally:
        sandboxes._software = software
        shutil.rmtree(top)


def judged(attempt, with_pytest, command):
    """What the Endless format's test says of the state that a command leaves."""
    of, script = with_pytest

    async def then(environment):
        environment._task = dataclasses.replace(
            environment._task,
            final_test=script,
            reward_from="exit_status",
            workdir="/home/user",
            env={"PATH": "/home/user/bin:/opt/bin:/usr/bin:/bin", "PYTHONPATH": "/home/user"},
        )

    return attempt(cmd(command), "<done>", of=of, then=then, max_turns=9)[1]


@pytest.mark.parametrize("how", PREPARED)
def test_the_published_test_loads_nothing_of_the_agents(attempt, with_pytest, how):
    verdict = judged(attempt, with_pytest, PREPARED[how])
    assert getattr(verdict, "reward", verdict) == 0.0
    verdict = judged(attempt, with_pytest, f"{PREPARED[how]}; echo 7 > n")
    assert getattr(verdict, "reward", verdict) == 1.0


def test_another_pytest_comes_last(attempt, with_pytest):
    verdict = judged(attempt, with_pytest, "mkdir -p bin; printf '#!/bin/sh\\n' > bin/pytest; chmod 755 bin/pytest")
    assert getattr(verdict, "reward", verdict) == 0.0


def test_no_process_is_left_when_the_reward_is_read(attempt, layered, tmp_path):
    """The test starts the agent's program, which stays and writes a reward of its own after the test's."""
    (tmp_path / "copy/tests/test.sh").write_text(
        "sh /home/user/program\necho 0.25 > /logs/verifier/reward.txt\necho 0.25 > /tmp/said\n"
    )
    waits = "while ! [ -s /tmp/said ]; do :; done; sleep 0.05; echo 1 > /logs/verifier/reward.txt"
    program = f"cat > program <<'E'\nsetsid sh -c '{waits}' </dev/null >/dev/null 2>&1 &\nE\n"
    seen = []

    async def then(environment):
        workspace = environment._workspace
        read = workspace.read

        async def late(path, max_bytes):  # as on a busy machine
            if not seen:
                await workspace._sandbox.execute(("sleep", "0.5"), 10, 100, None, "/")
            seen.append(path)
            return await read(path, max_bytes)

        workspace.read = late

    _, verdict, _ = attempt(cmd(program), "<done>", of=layered, then=then)
    assert seen and verdict.reward == 0.25


STEERS = "conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml"
# What an agent prepares -> the command by which a Harbor task's test falls for it.
STEERED = {
    "settings of pytest in /": (
        f"cd /; touch {STEERS}; rm conftest.py; mkdir -p conftest.py/x; chmod 0 conftest.py",
        f"cd /; ls -d {STEERS} 2>/dev/null | grep -q .",
    ),
    "descriptors that are files": (
        "rm -rf /dev/fd; mkdir /dev/fd; for i in 3 4 10 11 12 61 62 63; do echo a > /dev/fd/$i; done",
        "cmp -s <(echo b) <(echo c)",
    ),
    "standard input that is a file": ("rm -f /dev/stdin; echo a > /dev/stdin", "echo b | grep -q a /dev/stdin"),
    "descriptors in a closed folder": (
        "rm -f /dev/fd /dev/stdout; ln -s ~ /dev/fd; echo a > ~/63; mkdir -p /dev/stdout/x; chmod 0 /dev/stdout",
        "grep -q a <(echo b) || ! echo b > /dev/stdout",
    ),
}


@pytest.mark.parametrize("how", STEERED)
def test_a_test_of_others_is_not_steered_from_outside_its_folder(attempt, layered, tmp_path, how):
    prepared, falls_for_it = STEERED[how]
    (tmp_path / "copy/tests/test.sh").write_text(
        f"{falls_for_it} && echo 1 > /logs/verifier/reward.txt || echo 0.25 > /logs/verifier/reward.txt\n"
    )
    _, verdict, _ = attempt(cmd(prepared), "<done>", of=layered)
    assert getattr(verdict, "reward", verdict) == 0.25


def test_a_reward_that_nobody_promised_is_an_error(attempt, layered, tmp_path):
    for said, message in (("1e300", r"1e\+300, which is not in \[0, 1\]"), ("-0.5", r"-0.5, which is not")):
        (tmp_path / "copy/tests/test.sh").write_text(f"echo {said} > /logs/verifier/reward.txt\n")
        _, failure, _ = attempt("<done>", of=layered)
        assert isinstance(failure, VerifierError)
        with pytest.raises(VerifierError, match=message):
            raise failure
    toml = tmp_path / "copy/task.toml"
    toml.write_text(toml.read_text().replace("[metadata]", "[metadata]\nreward_range = [-1, 1]"))
    assert attempt("<done>", of=layered)[1].reward == -0.5
    (tmp_path / "copy/tests/test.sh").write_text("yes '' | head -c 100K > /logs/verifier/reward.txt\n")
    with pytest.raises(FileError, match=r"reward\.txt"):
        attempt("<done>", of=layered)


@pytest.mark.parametrize("status", [1, 2, 137, 143])
def test_a_summary_beside_another_status_is_not_believed(status):
    forged = "=== short test summary info ===\nPASSED tests/test_outputs.py::test_a\n"
    assert reward_of_summary(0, forged) == 1.0
    assert reward_of_summary(status, forged) == 0.0
