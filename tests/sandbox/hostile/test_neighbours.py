"""What one sandbox takes, another one beside it or the test after it still has."""

import asyncio
import errno
import os
import resource
from pathlib import Path

import pytest

from jaxagent.sandbox import namespaces, owner, wire
from jaxagent.sandbox.base import Spec
from jaxagent.sandbox.owner import PER_RUN, SHARED, Owner
from tests.sandbox.hostile.test_hostile import BY_NAME, NO_PYTHON, PYTHON, SMALL, host, install

__all__ = ["host"]  # a fixture
OWN_USERS = ("namespaces", "bubblewrap")
NEEDED = """
import array, ctypes, fcntl, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
timer = ctypes.c_void_p()
mine, other = socket.socketpair()
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
mine.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))])
pipe = os.pipe()
for name, good in (
    ("inotify", libc.inotify_init1(0) >= 0),
    ("signals", libc.sigqueue(os.getpid(), 40, None) == 0),
    ("timers", libc.timer_create(1, None, ctypes.byref(timer)) == 0),
    ("queues", libc.mq_open(b"/q", os.O_CREAT | os.O_RDWR, 0o600, None) >= 0),
    ("pipes", fcntl.fcntl(pipe[0], 1032) == 65536),
):
    print(name, good)
"""


@pytest.fixture(params=OWN_USERS)
def backend(request, backends):
    if os.geteuid() != 0:
        pytest.skip("sandboxes of a user who is not root share his id")
    if not PYTHON.exists():
        pytest.skip(NO_PYTHON)
    made = backends.backend(request.param)
    if namespaces.ONE_USER in made.missing:
        pytest.skip(namespaces.ONE_USER)
    return made


@pytest.fixture
def few_descriptors():
    """A soft limit as it is by default, whatever the hard one is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_the_kernel_counts_per_user(backend, host, few_descriptors):
    async with await backend.start(SMALL) as taker, await backend.start(SMALL) as there_already:
        command = await install(taker, "/tmp", BY_NAME["budgets_of_the_user"], host, backend)
        await taker.run(f"{command} >/tmp/said 2>&1 & until grep -q held /tmp/said; do sleep 0.05; done", 30, 100)
        assert await taker.read("/tmp/said") == b"held\n"
        async with await backend.start(SMALL) as late:
            for sandbox in (there_already, late):
                found = await sandbox.execute([str(PYTHON), "-c", NEEDED], 30, 2000)
                assert found.exit_code == 0 and b"False" not in found.output and b"True" in found.output, found


async def test_the_runs_own_group_holds(backend):
    """A sandbox below its own limit loses a process where all together are at theirs; that is not its doing."""
    groups = backend.owner.cgroups
    if "memory" not in groups.most:
        pytest.skip("memory is not limited by control groups here")
    group = groups._roots["memory"]
    names = [n for n in ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes", "memory.max") if (group / n).exists()]
    before = {name: (group / name).read_text() for name in names}
    assert int(before[names[-1]]) <= groups.most["memory"]

    async with await backend.start(SMALL) as sandbox:
        try:
            for name in reversed(names):
                (group / name).write_text(str(100 * 2**20))
            result = await sandbox.execute(["sh", "-c", "head -c 150M /dev/zero | tail -n 1"], 20, 100)
        finally:
            for name in names:
                (group / name).write_text(before[name])
        killed = await sandbox.oom_kills()
    assert b"Killed" in result.output and killed == 0


async def test_each_has_a_host_user(backend):
    """Of a range that belongs to this run; one that has ended gives its own back."""

    def user(sandbox):
        return os.stat(f"/proc/{sandbox._process.pid}").st_uid

    first, second = await backend.start(Spec()), await backend.start(Spec())
    seen = [user(first), user(second)]
    await first.close()
    third = await backend.start(Spec())
    await asyncio.gather(second.close(), third.close())
    part = backend.owner.uids.part
    assert len(set(seen)) == 2
    assert all(0 < uid - owner.SHARED - part * owner.PER_RUN <= owner.PER_RUN for uid in seen)


async def test_a_kept_layer_is_every_users(backend, open_folder):
    """Whoever wrote it: on disk it belongs to one user, as which each sandbox sees itself."""
    if backend.name == "bubblewrap":
        pytest.skip("it keeps no layers")
    folder = str(open_folder / backend.name)

    async with await backend.start(Spec()) as sandbox:
        made = "umask 077; mkdir d; echo 1 >d/file; ln -s nowhere d/link"
        assert (await sandbox.run(made, 10, 100)).exit_code == 0
        layer = await sandbox.snapshot(folder)
        async with await backend.start(Spec(layers=(layer,))) as other:
            assert (await other.run("echo 2 >>d/file; chmod 644 d/file; cat d/file", 10, 100)).output == b"1\n2\n"
            twice = await other.snapshot(f"{folder}-twice")
    files = [path.lstat() for top in (layer, twice) for path in Path(top).rglob("*")]
    assert len(files) > 6 and {(file.st_uid, file.st_gid) for file in files} == {(owner.SHARED, owner.SHARED)}


async def test_where_layers_cannot_be_mapped_it_is_said(backend, monkeypatch):
    """Sandboxes then share one user, as all layers on disk do."""
    if backend.name == "bubblewrap":
        pytest.skip("it maps no layers")
    number, told = wire.number, []

    def impossible(kind, value):
        told.append((kind, value))
        return number(kind, 2**32 - 1 if kind == "d" and told[-2] != ("u", value) else value)

    monkeypatch.setattr(wire, "number", impossible)

    owner = Owner()
    made = namespaces.Namespaces(owner)
    try:
        async with await made.start(Spec()) as sandbox, await made.start(Spec()):
            assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
            shared = os.stat(f"/proc/{sandbox._process.pid}").st_uid
        assert [kind for kind, _ in told].count("d") == 3  # what failed once is not tried again
        shared, missing, free = shared, made.missing, owner.uids.take()
    finally:
        await made.close()
        owner.close()
    assert shared == SHARED and namespaces.ONE_USER in missing and (free - 1 - SHARED) % PER_RUN == 0


async def test_memory_that_no_process_has_is_given_back(isolated, host):
    if not PYTHON.exists():
        pytest.skip(NO_PYTHON)
    async with await isolated.start(SMALL) as sandbox:
        command = await install(sandbox, "/tmp", BY_NAME["shared_memory_left"], host, isolated.backend)
        for spared in ((), [(2**22, 1)]):  # with a process to be spared they are ended in another way
            assert b"held" in (await sandbox.run(command, 20, 1000)).output
            await sandbox.stop_processes(spared)
            program = "x = b'1' * (100 << 20); print(open('/proc/sysvipc/shm').read().count(chr(10)))"
            test = await sandbox.execute([str(PYTHON), "-c", program], 20, 1000)
            assert (test.exit_code, test.output) == (0, b"1\n")  # the names of the columns
            for kind in ("msg", "sem"):
                listed = await sandbox.execute(["wc", "-l", f"/proc/sysvipc/{kind}"], 20, 1000)
                assert listed.output.startswith(b"1 ")


async def test_a_host_without_terminals_is_waited_for(isolated):
    """A sandbox that has none itself does not pay for those who took all of the host's."""
    held, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    async with await isolated.start() as sandbox:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            while True:
                held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError as failure:
            reason = failure
        try:
            if reason.errno != errno.ENOSPC:
                pytest.skip(f"this process cannot hold all terminals of the host: {reason}")
            command = asyncio.create_task(sandbox.run("echo on", 10, 100))
            await asyncio.sleep(0.3)
            assert not command.done()
        finally:
            for fd in held:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (await command).output == b"on\n"
