"""The sandbox's terminals: the shell's own, the channel of a command's output, and channels that are still held.

The shell's terminal carries command lines in and exit statuses out. A command prints to the channel, so that what it
prints can neither forge a status nor land in a later command's output.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import time

from jaxagent.sandbox.init.output import CHUNK_BYTES, Output

OLD_CHANNELS, DRAIN_S = 16, 0.05
TIOCSPTLCK, TIOCGPTN = 0x40045431, 0x80045430
ROWS, COLUMNS = 24, 80


class Terminals:
    """Descriptors of the terminals' near ends; -1 where there is none."""

    def __init__(self) -> None:
        self.shell = self.channel = -1
        self.channel_path = ""
        self._old: list[int] = []  # channels that background processes hold
        self._drained_at = 0.0

    def open_shell(self) -> str:
        """A new terminal for a new shell; returns the path of its other end. Raises OSError."""
        self.close_shell()
        self.shell, path = _open_terminal(with_signals=True)
        return path

    def close_shell(self) -> None:
        """Closes the shell's terminal, if there is one."""
        if self.shell >= 0:
            os.close(self.shell)
        self.shell = -1

    def open_channel(self) -> None:
        """Makes a channel where there is none. Raises OSError."""
        if self.channel < 0:
            self.channel, self.channel_path = _open_terminal(with_signals=False)

    def replace_channel(self) -> None:
        """Leaves the channel to the background process that holds it; the next command gets another."""
        if len(self._old) == OLD_CHANNELS:
            os.close(self._old.pop(0))
        self._old.append(self.channel)
        self.channel = -1

    def next_drain(self) -> float:
        """When `drain` should be called next, of time.monotonic()."""
        return time.monotonic() + DRAIN_S if self._old else float("inf")

    def drain(self) -> None:
        """Drops a little of what background processes print, so that they are not blocked for ever."""
        if not self._old or time.monotonic() - self._drained_at < DRAIN_S:
            return
        self._drained_at = time.monotonic()
        for fd in list(self._old):
            if not Output(0).read(fd, CHUNK_BYTES):
                self._old.remove(fd)
                os.close(fd)

    def close(self) -> None:
        """Closes all of them, when nobody writes any more."""
        for fd in [*self._old, self.shell, self.channel]:
            if fd >= 0:
                os.close(fd)
        self._old.clear()
        self.shell = self.channel = -1


def set_modes(fd: int, with_signals: bool) -> None:
    """Makes a terminal change no byte; ^C is the one character it acts on, where it acts at all."""
    control: list[bytes | int] = [b"\0"] * 32
    control[termios.VMIN], control[termios.VINTR] = b"\1", b"\3"
    local = termios.ISIG if with_signals else 0
    settings = [0, 0, termios.CS8 | termios.CREAD | termios.B38400, local, termios.B38400, termios.B38400, control]
    termios.tcsetattr(fd, termios.TCSANOW, settings)


def count_terminals() -> int:
    """How many terminals of this sandbox are open."""
    try:
        return sum(name.isdigit() for name in os.listdir("/dev/pts"))
    except OSError:
        return 0


def _open_terminal(with_signals: bool) -> tuple[int, str]:
    """(the near end, the path of the other end). Raises OSError."""
    flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    try:  # not the link /dev/ptmx, which is the agent's to remove
        fd = os.open("/dev/pts/ptmx", flags)
    except OSError:
        with contextlib.suppress(OSError):
            os.chmod("/dev/pts/ptmx", 0o666)  # its owner can have closed it
        fd = os.open("/dev/pts/ptmx" if os.access("/dev/pts/ptmx", os.W_OK) else "/dev/ptmx", flags)
    fcntl.ioctl(fd, TIOCSPTLCK, struct.pack("i", 0))
    number = struct.unpack("i", fcntl.ioctl(fd, TIOCGPTN, b"\0" * 4))[0]
    set_modes(fd, with_signals)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    return fd, f"/dev/pts/{number}"
