"""Control groups, version 2 or 1, where this process may make them: memory, processes, cpu time.

Groups are made below this process's own group, so that limits it lives under go on to hold. A group whose sandbox has
ended is used again for the next one with the same limits, since making one is a third of a start. A living run holds a
file lock on its groups' directories.

Files in memory belong to no process, so on a full host the kernel would kill the trainer. Instead the group of the
whole run has three quarters of the host's memory and process ids; beyond that, processes of sandboxes end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from jaxagent.io.files import try_lock
from jaxagent.sandbox.base import Limits

logger = logging.getLogger(__name__)
CONTROLLERS = ("memory", "pids", "cpu")
SHARE = 0.75  # of the host, for the run; the rest is the trainer's and the host's own
UNITS = {"memory": (2**30, "GiB of memory and disk"), "pids": (1, "processes")}
PERIOD_US = 100_000
REMOVE_TIMEOUT_S = 20.0
MAKE_TRIES = 1000
MAX_USAGE = "memory.max_usage_in_bytes"
NEARLY_BYTES = 2 * 2**20  # of the limit: what cannot be charged any more is larger than a page
SWAP = ("memory.memsw.limit_in_bytes", "memory.swap.max")  # swap accounting may not be compiled in, or switched off
SOCKETS = "memory.kmem.tcp.limit_in_bytes"  # TCP and UDP; version 2 counts them as memory, version 1 only by themselves
SOCKET_BYTES = 16 * 2**20
OPTIONAL = (*SWAP, SOCKETS)
RUN_FILES = {  # version: controller: files; the second is missing where swap is not accounted for
    1: {"memory": ("memory.limit_in_bytes", SWAP[0]), "pids": ("pids.max",)},
    2: {"memory": ("memory.max",), "pids": ("pids.max",)},
}
RUN_DIRECTORY = re.compile(r"jaxagent-([0-9a-f]{12})")


@dataclasses.dataclass(frozen=True)
class Group:
    """One sandbox's groups: one directory in version 2, one for each controller in version 1."""

    limits: Limits
    directories: tuple[Path, ...]
    before: tuple[int, int] = (0, 0)  # what `_memory_events` counted of the sandboxes that had the group earlier

    def oom_kills(self) -> int | None:
        """Processes killed because the group reached its limit; None where nobody counts.

        Where the group did not, but the run's own group or the host had no memory left, the kills are not its doing: 0.
        """
        now = _memory_events(self.directories)
        if now is None:
            return None
        reached, killed = (count - old for count, old in zip(now, self.before, strict=True))
        return killed if reached > 0 else 0

    def procs(self) -> list[str]:
        """Files to which a process writes "0" to enter."""
        return [str(d / "cgroup.procs") for d in self.directories]


class Cgroups:
    """What can be made here, and the groups made so far.

    Args:
      run: the run's id.
      mountinfo, membership: texts of /proc/self/mountinfo and /proc/self/cgroup.

    Attributes:
      gaps: in words, what the controllers that work here do not limit.
      most: bytes or processes of all sandboxes of the run together, by controller.
    """

    def __init__(self, run: str, mountinfo: str | None = None, membership: str | None = None):
        self._roots: dict[str, Path] = {}  # controller: this run's directory
        self._version = 0
        self._free: list[Group] = []
        self._last_number = 0
        self._locks: list[int] = []
        self.gaps: tuple[str, ...] = ()
        self.most: dict[str, int] = {}
        self._sums = dict.fromkeys(UNITS, 0)  # what the running sandboxes may take by their own limits
        self._has_warned = False
        for version, controllers, directory in own_groups(mountinfo, membership):
            mine = _run_directory(directory, run)
            usable, lock = _usable(mine, controllers, version)
            if usable:
                self._version = version
                self._roots.update(dict.fromkeys(usable, mine))
                self._locks.append(lock)
                self.gaps += self._bound(directory, mine, usable, version)
                if "memory" in usable and not any((mine / name).exists() for name in SWAP):
                    self.gaps += ("swap is not limited (control groups do not account for it here)",)
                if "memory" in usable and version == 1 and not (mine / SOCKETS).exists():
                    self.gaps += ("what sockets hold is not limited (control groups do not account for it here)",)
                if version == 2:
                    break

    @property
    def controllers(self) -> tuple[str, ...]:
        """Those of `CONTROLLERS` that work here."""
        return tuple(c for c in CONTROLLERS if c in self._roots)

    def make(self, limits: Limits) -> Group | None:
        """A group with these limits; None where no controller works.

        Raises:
          OSError: a group that could be made at start cannot be made now.
        """
        if not self._roots:
            return None
        group = self._make(limits)
        self._count(limits, 1)
        return group

    def _make(self, limits: Limits) -> Group:
        for i, group in enumerate(self._free):
            if group.limits == limits:
                del self._free[i]
                for directory in group.directories:
                    if (directory / MAX_USAGE).exists():
                        (directory / MAX_USAGE).write_text("0", encoding="utf-8")
                return dataclasses.replace(group, before=_memory_events(group.directories) or (0, 0))
        self._last_number += 1
        directories = []
        try:
            for root in sorted(set(self._roots.values())):
                directory = root / str(self._last_number)
                directory.mkdir()
                directories.append(directory)
                mine = {c for c, r in self._roots.items() if r == root}
                for name, value in settings(limits, mine, self._version):
                    if name not in OPTIONAL or (directory / name).exists():
                        (directory / name).write_text(value, encoding="utf-8")
        except OSError:  # a number that the kernel does not take
            for directory in directories:
                directory.rmdir()
            raise
        return Group(limits, tuple(directories))

    def free(self, group: Group) -> None:
        """Takes back a group whose sandbox has ended; what is still inside is killed."""
        self._count(group.limits, -1)
        if any(_pids(directory) for directory in group.directories):
            for directory in group.directories:
                remove_tree(directory)
        else:
            self._free.append(group)

    def _bound(self, own: Path, group: Path, controllers: set[str], version: int) -> tuple[str, ...]:
        """Limits the run's group, which is below this process's own; returns what cannot be limited, in words."""
        for controller in sorted(controllers & RUN_FILES[version].keys()):
            name, *more = RUN_FILES[version][controller]
            most = int(host_has(controller, own, name) * SHARE)
            try:
                for path in (group / name, *(group / other for other in more if (group / other).exists())):
                    path.write_text(str(most), encoding="utf-8")
            except OSError as failure:
                return (f"the sandboxes together are not limited ({controller}: {failure.strerror})",)
            self.most[controller] = most
        return ()

    def _count(self, limits: Limits, sign: int) -> None:
        """A sandbox starts (1) or has ended (-1). Says once when they may take more than there is."""
        self._sums["memory"] += sign * (limits.memory_bytes + limits.disk_bytes)
        self._sums["pids"] += sign * limits.processes
        over = [name for name, most in self.most.items() if self._sums[name] > most]
        if not over or self._has_warned:
            return
        self._has_warned = True
        words = []
        for name in over:
            unit, noun = UNITS[name]
            words.append(f"{self._sums[name] / unit:.4g} {noun}, and all of them have {self.most[name] / unit:.4g}")
        logger.warning(
            "the limits of the sandboxes that run now add up to %s: where that is used up, the kernel ends processes "
            "of any of them. Lower each one's limits, or start fewer at once.",
            "; ".join(words),
        )

    def close(self) -> None:
        """Removes all groups of this run."""
        for root in set(self._roots.values()):
            remove_tree(root)
        self._roots.clear()
        while self._locks:
            os.close(self._locks.pop())


def host_has(controller: str, own: Path, name: str) -> int:
    """Bytes of memory, or processes, that this process's own group and those above it leave of the host's."""
    if controller == "memory":
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        most = min(int(Path("/proc/sys/kernel", limit).read_bytes()) for limit in ("pid_max", "threads-max"))
    for directory in (own, *own.parents):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            most = min(most, int((directory / name).read_text(encoding="utf-8")))
    return most


def candidates(run: str, *texts: str) -> list[str]:
    """The directories that `Cgroups` of this run may make here: what a sweep must look for."""
    return sorted({str(_run_directory(directory, run)) for _, _, directory in own_groups(*texts)})


def remove_abandoned(has_lock_file: Callable[[str], bool], *texts: str) -> None:
    """Removes empty groups of runs that live no more, and that no sweep will find, below this process's own groups.

    Args:
      has_lock_file: whether the run of this id has a lock file, so that sweeps look after it.
    """
    for _, _, directory in own_groups(*texts):
        for root in directory.glob("jaxagent-*"):
            name = RUN_DIRECTORY.fullmatch(root.name)
            if name is None or has_lock_file(name[1]):
                continue
            with contextlib.suppress(OSError):  # alive, or gone in between
                lock = _lock(root)
                try:
                    groups = below(root)
                    if not any(_pids(path) for path in groups):
                        for path in groups:
                            path.rmdir()  # which the kernel refuses where a process is inside
                finally:
                    os.close(lock)


def _lock(directory: Path) -> int:
    """Locks a directory and returns its descriptor. Raises OSError where another process has the lock."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(fd):
            raise BlockingIOError(f"{directory} is locked")
    except OSError:
        os.close(fd)
        raise
    return fd


def settings(limits: Limits, controllers: set[str], version: int) -> list[tuple[str, str]]:
    """Files and their values. Files on the sandbox's tmpfs are charged to its memory, so the two add up."""
    memory = str(limits.memory_bytes + limits.disk_bytes)
    quota = str(max(1000, int(limits.cpus * PERIOD_US)))
    processes = str(limits.processes + 2)  # process 1 and the one outside
    files = {
        1: {
            "memory": {
                "memory.limit_in_bytes": memory,
                "memory.memsw.limit_in_bytes": memory,
                SOCKETS: str(SOCKET_BYTES),
            },
            "pids": {"pids.max": processes},
            "cpu": {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota},
        },
        2: {
            "memory": {"memory.max": memory, SWAP[1]: "0"},
            "pids": {"pids.max": processes},
            "cpu": {"cpu.max": f"{quota} {PERIOD_US}"},
        },
    }
    return [pair for c in CONTROLLERS if c in controllers for pair in files[version][c].items()]


def own_groups(mountinfo: str | None = None, membership: str | None = None) -> list[tuple[int, set[str], Path]]:
    """(version, controllers, directory) of the groups that this process is in, as the file system shows them."""
    mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8") if mountinfo is None else mountinfo
    membership = Path("/proc/self/cgroup").read_text(encoding="utf-8") if membership is None else membership
    paths = {}  # controllers of a hierarchy ("" for version 2) -> path of this process's group
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        paths[names] = path
    entries = []
    for line in mountinfo.splitlines():
        mount_fields, _, type_fields = line.partition(" - ")
        kind, _, options = type_fields.split(" ", 2)
        root, mount = (
            re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), field) for field in mount_fields.split(" ")[3:5]
        )
        if kind == "cgroup2" and "" in paths:
            directory = _below(mount, root, paths[""])
            listed = directory / "cgroup.controllers"
            controllers = set(listed.read_text(encoding="utf-8").split()) if listed.exists() else set()
            entries.append((2, controllers & set(CONTROLLERS), directory))
        elif kind == "cgroup":
            for names, path in paths.items():
                if names and set(names.split(",")) <= set(options.split(",")):
                    entries.append((1, set(names.split(",")) & set(CONTROLLERS), _below(mount, root, path)))
    return [entry for entry in entries if entry[1]]


def _run_directory(directory: Path, run: str) -> Path:
    return directory / f"jaxagent-{run}"


def _below(mount: str, root: str, path: str) -> Path:
    if path == root or path.startswith(root.rstrip("/") + "/"):
        return Path(mount) / path[len(root.rstrip("/")) :].lstrip("/")
    return Path(mount)


def _usable(mine: Path, controllers: set[str], version: int) -> tuple[set[str], int]:
    """Makes the run's directory; returns the controllers that work in it, with all that they need, and its lock.

    Where none does, nothing is left of it and there is no lock (-1).
    """
    lock = -1
    try:
        if version == 2:
            _enable(mine.parent, controllers)
        lock = _make(mine)
        if version == 2:
            _enable(mine, controllers)
        usable = {c for c in controllers if all((mine / name).exists() for name in _files(c, version))}
    except OSError:
        usable = set()
    if not usable:
        with contextlib.suppress(OSError):
            mine.rmdir()
        if lock >= 0:
            os.close(lock)
            lock = -1
    return usable, lock


def _make(mine: Path) -> int:
    """Makes and locks the run's directory. Raises OSError."""
    for _ in range(MAKE_TRIES):
        mine.mkdir(exist_ok=True)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _lock(mine)
            if mine.is_dir():
                return lock
            os.close(lock)
        time.sleep(0.001)  # a start in another place took it for abandoned, in the moment before the lock
    raise OSError(f"{mine} is removed again and again")


def _files(controller: str, version: int) -> list[str]:
    """What a controller needs to limit anything: cpu quotas, for one, may not be compiled in."""
    return [name for name, _ in settings(Limits(), {controller}, version) if name not in OPTIONAL]


def _enable(directory: Path, controllers: set[str]) -> None:
    switch, on = directory / "cgroup.subtree_control", " ".join(f"+{c}" for c in sorted(controllers))
    try:
        switch.write_text(on, encoding="utf-8")
    except OSError:
        # A group with processes has no controlled children. Where only this process is inside (a delegated scope),
        # it moves one level down first.
        if _pids(directory) != [os.getpid()]:
            raise
        leaf = directory / "jaxagent-owner"
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        switch.write_text(on, encoding="utf-8")


def _memory_events(directories: tuple[Path, ...]) -> tuple[int, int] | None:
    """(how often the group's own limit was reached, processes killed for memory), since the directories were made.

    Version 1 counts no limit that was reached (its `failcnt` stays 0 on current kernels), but has the largest use since
    that was set back: 1 when it came to the limit.
    """
    for directory in directories:
        with contextlib.suppress(OSError, KeyError, ValueError):
            if (directory / "memory.events").exists():
                events = _numbers(directory / "memory.events")
                return events["oom"], events["oom_kill"]
            killed = _numbers(directory / "memory.oom_control")["oom_kill"]
            limit, most = (int((directory / name).read_bytes()) for name in ("memory.limit_in_bytes", MAX_USAGE))
            return int(most + NEARLY_BYTES >= limit), killed
    return None


def _numbers(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: int(value) for name, value in map(str.split, lines)}


def _pids(directory: Path) -> list[int]:
    try:
        pids = [int(word) for word in (directory / "cgroup.procs").read_text(encoding="utf-8").split()]
    except OSError:
        return []
    return [pid for pid in pids if pid > 0]  # 0 stands for one of another pid namespace; to kill(2) it is oneself


def below(root: Path) -> list[Path]:
    """A group and those in it, the deepest first; what goes while they are listed is left out."""
    return [Path(directory) for directory, _, _ in os.walk(root, topdown=False)]


def remove_tree(root: Path) -> bool:
    """Kills what is inside a group and its children, and removes them. False: something is still there."""
    end = time.monotonic() + REMOVE_TIMEOUT_S
    while root.is_dir():
        # Listed anew in every round, the deepest first: a start that was under way may still add a group, and another
        # run that starts may be removing the same ones.
        for directory in below(root):
            for pid in _pids(directory):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # the last process is still on its way out
                directory.rmdir()
        if time.monotonic() > end:
            break
        if root.exists():
            time.sleep(0.005)
    return not root.exists()
