"""Every hostile program, in every isolating back end that works here: nothing gets out, nothing lasts, all ends."""

import asyncio
import dataclasses
import json
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest

from jaxagent.sandbox.base import Limits, SandboxClosed, Spec
from tests.sandbox.conftest import ISOLATING
from tests.sandbox.hostile.host import Host
from tests.sandbox.hostile.programs import PROGRAMS

pytestmark = pytest.mark.slow  # whole runs, or what takes as long to prepare

MIB = 2**20
SMALL = Spec(limits=Limits(memory_bytes=192 * MIB, disk_bytes=32 * MIB, inodes=4000, processes=48, flood_bytes=4 * MIB))
BY_NAME = {program.name: program for program in PROGRAMS}
PYTHON = Path("/usr/bin/python3")
NO_PYTHON = "no /usr/bin/python3, in which half of the hostile programs are written"
AT_ONCE = 6
LATE_S = 40.0  # ^C, kill, going on, on a machine with other work
STATUS = {"forged_status_printed": 77, "forged_frames": 77, "typing_at_the_terminal": 77, "binary_output": 0}
MAY_KILL_ALL = {"memory", "memory_in_the_shell", "shared_memory", "disk_many_places"}  # the kernel picks what it kills
SHELL_PRELUDE = """
won() {{ echo "ESC""APED" "$@"; }}
BAIT={bait} DIRECTORY={directory} SECRET={secret}
"""


@dataclasses.dataclass
class Batch:
    """What all programs did in one back end."""

    wrong: dict[str, list[str]]
    visitors: list[str]
    changed: list[str]


@pytest.fixture(scope="module")
def host():
    made = Host()
    outsider = subprocess.Popen(["sleep", "600"])
    made.outsider = outsider.pid
    os.environ["JAXAGENT_TEST_SECRET"] = made.secret
    yield made
    assert outsider.poll() is None, "a process of the host was killed"
    outsider.kill()
    outsider.wait()
    del os.environ["JAXAGENT_TEST_SECRET"]
    made.close()


async def limit_is_active(sandbox):
    """No fork bomb without this: the number of processes must be limited, and seen to be."""
    await sandbox.run("n=0; while [ $n -lt 150 ]; do sleep 30 & n=$((n + 1)); done 2>/dev/null", 10, 100)
    counted = await sandbox.execute(["sh", "-c", "echo /proc/[0-9]*"], 10, 10_000)
    await sandbox.stop_processes()
    # Where the fresh process could not be forked, process 1 killed what held the limit: active, too.
    return len(counted.output.split()) < 100


async def install(sandbox, directory, program, host, backend):
    """Puts a Python program into the sandbox; returns the command that runs it."""
    seen = {
        "bait": str(host.bait),
        "directory": str(host.directory),
        "abstract": host.abstract_name,
        "tcp": host.tcp.getsockname()[1],
        "udp": host.udp.getsockname()[1],
        "outsider": host.outsider,
        "owner": os.getpid(),
        "memory_key": host.memory_key,
        "memory_id": host.memory_id,
        "sysctls_read_only": backend.name == "namespaces",  # elsewhere only not writable
        "terminals": 24 if backend.name == "namespaces" else 3000,
        "inotify": 8 if backend.name == "namespaces" else 200,
        "cores": int(resource.getrlimit(resource.RLIMIT_CORE)[1] != 0),
        "inodes": not any("number of files" in gap for gap in backend.missing),
    }
    await sandbox.write(f"{directory}/host.json", json.dumps(seen).encode())
    await sandbox.write(f"{directory}/prelude.py", Path(__file__).with_name("prelude.py").read_bytes())
    await sandbox.write(f"{directory}/program.py", program.text.encode())
    return f"/usr/bin/python3 {directory}/program.py"


async def one(backend, program, host, spec=SMALL):
    """Runs a program; returns what went wrong."""
    wrong, name, limit_s, text = [], program.name, program.limit_s, program.text
    begin = time.monotonic()
    async with await backend.start(spec) as sandbox:
        if name == "fork_bomb" and not await limit_is_active(sandbox):
            return ["the number of processes is not limited: not tried"]
        if program.python:
            text = await install(sandbox, "/tmp", program, host, backend)
        else:
            known = {"bait": host.bait, "directory": host.directory, "secret": host.secret}
            await sandbox.run(SHELL_PRELUDE.format(**known), 10, 100)
        try:
            result = await sandbox.run(text, limit_s, 100_000)
            if b"ESCAPED" in result.output:
                wrong.append(f"escaped: {result.output[-500:]!r}")
            if program.python and (result.exit_code in (2, 127) or b"Traceback" in result.output):
                wrong.append(f"was not run to its end: {result.output[-500:]!r}")
            if host.secret.encode() in result.output:
                wrong.append("the secret was printed")
            if len(result.output) > 100_000:
                wrong.append("the output is over its cap")
            if result.exit_code != STATUS.get(name, result.exit_code):
                wrong.append(f"status {result.exit_code}")
            # Whatever it did, the sandbox goes on.
            await sandbox.stop_processes()
            again = await sandbox.run("echo on", 30, 1000)
            fresh = await sandbox.execute(["sh", "-c", "echo on"], 30, 1000)
            if again.output != b"on\n" or fresh.output != b"on\n":
                wrong.append(f"afterwards: {again} {fresh}")
        except SandboxClosed as failure:  # a dead sandbox is contained too
            wrong += [] if name in MAY_KILL_ALL else [f"the sandbox died: {failure}"]
    if (took := time.monotonic() - begin) > limit_s + LATE_S:
        wrong.append(f"took {took:.1f} s")
    return wrong


async def all_of_them(backend, host, programs=PROGRAMS, spec=SMALL):
    gate = asyncio.Semaphore(AT_ONCE)

    async def placed(program):
        async with gate:
            return await one(backend, program, host, spec)

    before = host.listing(backend.owner.id)
    wrong = await asyncio.gather(*map(placed, programs))
    after = host.listing(backend.owner.id)
    changed = [f"{key}: {before[key]!r} -> {after[key]!r}" for key in before if before[key] != after[key]]
    return Batch(dict(zip([program.name for program in programs], wrong, strict=True)), host.visitors(), changed)


@pytest.fixture(scope="module", params=ISOLATING)
def batch(request, backends, host):
    backend = backends.backend(request.param)
    if not PYTHON.exists():
        pytest.skip(NO_PYTHON)
    return backends.run(all_of_them(backend, host), 300)


@pytest.mark.parametrize("program", BY_NAME)
def test_contained(batch, program):
    assert not batch.wrong[program]


def test_the_host_is_unchanged(batch):
    assert not batch.changed
    assert not batch.visitors


def test_there_are_enough():
    assert len(BY_NAME) == len(PROGRAMS) >= 60


# What a program that thinks it is root may try: none of it may work because of that.
AS_ROOT = (
    *("capabilities", "device_nodes", "host_file_by_its_path", "host_secrets", "kill_of_outsiders", "mounts"),
    *("nested_namespaces", "priority", "process_1_taken_apart", "programs_of_the_host", "raw_and_packet_sockets"),
    *("rare_system_calls", "read_only_mounts", "setuid_files", "sysctls", "the_way_up_from_an_open_directory"),
)


def test_root_inside_gets_no_further(backends, backend, host):
    if not PYTHON.exists():
        pytest.skip(NO_PYTHON)
    programs = [BY_NAME[name] for name in AS_ROOT]
    batch = backends.run(all_of_them(backend, host, programs, dataclasses.replace(SMALL, uid=0)), 300)
    assert {program: wrong for program, wrong in batch.wrong.items() if wrong} == {}
    assert not batch.changed and not batch.visitors


COUNTED = ("fork_bomb", "memory", "memory_in_the_shell", "processes_counted", "shared_memory", "threads_counted")


@pytest.mark.parametrize("name", ["namespaces", "bubblewrap"])
def test_limits_without_control_groups(backends, host, name):
    """As on most container hosts: the limits of each process and of the user namespace do it, and the gap is told."""
    backend = backends.backend(name, control_groups=False)
    assert "control groups cannot be made here" in backend.describe()
    if not PYTHON.exists():
        pytest.skip(NO_PYTHON)
    programs = [BY_NAME[name] for name in COUNTED]
    batch = backends.run(all_of_them(backend, host, programs), 300)
    assert {program: wrong for program, wrong in batch.wrong.items() if wrong} == {}
    assert not batch.changed


def test_the_checks_see_an_escape(backends, host):
    """The same programs without isolation do get what the others must not: the bait, the listeners, a process."""
    backend = backends.backend("plain")
    for name in (
        "host_file_by_its_path",
        *("tcp", "abstract_socket", "udp", "unix_socket"),
        *(["shared_memory_of_outsiders"] if host.memory_id >= 0 else []),
    ):
        try:
            run = unisolated if BY_NAME[name].python else one
            wrong = backends.run(run(backend, BY_NAME[name], host))
            assert any("escaped" in each for each in wrong), name
        finally:
            host.bait.write_text(host.secret)
            for left in host.directory.glob("*"):
                if left.name not in ("bait", "socket"):
                    left.unlink()
    assert set(host.visitors()) == {"tcp", "udp", "unix", "abstract"}


async def unisolated(backend, program, host):
    """Runs a program from a directory of its own, since plain processes share the host's /tmp."""
    async with await backend.start(SMALL) as sandbox:
        home = (await sandbox.run("pwd", 10, 1000)).output.decode().strip()
        command = await install(sandbox, home, program, host, backend)
        result = await sandbox.run(command, 20, 10_000)
    return ["escaped"] if b"ESCAPED" in result.output else [result.output.decode()]
