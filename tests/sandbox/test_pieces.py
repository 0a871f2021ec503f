"""The pieces without a sandbox: the filter, control groups' paths and settings, quoting, the program inside."""

import asyncio
import errno
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import threading
import types
from pathlib import Path

import pytest

from jaxagent.sandbox import cgroups, connection, namespaces, owner, seccomp, snapshot, wire
from jaxagent.sandbox.base import Limits, SandboxClosed, SandboxError
from jaxagent.sandbox.owner import Owner

ALLOW = 0x7FFF0000


def verdict(program, number, argument=0, arch=None, machine="x86_64", second=0, third=0):
    """What a kernel would answer: an interpreter of classic BPF over struct seccomp_data."""
    arch = seccomp.AUDIT[machine] if arch is None else arch
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, argument & (2**64 - 1), second, third, 0, 0, 0)
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
        assert [f for f in range(64) if ask(call, f) == ALLOW] == [1, 2, 10]
        assert [p for p in range(300) if verdict(program, call, 2, None, machine, 1, p) == ALLOW] == [0, 6, 17]
        assert verdict(program, call, 10, None, machine, 1, 132) == error(errno.EPROTONOSUPPORT)  # SCTP
        assert ask(call, 16) == ask(call, 40) == error(errno.EAFNOSUPPORT)
    assert ask(read, arch=0x40000003) == error(errno.ENOSYS)  # 32-bit calls
    assert ask(0x40000000 | read) == error(errno.ENOSYS)  # x32
    for number in (467, 500, 0x3FFFFFFF, 0xFFFFFFFF):  # newer than the list of calls
        assert ask(number) == error(errno.ENOSYS)
    refused = sum(ask(n) != ALLOW for n in range(467))
    tables = {**seccomp.REFUSED, **seccomp.ABSENT, **seccomp.TRACING}
    sockets = 3  # of family 0, and option 0
    assert refused == sum(n[list(seccomp.AUDIT).index(machine)] >= 0 for n in tables.values()) + sockets
    prlimit64, ptrace = {"x86_64": (302, 101), "aarch64": (261, 117)}[machine]
    assert ask(prlimit64, 0) == ALLOW and ask(prlimit64, 1) == error(errno.EPERM)  # of itself, of process 1
    assert ask(ptrace) == error(errno.EPERM)
    assert verdict(seccomp.program(machine, tracing=True), ptrace, 0, None, machine) == ALLOW


@pytest.mark.parametrize(
    ("machine", "setsockopt", "prctl", "call"), [("x86_64", 54, 157, 317), ("aarch64", 208, 167, 277)]
)
def test_options_of_sockets_and_no_filters(machine, setsockopt, prctl, call):
    """What programs ask for, and nothing that makes the kernel keep what it charges to nobody."""
    program = seccomp.program(machine)

    def socket_option(level, name):
        return verdict(program, setsockopt, 3, None, machine, level, name)

    absent = error(errno.ENOPROTOOPT)
    for name in (26, 50, 51, 52, 37, 65, 73, 0, 1000):  # filters, TIMESTAMPING, RESERVE_MEM
        assert socket_option(1, name) == absent
    for level, names in (
        (6, (14, 19, 31, 32, 33, 38)),
        (0, (35, 39, 41, 42, 64)),
        (41, (20, 32, 42, 46, 64)),
        (282, (1,)),
    ):
        assert [socket_option(level, name) for name in names] == [absent] * len(names)
    for level, name in ((1, 7), (1, 8), (0, 11), (41, 25)):  # buffers, errors of datagrams: as if
        assert socket_option(level, name) == error(0)
    wanted = (  # by the names of the standard library, which has them from the headers
        (1, "SO_REUSEADDR SO_KEEPALIVE SO_BROADCAST SO_LINGER SO_REUSEPORT SO_RCVTIMEO SO_SNDTIMEO SO_PASSCRED"),
        (6, "TCP_NODELAY TCP_CORK TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT TCP_USER_TIMEOUT TCP_QUICKACK TCP_MAXSEG"),
        (0, "IP_TOS IP_TTL IP_MULTICAST_TTL IP_MULTICAST_LOOP"),
        (41, "IPV6_V6ONLY IPV6_UNICAST_HOPS IPV6_RECVPKTINFO IPV6_TCLASS"),
    )
    for level, names in wanted:
        assert {socket_option(level, getattr(socket, name)) for name in names.split()} == {ALLOW}
    assert verdict(program, call, 1, None, machine) == error(errno.ENOSYS)
    asked = [option for option in range(100) if verdict(program, prctl, option, None, machine) != ALLOW]
    assert asked == [22] and verdict(program, prctl, 22, None, machine) == error(errno.EINVAL)
    assert verdict(program, prctl, 22 | 1 << 32, None, machine) == error(errno.EINVAL)  # the kernel sees 32 bits


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


def kernel_with(monkeypatch, *names):
    """Directories that are made have these files, as a kernel's control groups have."""
    mkdir = Path.mkdir

    def fill(path, *arguments, **more):
        mkdir(path, *arguments, **more)
        for name in names if path.name.startswith("jaxagent-") or path.name.isdigit() else ():
            (path / name).write_text("")

    monkeypatch.setattr(cgroups.Path, "mkdir", fill)


V2 = ("cgroup.procs", "cgroup.subtree_control", "memory.max", "memory.swap.max", "pids.max", "cpu.max")


@pytest.mark.parametrize(
    ("lacking", "controllers", "gaps"),
    [
        (None, ("memory", "pids", "cpu"), 0),
        ("cpu.max", ("memory", "pids"), 0),
        ("memory.swap.max", ("memory", "pids", "cpu"), 1),
        ("memory.max", ("pids", "cpu"), 0),
    ],
)
def test_what_a_kernel_does_not_limit_is_missing(lacking, controllers, gaps, tmp_path, monkeypatch):
    """Version 2, in ordinary files: no host with it is needed, and none is shown to work."""
    own = tmp_path / "with space" / "run.scope"
    own.mkdir(parents=True)
    for name, text in (("cgroup.controllers", "cpu io memory pids\n"), ("cgroup.subtree_control", "")):
        (own / name).write_text(text)
    texts = (f"30 22 0:26 / {tmp_path}/with\\040space rw - cgroup2 cgroup2 rw\n", "0::/run.scope\n")
    kernel_with(monkeypatch, *(name for name in V2 if name != lacking))
    assert cgroups.candidates("r1", *texts) == [str(own / "jaxagent-r1")] and not (own / "jaxagent-r1").exists()
    groups = cgroups.Cgroups("r1", *texts)
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert groups.controllers == controllers and len(groups.gaps) == gaps and all("swap" in g for g in groups.gaps)
    made = groups.make(Limits(memory_bytes=1000, disk_bytes=24, processes=10, cpus=0.5)).directories[0]
    limits = {"memory.max": "1024", "memory.swap.max": "0", "pids.max": "12", "cpu.max": "50000 100000"}
    written = {path.name: text for path in made.iterdir() if (text := path.read_text())}
    assert written == {k: v for k, v in limits.items() if k != lacking and k.split(".")[0] in controllers}
    owner = types.SimpleNamespace(cgroups=groups, path=tmp_path, process_name="p")
    said = "; ".join(namespaces.Namespaces(owner).missing)
    assert ("swap is not limited" in said) == bool(gaps)
    assert ("processor time is not shared" in said) == ("cpu" not in controllers)
    assert ("memory is limited per process" in said) == ("memory" not in controllers)


def test_groups_without_anything_to_limit_are_not_made(tmp_path, monkeypatch):
    """Version 1 has a hierarchy for each controller; one for cpu shares alone gives no quota."""
    for name in ("memory", "cpu"):
        (tmp_path / name).mkdir()
    kernel_with(monkeypatch, "cgroup.procs", "memory.limit_in_bytes", "cpu.cfs_period_us", "cpu.shares")
    mounts = "".join(f"30 22 0:26 / {tmp_path}/{c} rw - cgroup cgroup rw,{c}\n" for c in ("memory", "cpu"))
    groups = cgroups.Cgroups("r1", mounts, "2:memory:/\n1:cpu:/\n")
    assert groups.controllers == ("memory",) and len(groups.gaps) == 2
    assert [d.parent for d in groups.make(Limits()).directories] == [tmp_path / "memory" / "jaxagent-r1"]
    quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
    assert dict(cgroups.settings(Limits(cpus=0.5), {"cpu"}, 1)) == quota


def test_all_sandboxes_of_a_run_are_limited_together(tmp_path, monkeypatch, caplog):
    """To three quarters of what the host, or a group above, has; when they may take more, it is said once."""
    kernel_with(monkeypatch, *V2)
    own = tmp_path / "box" / "run.scope"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("memory pids")
    for path, name, text in (
        (own, "memory.max", "max"),
        (own.parent, "memory.max", "4000000"),
        (own, "pids.max", "80"),
    ):
        (path / name).write_text(text)
    groups = cgroups.Cgroups("r1", f"30 22 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n", "0::/box/run.scope\n")
    assert (own / "jaxagent-r1" / "memory.max").read_text() == "3000000"
    assert (own / "jaxagent-r1" / "pids.max").read_text() == "60" and groups.gaps == ()
    limits = Limits(memory_bytes=900_000, disk_bytes=100_000, processes=20)
    first, *_ = [groups.make(limits) for _ in range(3)]
    assert not caplog.records
    groups.free(first)
    groups.make(limits)
    assert not caplog.records
    groups.make(limits)
    groups.make(limits)
    (record,) = caplog.records
    assert "80 processes, and all of them have 60" in record.getMessage()


def test_what_the_host_has():
    assert cgroups.host_has("memory", Path("/none"), "memory.max") > 2**28
    assert 300 < cgroups.host_has("pids", Path("/none"), "pids.max") <= 2**22


def test_abandoned_groups(tmp_path):
    """In ordinary directories: dead, known to a sweep, alive, and of somebody else."""
    names = {n: f"jaxagent-{n * 12}" for n in "abc"}
    for name in (*names.values(), "jaxagent-owner", "jaxagent-mine"):
        (tmp_path / name / "1").mkdir(parents=True)
    alive = cgroups._lock(tmp_path / names["c"])
    texts = (f"30 22 0:26 / {tmp_path} rw - cgroup cgroup rw,pids\n", "1:pids:/\n")
    cgroups.remove_abandoned(lambda run: run == "b" * 12, *texts)
    assert sorted(os.listdir(tmp_path)) == [names["b"], names["c"], "jaxagent-mine", "jaxagent-owner"]
    assert (tmp_path / names["c"] / "1").is_dir()
    os.close(alive)
    cgroups.remove_abandoned(lambda run: run == "b" * 12, *texts)
    assert sorted(os.listdir(tmp_path)) == [names["b"], "jaxagent-mine", "jaxagent-owner"]


def test_a_group_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """By a start that looks for abandoned ones."""
    lock, removed = cgroups._lock, []

    def late(directory):
        if len(removed) < 3:
            removed.append(directory)
            directory.rmdir()
        return lock(directory)

    monkeypatch.setattr(cgroups, "_lock", late)
    fd = cgroups._make(tmp_path / "jaxagent-r1")
    assert len(removed) == 3 and os.fstat(fd).st_ino == removed[0].stat().st_ino
    os.close(fd)


MAX = "memory.max_usage_in_bytes"


@pytest.mark.parametrize(
    ("files", "counted"),
    [
        ({"memory.events": "low 0\nmax 9\noom 2\noom_kill 3\n"}, 2),
        ({"memory.events": "oom 0\noom_kill 3\n"}, 0),  # the run's own group or the host was full
        ({"memory.oom_control": "oom_kill 3", "memory.limit_in_bytes": "9000000", MAX: "8999999"}, 2),
        ({"memory.oom_control": "oom_kill 3", "memory.limit_in_bytes": "9000000", MAX: "6000000"}, 0),
        ({"memory.oom_control": "under_oom 0", "memory.limit_in_bytes": "9000000", MAX: "9000000"}, None),
        ({}, None),
    ],
)
def test_kills_for_memory(files, counted, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    directories = (tmp_path / "pids", tmp_path)
    assert cgroups.Group(Limits(), directories, before=(0, 1)).oom_kills() == counted


def test_a_group_that_is_used_again_counts_anew(tmp_path):
    """What its last sandbox used and lost is not the next one's."""
    groups, limits = cgroups.Cgroups("r1", "", ""), Limits()
    files = {"memory.oom_control": "oom_kill 3", "memory.limit_in_bytes": "9000000", MAX: "9000000"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    groups._roots["memory"] = tmp_path
    groups.free(cgroups.Group(limits, (tmp_path,)))
    group = groups.make(limits)
    assert group.directories == (tmp_path,) and group.oom_kills() == 0
    (tmp_path / "memory.oom_control").write_text("oom_kill 4")
    assert group.oom_kills() == 0  # of this one, the limit was not reached
    (tmp_path / MAX).write_text("9000000")
    assert group.oom_kills() == 1


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
    layer = Path(snapshot.save(fd, str(tmp_path / "layer"), 10**6))
    assert sorted(p.name for p in layer.iterdir()) == ["d", "dirlink", "link"]
    assert (layer / "link").is_symlink() and (layer / "dirlink").is_symlink()
    assert stat.S_IMODE((layer / "d" / "setuid").stat().st_mode) == 0o755


def test_a_file_that_becomes_a_link_meanwhile_is_not_followed(tmp_path, monkeypatch):
    """A program that still runs puts a link in a file's, or a folder's, place after its kind was looked at."""
    for folder in ("upper/d", "outside/d"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder).with_name("file").write_text("x")
    real, swap = os.stat, []

    def racing(path, *, dir_fd=None, follow_symlinks=True):
        info = real(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        if [path] == swap and dir_fd is not None and not follow_symlinks:
            os.rename(path, "away", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.symlink(tmp_path / "outside" / path, path, dir_fd=dir_fd)
        return info

    monkeypatch.setattr(snapshot.os, "stat", racing)
    for name in ("file", "d"):
        swap[:] = [name]
        with pytest.raises(SandboxError, match=r"symbolic links|Not a directory"):
            snapshot.save(os.open(tmp_path / "upper", os.O_PATH | os.O_DIRECTORY), str(tmp_path / "layer"), 10**6)
        assert sorted(os.listdir(tmp_path)) == ["outside", "upper"]


def test_a_socket_out_of_a_sandbox_gives_nothing_that_was_not_asked_for():
    """Descriptors that come with an answer are dropped unless they are wanted, and a huge frame ends the sandbox."""

    def answer(theirs, size, kind=b"D"):
        theirs.recv(100)
        sent = struct.pack("<IcI", size, kind, 1)
        socket.send_fds(theirs, [sent], [0, 0, 0])

    async def main():
        mine, theirs = socket.socketpair()
        with theirs:
            frames = connection._Frames(mine)
            for wanted in (None, [], None):
                before = len(os.listdir("/proc/self/fd"))
                answering = asyncio.create_task(asyncio.to_thread(answer, theirs, 0))
                assert await frames.ask(b"?", wanted) == ("D", 1, b"")
                await answering
                assert len(os.listdir("/proc/self/fd")) == before + (0 if wanted is None else 3)
                connection.close_all(wanted or [])
            answering = asyncio.create_task(asyncio.to_thread(answer, theirs, wire.MAX_FRAME_BYTES + 1))
            async with asyncio.timeout(10):
                with pytest.raises(SandboxClosed):
                    await frames.ask(b"?")
            await answering
            frames.close()

    asyncio.run(main())


def blocks(directory):
    return 512 * sum(os.lstat(os.path.join(top, f)).st_blocks for top, _, files in os.walk(directory) for f in files)


def test_holes_and_hard_links_are_kept(tmp_path):
    upper = tmp_path / "upper"
    (upper / "d").mkdir(parents=True)
    with open(upper / "holes", "wb") as file:
        for at in (0, 2**20, 5 * 2**20):
            file.seek(at)
            file.write(b"data")
        file.truncate(2**40)
    (upper / "d" / "one").write_bytes(b"x" * 4096)
    os.link(upper / "d" / "one", upper / "two")
    layer = Path(snapshot.save(os.open(upper, os.O_PATH | os.O_DIRECTORY), str(tmp_path / "layer"), 10**6))
    with open(layer / "holes", "rb") as file:
        for at, data in ((0, b"data\0"), (2**20, b"data\0"), (2**21, b"\0" * 5), (5 * 2**20, b"data\0")):
            assert os.pread(file.fileno(), 5, at) == data
        assert os.fstat(file.fileno()).st_size == 2**40
    assert blocks(layer) == blocks(upper) <= 10**5 and (layer / "two").read_bytes() == b"x" * 4096
    assert os.stat(layer / "two").st_ino == os.stat(layer / "d" / "one").st_ino
    assert os.stat(layer / "two").st_nlink == 2 and sorted(os.listdir(tmp_path)) == ["layer", "upper"]


def test_a_copy_is_bounded(tmp_path):
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "file").write_bytes(b"x" * 5000)
    (tmp_path / "upper" / "other").write_bytes(b"x" * 5000)
    stop = threading.Event()
    stop.set()
    for most, event, said in ((9999, None, "more than 9999 bytes"), (10_000, stop, "nobody waits")):
        fd = os.open(tmp_path / "upper", os.O_PATH | os.O_DIRECTORY)
        with pytest.raises(SandboxError, match=said):
            snapshot.save(fd, str(tmp_path / "layer"), most, event)
        assert os.listdir(tmp_path) == ["upper"]
    snapshot.save(os.open(tmp_path / "upper", os.O_PATH | os.O_DIRECTORY), str(tmp_path / "layer"), 10_000)


def test_an_owners_directory_must_be_its_own(tmp_path):
    shared = tmp_path / "base"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(SandboxError):
        Owner(shared)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SandboxError):
        Owner(tmp_path / "link")


def test_host_user_ids():
    first, second = owner.HostUids(), owner.HostUids([0, 2])
    assert (first.part, second.part, owner.HostUids(range(owner.RUNS)).part) == (0, 1, 0)
    mine, others = ([made.take() for _ in range(owner.PER_RUN)] for made in (first, second))
    assert len({*mine, *others}) == 2 * owner.PER_RUN and min(mine) > owner.SHARED and max(others) <= owner.LAST
    assert first.take() == first.take() == owner.SHARED  # more at once than there are ids
    first.free(owner.SHARED)
    first.free(mine[5])
    assert (first.take(), first.take()) == (mine[5], owner.SHARED)
    assert [owner.layer_owner(uid) for uid in (0, 1000, mine[0], owner.LAST, owner.LAST + 1)] == [
        *(0, 1000, owner.SHARED, owner.SHARED, owner.LAST + 1)
    ]


def test_a_group_that_another_run_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    """Two runs that start at once sweep the same dead run: a folder may go between its listing and its reading."""
    (tmp_path / "run/gone/inner").mkdir(parents=True)
    (tmp_path / "run/there").mkdir()
    scandir = os.scandir

    def racing(path="."):
        if not isinstance(path, int) and Path(path).name == "gone":
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", racing)
    assert cgroups.remove_tree(tmp_path / "run") and not (tmp_path / "run").exists()
