"""Who owns what on this host: a directory per run, and a lock that only a living run holds.

The lock is a file lock, so the kernel drops it however the run ends. `Owner()` first sweeps: what belongs to a run
whose lock is free (processes, cgroups, directories, containers) is removed, and empty cgroups of runs that have no lock
file at all. Mounts live in the sandboxes' own mount namespaces and go with their processes. Sweeps and starts happen
one at a time on a host, so a sweep never meets a half-made run that lives, and nothing of a dead one is left when a
start returns, whoever removed it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxagent.io.files import try_lock
from jaxagent.sandbox import cgroups
from jaxagent.sandbox.base import SandboxError

# User ids. Nobody's: neither a login's, a service's nor in a subordinate range. Layers on disk are its own.
SHARED = 1_963_000_000
PER_RUN = 1024  # sandboxes at once; more of them share `SHARED`
RUNS = 64  # at once on a host; more of them use the same ids
LAST = SHARED + PER_RUN * RUNS


def layer_owner(uid: int) -> int:
    """The owner that a sandbox's file gets in a layer on disk, so that every later sandbox can use it."""
    return SHARED if SHARED <= uid <= LAST else uid


class HostUids:
    """The host user ids of one run, one for each running sandbox.

    The kernel counts much per user, whatever namespace: inotify instances, memory of pipes, descriptors in flight,
    waiting signals, message queues. With one user for all, one sandbox could take everything.

    Args:
      taken: parts of the range that other living runs have.

    Attributes:
      part: this run's.
    """

    def __init__(self, parts_in_use: Iterable[int] = ()):
        self.part = min(set(range(RUNS)) - set(parts_in_use), default=0)
        first = SHARED + 1 + self.part * PER_RUN
        self._free = list(range(first + PER_RUN - 1, first - 1, -1))  # the last is the next; used ones are used again

    def take(self) -> int:
        """A user id that no running sandbox has, or `SHARED` where all are in use."""
        return self._free.pop() if self._free else SHARED

    def free(self, uid: int) -> None:
        """Takes a user id back, when everything of its sandbox has ended."""
        if uid != SHARED:
            self._free.append(uid)


PROCESS = "jaxagent-sandbox-"  # followed by the run's id: an argument of every outermost process
LABEL = "jaxagent.runs.workdir"  # of containers
KILL_TIMEOUT_S = 10.0
ENGINE_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 300.0  # others start in seconds, or in minutes where they sweep a large run
PLACE = Path("/tmp")  # not $TMPDIR: a start with another one (each job of a batch system) would sweep nothing


def base_directory() -> Path:
    """Where runs of this user keep their directories."""
    return PLACE / f"jaxagent-sandbox-{os.getuid()}"


def sandbox_uid() -> int:
    """The host's user id that files of layers belong to, and sandboxes without one of their own run as."""
    return SHARED if os.geteuid() == 0 else os.geteuid()


class Owner:
    """This run's id, directory and lock. Starting one removes what dead runs left."""

    def __init__(self, base: Path | None = None):
        self.base = base or base_directory()
        _private(self.base)
        self.id = secrets.token_hex(6)
        self.path = self.base / self.id
        with _one_at_a_time(self.base):
            self.swept = _sweep(self.base)
            places = {self.base, base_directory()}
            cgroups.remove_abandoned(lambda run: any((place / f"{run}.lock").exists() for place in places))
            path = self.base / f"{self.id}.lock"
            self._lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if not try_lock(self._lock):
                raise SandboxError(f"{path} is locked already")
            os.write(self._lock, f"{os.getpid()} {_start_ticks(os.getpid())}".encode())
            self.path.mkdir(mode=0o711)
            self.path.chmod(0o711)  # the sandboxes' user passes through, and cannot list
            # Written down before they are made: a run killed in between must not leave a group that nobody knows.
            self.note("cgroups", cgroups.candidates(self.id))
            self.cgroups = cgroups.Cgroups(self.id)
            parts_in_use = [int(line) for path in self.base.glob("*/uids") for line in _lines(path) if line.isdigit()]
            self.uids = HostUids(parts_in_use) if os.geteuid() == 0 else None  # another user has only one
            if self.uids is not None:
                self.note("uids", [str(self.uids.part)])

    @property
    def process_name(self) -> str:
        """An argument of every outermost process of this run, by which a sweep finds it."""
        return PROCESS + self.id

    def note(self, name: str, lines: list[str]) -> None:
        """Writes down something outside the directory that a sweep must remove: "cgroups" or "engines"; or "uids"."""
        (self.path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def close(self) -> None:
        """Removes everything of this run."""
        if self._lock >= 0:
            _remove_run(self.base, self.id)
            self.cgroups.close()
            os.close(self._lock)
            self._lock = -1


def _private(base: Path) -> None:
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o711)
        base.chmod(0o711)
    info = base.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise SandboxError(f"{base} must be a directory of this user that nobody else may write")


@contextlib.contextmanager
def _one_at_a_time(base: Path) -> Iterator[None]:
    """Waits until no other process sweeps or starts here; the kernel ends the wait if that one dies."""
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = time.monotonic() + TURN_TIMEOUT_S
    try:
        while not try_lock(fd):
            if time.monotonic() > end:
                raise SandboxError(f"another process has been starting sandboxes in {base} for {TURN_TIMEOUT_S:.0f} s")
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _sweep(base: Path) -> list[str]:
    """Removes what dead runs left; returns their ids. Runs that live are not touched."""
    swept = []
    for lock in base.glob("*.lock"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _is_dead(fd) and _remove_run(base, lock.stem):
                swept.append(lock.stem)
        finally:
            os.close(fd)
    return swept


def _is_dead(fd: int) -> bool:
    """Whether the run that this lock file is of lives no more; if so, the lock is held now.

    A child that the run had just forked has the lock too, until it becomes another program: where the run itself has
    ended, that moment is waited for.
    """
    end = time.monotonic() + KILL_TIMEOUT_S
    while not try_lock(fd):
        pid, _, start_ticks = os.pread(fd, 100, 0).decode().partition(" ")
        if not pid.isdigit() or _start_ticks(int(pid)) == start_ticks or time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _start_ticks(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" when it has ended, reaped or not."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def _remove_run(base: Path, run: str) -> bool:
    """Removes everything of a run that lives no more, or is about to end. False: the next sweep must go on."""
    directory = base / run
    none_left = _kill_processes(PROCESS + run)
    removed = [cgroups.remove_tree(Path(path)) for path in _lines(directory / "cgroups")]
    for engine in _lines(directory / "engines"):
        _remove_containers(engine, run)
    if not none_left or not all(removed):
        return False  # on a machine so busy that the kernel has not ended its processes yet
    remove_directory(directory)
    if directory.exists():
        return False
    (base / f"{run}.lock").unlink(missing_ok=True)
    return True


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _kill_processes(name: str) -> bool:
    """Outermost processes by name; each takes its pid namespace along. Waits until they are gone, or False."""
    ours, end = {os.getuid(), sandbox_uid()}, time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < end:
        any_alive = False
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if name.encode() not in Path(entry.path, "cmdline").read_bytes().split(b"\0"):
                    continue
                state = Path(entry.path, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
                owner = int(Path(entry.path, "status").read_text(encoding="utf-8").partition("Uid:")[2].split()[0])
                if state != "Z" and layer_owner(owner) in ours:
                    any_alive = True
                    os.kill(int(entry.name), signal.SIGKILL)
        if not any_alive:
            return True
        time.sleep(0.01)
    return False


def _remove_containers(engine: str, run: str) -> None:
    """Removes the run's containers. `engine` is the command of docker or podman, its words separated by tabs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            [*engine.split("\t"), "ps", "-aq", "--filter", f"label={LABEL}={run}"],
            capture_output=True,
            timeout=ENGINE_TIMEOUT_S,
        )
        if names := listed.stdout.decode().split():
            subprocess.run([*engine.split("\t"), "rm", "-f", *names], capture_output=True, timeout=ENGINE_TIMEOUT_S)


def remove_directory(directory: Path) -> None:
    """Deletes a directory, also where somebody made directories below it that nobody may enter."""
    if not directory.is_dir():
        return
    directory.chmod(0o700)
    for top, folders, _ in os.walk(directory):  # from above, so that what it opens it then enters
        for name in folders:
            if not os.path.islink(path := os.path.join(top, name)):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(directory, ignore_errors=True)
