"""The host as hostile programs must leave it: bait, listeners, and a listing to compare before and after."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import tempfile
from pathlib import Path

from jaxagent.sandbox.owner import base_directory

_LIBC = ctypes.CDLL(None)
SYSCTLS = ("kernel/core_pattern", "kernel/hostname", "vm/overcommit_memory", "net/ipv4/ip_forward", "kernel/pid_max")


class Host:
    """Bait that the sandboxes' user could reach if it could see it, sockets that count who comes, shared memory."""

    def __init__(self):
        self.secret = secrets.token_hex(16)
        self.directory = Path(tempfile.mkdtemp(prefix="jaxagent-bait-"))
        self.directory.chmod(0o777)
        self.bait = self.directory / "bait"
        self.bait.write_text(self.secret)
        self.bait.chmod(0o666)
        self.tcp = socket.create_server(("0.0.0.0", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("0.0.0.0", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(self.directory / "socket"))
        os.chmod(self.directory / "socket", 0o777)
        self.abstract_name = f"jaxagent-{self.secret}"
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind("\0" + self.abstract_name)
        for listener in (self.unix, self.abstract):
            listener.listen()
        for listener in (self.tcp, self.udp, self.unix, self.abstract):
            listener.setblocking(False)
        self.memory_key = secrets.randbits(30) + 1
        self.memory_id = _LIBC.shmget(self.memory_key, 4096, 0o1666)  # IPC_CREAT, for everybody; -1 where there is none

    def visitors(self) -> list[str]:
        """Listeners that something reached."""
        found = []
        for name in ("tcp", "unix", "abstract"):
            with contextlib.suppress(BlockingIOError):
                getattr(self, name).accept()[0].close()
                found.append(name)
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(1)
            found.append("udp")
        return found

    def listing(self, run: str) -> dict[str, object]:
        """What must be the same before and after; of processes, those of the run."""
        seen: dict[str, object] = {"bait": self.bait.read_text(), "beside it": sorted(os.listdir(self.directory))}
        seen["mode"] = oct(self.bait.stat().st_mode)
        seen["mounts"] = Path("/proc/self/mountinfo").read_text()
        for name in SYSCTLS:
            with contextlib.suppress(OSError):
                seen[name] = Path("/proc/sys", name).read_text()
        for directory in ("/", "/etc", "/usr", "/usr/bin", "/dev"):
            seen[directory] = sorted(set(os.listdir(directory)) - {"core"})
        for name in ("/etc/passwd", "/etc/hosts", "/bin/sh"):
            info = os.stat(name)
            seen[name] = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ino)
        seen["processes"] = processes(run)
        return seen

    def close(self) -> None:
        """Removes the bait."""
        for listener in (self.tcp, self.udp, self.unix, self.abstract):
            listener.close()
        _LIBC.shmctl(self.memory_id, 0, None)  # IPC_RMID
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()


def pids(run: str) -> list[int]:
    """A run's processes that live, seen from the host: by their name or by their control group."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = Path(entry.path, "cmdline").read_bytes().decode(errors="replace")
                mine = f"jaxagent-sandbox-{run}" in line or f"jaxagent-{run}" in Path(entry.path, "cgroup").read_text()
                if mine and Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
    return sorted(found)


def processes(run: str) -> list[str]:
    """Their command lines."""
    found = []
    for pid in pids(run):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
    return sorted(found)


def leftovers(run: str, base: Path | None = None) -> list[str]:
    """What is left on the host of a run: processes, mounts, control groups wherever they are, directories."""
    found = processes(run)
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if run in line]
    found += [str(p) for p in (base or base_directory()).glob(f"*{run}*")]
    for top, folders, _ in os.walk("/sys/fs/cgroup"):
        found += [os.path.join(top, name) for name in folders if run in name]
    return found
