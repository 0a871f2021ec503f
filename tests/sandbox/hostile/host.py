"""The host as hostile programs must leave it: bait, listeners, and a listing to compare before and after."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from pathlib import Path

from jaxagent.sandbox.owner import base_directory

SYSCTLS = ("kernel/core_pattern", "kernel/hostname", "vm/overcommit_memory", "net/ipv4/ip_forward", "kernel/pid_max")


class Host:
    """Bait that the sandboxes' user could reach if it could see it, and sockets that count who comes."""

    def __init__(self):
        self.secret = secrets.token_hex(16)
        self.directory = Path(tempfile.mkdtemp(prefix="jaxagent-bait-"))
        self.directory.chmod(0o777)
        self.bait = self.directory / "bait"
        self.bait.write_text(self.secret)
        self.bait.chmod(0o666)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
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
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()


def processes(run: str) -> list[str]:
    """Command lines of a run's processes, seen from the host: by their name or by their control group."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = Path(entry.path, "cmdline").read_bytes().decode(errors="replace")
                if f"jaxagent-sandbox-{run}" in line or f"jaxagent-{run}" in Path(entry.path, "cgroup").read_text():
                    found.append(line)
    return sorted(found)


def leftovers(run: str) -> list[str]:
    """What is left on the host of a run: processes, mounts, cgroups, directories."""
    found = processes(run)
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if run in line]
    found += [str(p) for p in base_directory().glob(f"*{run}*")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        path = line.split(":", 2)[2].lstrip("/")
        for mount in Path("/sys/fs/cgroup").iterdir() if Path("/sys/fs/cgroup").is_dir() else ():
            if (mount / path / f"jaxagent-{run}").exists():
                found.append(str(mount / path / f"jaxagent-{run}"))
    return found
