"""kill -9 of an owner, busy or at any other moment: nothing is left after the next start."""

import contextlib
import fcntl
import os
import random
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from jaxagent.sandbox import cgroups
from jaxagent.sandbox.base import Spec
from jaxagent.sandbox.owner import Owner, remove_directory
from tests.sandbox.hostile.host import leftovers, pids

ROOT = Path(__file__).parents[2]
START = """
import asyncio, os, signal, sys
from pathlib import Path
from jaxagent.sandbox import cgroups, choose, owner as owners
from jaxagent.sandbox.base import Limits, Spec
from jaxagent.sandbox.owner import Owner

LIMITS = Limits(processes=32, memory_bytes=2**26, disk_bytes=2**24)
BASE = Path(sys.argv[1])
"""
BUSY = """
async def main(name, count):
    owner = Owner(BASE)
    backend = choose.SAFE[name](owner)
    gate = asyncio.Semaphore(8)
    async def one():
        async with gate:
            sandbox = await backend.start(Spec(limits=LIMITS))
            await sandbox.run("trap '' INT HUP TERM; (setsid sleep 1000 &); echo data > f", 60, 100)
        return sandbox
    sandboxes = await asyncio.gather(*[one() for _ in range(count)])
    print(owner.id, flush=True)
    await asyncio.gather(*[s.run("while :; do sleep 0.05; done", 600, 100) for s in sandboxes])

asyncio.run(main(sys.argv[2], int(sys.argv[3])))
"""
COMING_AND_GOING = """
async def main(name):
    owner = Owner(BASE)
    backend = choose.SAFE[name](owner)
    print(owner.id, flush=True)
    async def one(limits):
        while True:  # groups of two kinds, so that some are made anew and some are used again
            async with await backend.start(Spec(limits=limits)) as sandbox:
                await sandbox.run("(setsid sleep 1000 &); echo data > f", 60, 100)
    await asyncio.gather(*[one(Limits(processes=32 + n % 2, disk_bytes=2**24)) for n in range(6)])

asyncio.run(main(sys.argv[2]))
"""
HALF_MADE = """
def deadly(function, calls):
    def wrapper(*arguments):
        result = function(*arguments)
        wrapper.left -= 1
        if not wrapper.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    wrapper.left = calls
    return wrapper

class Secrets:
    token_hex = staticmethod(lambda size: sys.argv[3])
owners.secrets = Secrets
match sys.argv[2]:
    case "locked":  # its lock, and not yet its directory
        try_lock = owners.try_lock
        def lock(fd):
            taken = try_lock(fd)
            if os.readlink(f"/proc/self/fd/{fd}").endswith(f"{sys.argv[3]}.lock"):
                os.kill(os.getpid(), signal.SIGKILL)
            return taken
        owners.try_lock = lock
    case "noted":
        Owner.note = deadly(Owner.note, 1)
    case "groups":
        cgroups.Cgroups = deadly(cgroups.Cgroups, 1)
Owner(BASE)
"""


@pytest.fixture
def base():
    """A directory for runs that no other process of this host sweeps."""
    with tempfile.TemporaryDirectory(prefix="jaxagent-crash-") as directory:
        os.chmod(directory, 0o711)  # the sandboxes' user passes through
        yield Path(directory) / "runs"


def begin(program, *arguments):
    command = [sys.executable, "-c", START + program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def check_next_start(base, run):
    after = Owner(base)
    try:
        assert leftovers(run, base) == []
        assert run in after.swept
    finally:
        after.close()
    assert leftovers(after.id, base) == [] and list(base.iterdir()) == []
    assert stat.S_IMODE(base.stat().st_mode) == 0o711


@pytest.mark.parametrize(("name", "count"), [("namespaces", 64), ("bubblewrap", 12)])
def test_kill_9(name, count, backends, base):
    backends.backend(name)  # skips where it does not work
    owner = begin(BUSY, base, name, count)
    try:
        run = owner.stdout.readline().strip()
        assert run, "the owner did not start its sandboxes"
        time.sleep(0.5)
        # The outermost processes at least, and the run's directory and lock.
        assert len(leftovers(run, base)) >= count + 2
    finally:
        kill(owner)
    check_next_start(base, run)


ROUNDS = int(os.environ.get("JAXAGENT_CRASH_ROUNDS", "3"))


@pytest.mark.slow
def test_kill_9_at_any_moment(backend, base):
    """While sandboxes start, work and close."""
    draw = random.Random(0)
    for _ in range(ROUNDS):
        owner = begin(COMING_AND_GOING, base, backend.name)
        try:
            run = owner.stdout.readline().strip()
            assert run
            time.sleep(draw.uniform(0.0, 1.0))
        finally:
            kill(owner)
        check_next_start(base, run)


@pytest.mark.parametrize("moment", ["locked", "noted", "groups"])
def test_kill_9_of_a_run_that_is_half_made(moment, base):
    run = f"halfmade{moment}"
    owner = begin(HALF_MADE, base, moment, run)
    try:
        assert owner.wait(60) == -signal.SIGKILL
    finally:
        owner.stdout.close()
    assert leftovers(run, base)
    check_next_start(base, run)


ELSEWHERE = """
owner = Owner()
print(owner.id, owner.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_with_another_tmpdir_sweeps(tmp_path, monkeypatch):
    """As batch systems give each job its own."""
    (tmp_path / "of a job").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "of a job"))
    dead = begin(ELSEWHERE, tmp_path)
    try:
        run, _, path = dead.stdout.readline().strip().partition(" ")
        assert dead.wait(60) == -signal.SIGKILL and run
    finally:
        dead.stdout.close()
    monkeypatch.delenv("TMPDIR")
    Owner().close()
    assert leftovers(run) == [] and not Path(path).exists()


def test_groups_that_no_lock_tells_of_are_removed(base):
    """What a run left whose directory was removed by hand, or lay elsewhere; a living run's groups stay."""
    alive = Owner(base.with_name("other"))
    mine = [Path(p) for p in cgroups.candidates(alive.id) if Path(p).is_dir()]
    try:
        if not mine:
            pytest.skip("control groups cannot be made here")
        left = [p.with_name(f"jaxagent-{secrets.token_hex(6)}") for p in mine]
        for path in left:
            (path / "1").mkdir(parents=True)
        Owner(base).close()
        assert not [p for p in left if p.exists()] and all(p.is_dir() for p in mine)
    finally:
        alive.close()
    assert not [p for p in mine if p.exists()]


def test_a_start_waits_for_a_sweep_in_progress(base):
    """Else it could return while another process still removes what a dead run left."""
    Owner(base).close()
    made = []
    fd = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # as a sweep holds it
        starting = threading.Thread(target=lambda: made.append(Owner(base)))
        starting.start()
        starting.join(0.3)
        assert starting.is_alive() and not made and list(base.iterdir()) == []
    finally:
        os.close(fd)
    starting.join(30)
    made[0].close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_directories_that_nobody_may_enter_are_removed(base):
    """By an ordinary user, too, whom modes do bind."""
    base.mkdir()
    (base / "run" / "a" / "b").mkdir(parents=True)
    (base / "run" / "a" / "b" / "file").write_text("x")
    for path in (base / "run" / "a" / "b", base / "run" / "a", base / "run", base):
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        path.chmod(0 if path != base else 0o700)
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            remove_directory(base / "run")
        finally:
            os._exit(0 if not (base / "run").exists() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert stat.S_IMODE(base.stat().st_mode) == 0o700


def test_the_kernel_kills_what_cannot_notice(backend, base):
    """Stopped, so that no process sees its socket close: what remains is the parent-death signal. No start helps."""
    owner = begin(BUSY, base, backend.name, 2)
    try:
        run = owner.stdout.readline().strip()
        assert run
        for pid in pids(run):
            with contextlib.suppress(ProcessLookupError):  # a command of the sandbox may just have ended
                os.kill(pid, signal.SIGSTOP)
        assert len(pids(run)) >= 2
    finally:
        kill(owner)
    end = time.monotonic() + 60
    while pids(run) and time.monotonic() < end:
        time.sleep(0.05)
    assert pids(run) == []
    check_next_start(base, run)


async def test_a_living_run_is_not_swept(local):
    async with await local.start(Spec()) as sandbox:
        other = Owner()
        assert local.owner.id not in other.swept
        assert os.geteuid() != 0 or local.owner.uids.part != other.uids.part
        for _ in range(2):
            other.close()
        assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
