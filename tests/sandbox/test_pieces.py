"""The pieces without a sandbox: the filter, control groups' paths and settings, quoting, the compiled helper."""

import errno
import os
import random
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from jaxagent.sandbox import cgroups, helper, seccomp, snapshot, wire
from jaxagent.sandbox.base import Limits, SandboxError
from jaxagent.sandbox.owner import Owner

ALLOW = 0x7FFF0000


def verdict(program, number, argument=0, arch=None, machine="x86_64"):
    """What a kernel would answer: an interpreter of classic BPF over struct seccomp_data."""
    arch = seccomp.AUDIT[machine] if arch is None else arch
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, argument & (2**64 - 1), 0, 0, 0, 0, 0)
    at = accumulator = 0
    lines = list(struct.iter_unpack("<HBBI", program))
    while True:
        operation, yes, no, constant = lines[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x06:
            return constant
        else:
            true = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
            at += yes if true[operation] else no


def error(number):
    return 0x00050000 | number


@pytest.mark.parametrize(
    ("machine", "clone", "unshare", "socket", "mount", "read"),
    [("x86_64", 56, 272, 41, 165, 0), ("aarch64", 220, 97, 198, 40, 63)],  # from the kernel's unistd headers
)
def test_the_filter(machine, clone, unshare, socket, mount, read):
    program = seccomp.program(machine)
    assert len(program) % 8 == 0 and len(program) // 8 < 4096

    def ask(number, argument=0, arch=None):
        return verdict(program, number, argument, arch, machine)

    assert ask(read) == ALLOW
    for number in (unshare, mount, 425, 430):
        assert ask(number) == error(errno.EPERM)
    assert ask(clone, 17) == ALLOW and ask(clone, 0x3D0F00) == ALLOW  # fork and pthread_create
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(clone, flag | 17) == error(errno.EPERM)
    assert ask(435) == error(errno.ENOSYS)  # clone3
    for call in (socket, socket + (12 if machine == "x86_64" else 1)):  # and socketpair
        assert [f for f in range(64) if ask(call, f) == ALLOW] == [1, 2, 10, 16]
        assert ask(call, 40) == error(errno.EAFNOSUPPORT)
    assert ask(read, arch=0x40000003) == error(errno.ENOSYS)  # 32-bit calls
    assert ask(0x40000000 | read) == error(errno.ENOSYS)  # x32
    refused = sum(ask(n) != ALLOW for n in range(500))
    assert refused == sum(n[list(seccomp.AUDIT).index(machine)] >= 0 for n in seccomp.REFUSED.values()) + 2 + 1 + 2
    prlimit64, ptrace = {"x86_64": (302, 101), "aarch64": (261, 117)}[machine]
    assert ask(prlimit64, 0) == ALLOW and ask(prlimit64, 1) == error(errno.EPERM)  # of itself, of process 1
    assert ask(ptrace) == error(errno.EPERM)
    assert verdict(seccomp.program(machine, tracing=True), ptrace, 0, None, machine) == ALLOW


def test_no_filter_for_an_unknown_processor():
    assert seccomp.program("vax") == b""


V1 = """22 1 0:5 / / rw - ext4 /dev/vda rw
30 22 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 22 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 22 0:28 /docker/abc /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
33 22 0:29 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
"""


def test_own_groups_of_version_1():
    membership = "5:pids:/docker/abc/x\n4:memory:/a\\b\n3:cpuacct,cpu:/\n1:name=systemd:/\n0::/\n"
    found = cgroups.own_groups(V1, membership)
    assert found == [
        (1, {"memory"}, Path("/sys/fs/cgroup/memory/a\\b")),
        (1, {"cpu"}, Path("/sys/fs/cgroup/cpu,cpuacct")),
        (1, {"pids"}, Path("/sys/fs/cgroup/pids/x")),
    ]


def test_version_2_is_switched_on_and_used(tmp_path):
    """The paths and values, in ordinary files: no host with version 2 is needed, and none is shown to work."""
    own = tmp_path / "with space" / "run.scope"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu io memory pids\n")
    (own / "cgroup.subtree_control").write_text("")
    (own / "cgroup.procs").write_text("")
    mount = str(tmp_path).replace(" ", "\\040") + "/with\\040space"
    texts = (f"30 22 0:26 / {mount} rw - cgroup2 cgroup2 rw\n", "0::/run.scope\n")
    assert cgroups.candidates("r1", *texts) == [str(own / "jaxagent-r1")] and not (own / "jaxagent-r1").exists()
    groups = cgroups.Cgroups("r1", *texts)
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert groups.controllers == ("memory", "pids", "cpu") and (own / "jaxagent-r1").is_dir()


def test_settings():
    limits = Limits(memory_bytes=1000, disk_bytes=24, processes=10, cpus=0.5)
    assert dict(cgroups.settings(limits, {"memory", "pids", "cpu"}, 2)) == {
        "memory.max": "1024",
        "memory.swap.max": "0",
        "pids.max": "12",
        "cpu.max": "50000 100000",
    }
    assert dict(cgroups.settings(limits, {"pids", "cpu"}, 1)) == {
        "pids.max": "12",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
    }


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_command_is_one_word_of_any_shell(shell):
    draw = random.Random(0)
    letters = "ab '\"\\$`!*?~#&;|<>(){}[]\n\t\r\x01\x03\x04\x1a\x7fé€%0"
    for _ in range(40):
        command = "".join(draw.choice(letters) for _ in range(draw.randrange(30))) + "x"
        script = b"printf %s " + wire.shell_word(command)
        said = subprocess.run([shell, "-c", script], capture_output=True)
        assert said.stdout == command.encode(), command
        assert b"\x03" not in wire.shell_word(command)
    assert wire.shell_word("a\0b") == wire.shell_word("ab")


@pytest.mark.parametrize("data", [b"", b"\0" * 5, b"f" + b"\0" * 10, b"q" + b"\0" * 14])
def test_malformed_answers_are_errors(data):
    if len(data) < wire.DONE.size:
        with pytest.raises(SandboxError):
            wire.parse_result(data, 0.0)
    if data:
        with pytest.raises(SandboxError):
            wire.parse_entries(data)


def test_the_helper_is_compiled_once_and_can_be_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = helper.helper.__wrapped__  # without what an earlier call found
    with monkeypatch.context() as without:
        without.setattr(shutil, "which", lambda name: None)
        assert find() is None
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    made = find()
    assert made.parent == tmp_path / "jaxagent" and os.access(made, os.X_OK)
    monkeypatch.setattr(subprocess, "run", None)  # not compiled again
    assert find() == made and len(list(made.parent.iterdir())) == 1


def test_a_hostile_tree_is_copied_and_not_followed(tmp_path):
    upper = tmp_path / "upper"
    (upper / "d").mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    (upper / "link").symlink_to(secret)
    (upper / "dirlink").symlink_to(tmp_path)
    (upper / "d" / "setuid").write_text("x")
    (upper / "d" / "setuid").chmod(0o6755)
    os.mkfifo(upper / "pipe")
    fd = os.open(upper, os.O_PATH | os.O_DIRECTORY)
    layer = Path(snapshot.save(fd, str(tmp_path / "layer")))
    assert sorted(p.name for p in layer.iterdir()) == ["d", "dirlink", "link"]
    assert (layer / "link").is_symlink() and (layer / "dirlink").is_symlink()
    assert stat.S_IMODE((layer / "d" / "setuid").stat().st_mode) == 0o755


def test_an_owners_directory_must_be_its_own(tmp_path):
    shared = tmp_path / "base"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(SandboxError):
        Owner(shared)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SandboxError):
        Owner(tmp_path / "link")


def test_runs_are_swept_by_their_lock(tmp_path):
    base = tmp_path / "base"
    alive, dead = Owner(base), Owner(base)
    assert dead.swept == []
    (dead.path / "file").write_text("x")
    (dead.path / "closed").mkdir(mode=0)
    os.close(dead._lock)  # what the kernel does when the process ends
    third = Owner(base)
    assert third.swept == [dead.id] and alive.path.is_dir() and not dead.path.exists()
    dead._lock = -1
    alive.close()
    third.close()
    assert list(base.iterdir()) == []
