"""One process that a supervisor starts: in a process group of its own, with a log, and ended with all that it began.

It does not outlive the supervisor, however that ends: where the system has a parent-death signal, the process gets
SIGKILL then. No threads, so that forking is safe; output that is shown passes through `pump`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

from jaxagent.fleet import vitals
from jaxagent.fleet.vitals import Sign

LOGS = "logs"
VITALS, STACKS = "JAXAGENT_VITALS", "JAXAGENT_STACKS"  # where a process writes its signs, and its stacks when asked
STATES = {"R": "runs", "S": "waits", "D": "waits for a disk or a device", "T": "is stopped", "Z": "has ended"}
LEAST_FREE = 1 << 20  # bytes: with less a disk counts as full
KILL_S = 30.0  # for the system to end a process that got SIGKILL
_PDEATHSIG = 1  # of prctl
_READ = 1 << 16  # bytes
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclasses.dataclass(frozen=True)
class Program:
    """What to start."""

    name: str  # of its log, and in messages
    command: tuple[str, ...]
    on_console: bool = False  # its output goes to the console, too
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of it alone
    watched: bool = True  # by its signs of life; else somebody nearer to it does that
    log: pathlib.Path | None = None  # default: logs/NAME.log


class Child:
    """A process that runs, or has ended.

    Args:
      folder: for logs and signs of life.
      environment: beside this process's own.
      start_s: its budget until its first sign of life.
    """

    def __init__(self, program: Program, folder: pathlib.Path, environment: Mapping[str, str], start_s: float):
        self.program = program
        self.started = time.monotonic()
        self._start_s = start_s
        self._signs = folder / vitals.FOLDER / f"{program.name}.json"
        self._stacks = stacks = folder / LOGS / f"{program.name}.stacks"
        if program.watched:
            self._signs.parent.mkdir(parents=True, exist_ok=True)
            self._signs.unlink(missing_ok=True)
        if program.watched or program.log is None:
            stacks.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(program.log or stacks.with_suffix(".log"), "ab", buffering=0)  # noqa: SIM115  closed by `close`
        self._log_began = os.fstat(self._log.fileno()).st_size  # of processes of this name before
        self._shown: dict[int, int] = {}  # what is read -> where it is shown
        inner = [self._shown_on(1), self._shown_on(2)] if program.on_console else [self._log.fileno()] * 2
        own = {VITALS: str(self._signs), STACKS: str(stacks)} if program.watched else {}
        before = os.getpid()

        def bind() -> None:
            if _libc is not None:
                _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != before:
                    os._exit(1)

        try:
            self._process = subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=inner[0],
                stderr=inner[1],
                env={**os.environ, **environment, **program.environment, **own},
                start_new_session=True,
                preexec_fn=bind,  # safe: there are no threads
            )
        finally:
            for fd in set(inner) - {self._log.fileno()}:
                os.close(fd)

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._process.pid

    @property
    def readable(self) -> list[int]:
        """What `pump` reads when there is something."""
        return list(self._shown)

    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def sign(self) -> Sign | None:
        """Its newest sign of life."""
        return vitals.read(self._signs)

    def hangs(self) -> str:
        """Why it counts as hanging; "" where it does not."""
        if not self.program.watched:
            return ""
        sign = self.sign()
        if sign is None:
            waited = time.monotonic() - self.started
            return f"gave no sign of life in its first {waited:.0f} s" if waited > self._start_s else ""
        over = sign.overdue_s(time.monotonic())
        return f"{sign.phase}, without progress for {over + sign.budget_s:.0f} s" if over > 0 else ""

    def write_stacks(self) -> bool:
        """Asks for its stacks in logs/NAME.stacks, also where somebody has stopped it. False: it cannot give them."""
        if self.sign() is None:  # SIGUSR1 would end it
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)
        return True

    def stacks_bytes(self) -> int:
        """The size of all stacks that it has written so far, its predecessors' included."""
        with contextlib.suppress(OSError):
            return self._stacks.stat().st_size
        return 0

    def last_line(self) -> str:
        """The last line that it has written; says so where there is none."""
        folder = pathlib.Path(self._log.name).parent
        full = ""  # what a process says is lost where its disk is full
        with contextlib.suppress(OSError):
            if shutil.disk_usage(folder).free < LEAST_FREE:
                full = f", and the disk of {folder} is full: make room, and the same command goes on"
        with contextlib.suppress(OSError), open(self._log.name, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_began, size - 4096))  # what is before is a predecessor's
            lines = file.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else f"it said nothing{full}"
        return f"its log cannot be read{full}"

    def state(self) -> str:
        """For people: what the system says that it does."""
        with contextlib.suppress(OSError, IndexError):
            letter = pathlib.Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            return f"the system says that it {STATES.get(letter, f'is in state {letter}')}"
        return "the system says nothing of it"

    def send(self, signum: int) -> None:
        """A signal, to the process alone."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Ends the process and its whole group at once. SIGTERM would not do: libraries swallow it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in a system call that nothing interrupts
            self._process.wait(KILL_S)

    def pump(self) -> None:
        """Shows what it printed since the last time, and writes it to its log."""
        for reading, console in list(self._shown.items()):
            try:
                data = os.read(reading, _READ)
            except BlockingIOError:
                continue
            except OSError:  # a terminal whose other end is closed
                data = b""
            if not data:
                os.close(reading)
                del self._shown[reading]
                continue
            with contextlib.suppress(OSError):  # a full disk: the process that needs it says so
                self._log.write(data)
            with contextlib.suppress(OSError):  # nobody looks any more
                os.write(console, data)

    def close(self) -> None:
        """After its end: shows the rest, and closes its log."""
        for _ in range(1000):  # bounded: something that it began may print on
            before = self._log.tell()
            self.pump()
            if not self._shown or self._log.tell() == before:
                break
        for reading in self._shown:
            os.close(reading)
        self._shown.clear()
        self._log.close()

    def _shown_on(self, console: int) -> int:
        """The end that the process gets of a pipe, or of a terminal where the console is one."""
        if os.isatty(console):
            reading, writing = os.openpty()
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
        else:
            reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._shown[reading] = console
        return writing
