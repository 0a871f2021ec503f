"""What the verifier's programs load, and process 1: an agent can change neither, nor end the sandbox."""

import asyncio
import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from jaxagent.sandbox.base import FileError, Spec

CHANGES = {
    "preloaded library": "touch /etc/ld.so.preload",
    "loader's cache": "echo x > /etc/ld.so.cache",
    "another /etc": "mv /etc /x && mkdir /etc",
    "another /lib64": "mv /lib64 /x && ln -s ~ /lib64",
    "no /lib64": "rm -f /lib64 && ! test -e /lib64",
    "another shell": "rm -f /bin/sh",
    "another /bin": "mv /bin /x",
    "a new program": "touch /usr/local/bin/pytest",
    "start of every python": "touch /etc/python3/sitecustomize.py || touch /usr/lib/python3/dist-packages/x.pth",
    "mounted away": "umount /etc || umount -l /etc || mount -o remount,rw /etc || mount --bind ~ /etc",
    "opened": "chmod 777 /etc",
}


@pytest.mark.parametrize("change", CHANGES)
async def test_programs_and_configuration_cannot_be_changed(isolated, change):
    async with await isolated.start() as sandbox:
        result = await sandbox.run(CHANGES[change], 10, 1000)
        assert result.exit_code != 0
        with pytest.raises(FileError):
            await sandbox.write("/etc/ld.so.preload", b"x")
        assert (await sandbox.execute(["sh", "-c", "exit 3"], 10, 100)).exit_code == 3


async def test_an_image_of_its_own(local, open_folder):
    """Its files belong to the sandboxes' user, and its /lib64 may be a link; the folder of the task stays writable."""
    root = open_folder / "root"
    for directory in ("etc", "usr/lib", "usr/bin", "opt/task", "opt/other", "proc", "dev", "home/user"):
        (root / directory).mkdir(parents=True)
    shutil.copy(local.program, root / "usr/bin/program")
    for link, target in (("bin", "usr/bin"), ("lib64", "/usr/lib"), ("lib32", "usr/nothing")):
        (root / link).symlink_to(target)
    if os.geteuid() == 0:
        for path in [root, *root.rglob("*")]:
            os.chown(path, local.uid, local.uid, follow_symlinks=False)

    spec = Spec(root=str(root), directory="/opt/task")
    async with await local.start(spec) as sandbox:
        for path in ("/etc/x", "/usr/bin/program", "/bin/new", "/lib64/x", "/opt/other/x"):
            with pytest.raises(FileError):
                await sandbox.write(path, b"x")
        for path in ("/opt/task/x", "/home/user/x", "/x"):
            await sandbox.write(path, b"x")
        assert (await sandbox.execute(["/bin/program"], 10, 100)).exit_code == 0
    async with await local.start(dataclasses.replace(spec, uid=0)) as sandbox:  # owns its image, as in a container
        for path in ("/etc/x", "/usr/bin/program", "/bin/new", "/lib64/x"):
            await sandbox.write(path, b"x")
    assert not (root / "etc/x").exists()


TERMINALS = """
import os, time
for i in range(300):
    try:
        os.openpty()
    except OSError:
        break
os.fork() or (os.setsid(), time.sleep(100))
"""
PROCESSES = """
import os, time
os.fork() and os._exit(0)
os.setsid()
while True:
    try:
        os.fork() or time.sleep(1000)
    except OSError:
        open("/tmp/full", "w").close()
"""
HOLDS = {
    "no /dev/ptmx": "rm -f /dev/ptmx; sleep 100 &",
    "closed terminals": "chmod 0 /dev/pts/ptmx /dev/ptmx 2>/dev/null; sleep 100 &",
    "every terminal": f"/usr/bin/python3 -c '{TERMINALS}'",
    "every process, and no shell": f"python3 -c '{PROCESSES}'; while [ ! -e /tmp/full ]; do :; done; exec true",
    "few descriptors for process 1": "prlimit --pid 1 --nofile=3:3; sleep 100 &",
    "no files for process 1": "prlimit --pid 1 --fsize=0:0; sleep 100 &",
}


@pytest.mark.parametrize("hold", HOLDS)
async def test_the_sandbox_goes_on(isolated, hold):
    async with await isolated.start() as sandbox:
        await sandbox.run(HOLDS[hold], 20, 1000)
        for _ in range(2):
            assert (await sandbox.run("echo on", 20, 1000)).output == b"on\n"
        await sandbox.write("/tmp/x", b"x" * 100)
        assert await sandbox.read("/tmp/x") == b"x" * 100


async def running(sandbox):
    """{command line: state} of what sleeps, and (pid, start) of it."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; cat $p/stat; done 2>/dev/null"
    lines = (await sandbox.execute(["sh", "-c", script], 10, 100_000)).output.decode().splitlines()
    found = {}
    for line, stat in zip(lines[::2], lines[1::2], strict=False):
        if line.startswith("sleep "):
            rest = stat.rpartition(")")[2].split()
            found[line.strip()] = (rest[0], (int(stat.split()[0]), int(rest[19])))
    return found


async def test_spared_processes_are_seen_and_do_nothing(backend):
    async with await backend.start(Spec()) as sandbox:
        await sandbox.execute(["sh", "-c", "sleep 1001 >/dev/null 2>&1 & sleep 1002 >/dev/null 2>&1 &"], 10, 100)
        while len(before := await running(sandbox)) < 2:  # a fork that is not yet `sleep`
            await asyncio.sleep(0.02)
        assert set(before) == {"sleep 1001", "sleep 1002"}
        await sandbox.run("kill $(pgrep -f 'sleep 1002'); setsid sleep 1003 & sleep 1004 & disown", 10, 100)
        kept = before["sleep 1001"][1]
        await sandbox.stop_processes([pid for _, pid in before.values()])
        assert await running(sandbox) == {"sleep 1001": ("T", kept)}
        # The same number with another start is another process.
        await sandbox.stop_processes([(kept[0], kept[1] + 1)])
        assert await running(sandbox) == {}
        assert (await sandbox.run("echo on", 10, 100)).output == b"on\n"
        await sandbox.run("sleep 1005 &", 10, 100)
        await sandbox.stop_processes()
        assert await running(sandbox) == {}


async def test_no_process_writes_into_another(isolated):
    path = Path("/usr/bin/python3")
    if not path.exists():
        pytest.skip("no /usr/bin/python3")
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\npid = os.fork()\n"
        "if not pid: os.execvp('sleep', ['sleep', '5'])\n"
        "print(libc.ptrace(16, pid, 0, 0), ctypes.get_errno(), libc.process_vm_writev(pid, 0, 0, 0, 0, 0),"
        " ctypes.get_errno())\nos.kill(pid, 9)\n"
    )
    async with await isolated.start() as sandbox:
        result = await sandbox.execute([str(path), "-c", program], 10, 1000)
        assert result.output.split() == [b"-1", b"1", b"-1", b"1"]  # EPERM
