"""What the programs of this project share at their command line. Mistakes are `ConfigError`s: one line, exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from jaxagent.config.errors import WAITED, ConfigError, Stopped, WaitedInVainError, is_full_disk
from jaxagent.config.ranges import SECONDS, Range, at_least, between


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError` where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] (it has overloads)
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """Its parent's, with "~" as a person means it, which bash leaves as it is behind "="."""
        args, home = sys.argv[1:] if args is None else args, os.path.expanduser("~")
        args = [re.sub(r"^(--\w+=)~(?=/|$)", lambda match: match[1] + home, arg) for arg in args]
        return super().parse_known_args(args, namespace)


def number(kind: type[int] | type[float], allowed: Range) -> Callable[[str], float]:
    """What `add_argument(type=...)` takes for a number in a range."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (value := kind(text)) in allowed:
                return value
        raise argparse.ArgumentTypeError(f"must be {'a whole' if kind is int else 'a'} number, {allowed}, got '{text}'")

    return read


count = number(int, at_least(1))
port = number(int, between(0, 65535))
seconds = number(float, SECONDS)
amount = number(int, at_least(0))
part = number(float, between(0, 1))


class Display:
    """A stream for people, whose end ends nothing: a closed pipe, a killed `tee`, a terminal whose connection is gone.

    What can no longer be written is dropped, and what its encoding lacks is shown as "?".

    Attributes:
      gone: why nothing is written any more; "" while it is.
    """

    def __init__(self, stream: TextIO | None):
        """None: the process was started without such a stream."""
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  as long as the process
        self.gone = ""

    def write(self, text: str) -> int:
        """Writes what can be written; returns the length of the text."""
        coding = getattr(self._stream, "encoding", None) or "utf-8"
        self._try(lambda stream: stream.write(text.encode(coding, "replace").decode(coding)))
        return len(text)

    def flush(self) -> None:
        """Flushes, as long as there is somebody to read."""
        self._try(lambda stream: stream.flush())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[TextIO], object]) -> None:
        try:
            if not self.gone:
                action(self._stream)
        except (OSError, ValueError) as error:
            self.gone = getattr(error, "strerror", None) or str(error)
            # Else the interpreter tries once more when it ends, and makes an exit code of its own of that.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def exit_code(command: Callable[[], int | None]) -> int:
    """Runs a command; what a user or an operator can mend becomes one line on stderr and an exit code."""
    with contextlib.redirect_stdout(Display(sys.stdout)), contextlib.redirect_stderr(Display(sys.stderr)):
        return _exit_code(command)


def _exit_code(command: Callable[[], int | None]) -> int:
    try:
        return command() or 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except WaitedInVainError as error:
        print(f"error: {error} The same command goes on.", file=sys.stderr)
        return WAITED
    except Exception as error:
        if not is_full_disk(error):
            if not isinstance(error, OSError) or (line := path_error(error)) is None:
                raise
            print(f"error: {line}", file=sys.stderr)
            return 2
        where = f" ({name})" if (name := getattr(error, "filename", None)) else ""
        print(f"error: no space left on the disk{where}. Free some and run again to resume.", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def path_error(error: OSError) -> str | None:
    """One line for a file or folder that cannot be used; None where no path of the user's is to blame.

    Files of this package are not the user's: that one of them is missing is a mistake of the program's.
    """
    names = [
        os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes, os.PathLike))
    ]
    if not names or Path(names[0]).absolute().is_relative_to(Path(__file__).parents[1]):
        return None
    return f"Cannot use {' -> '.join(map(repr, names))}: {error.strerror}."


def quiet_libraries() -> None:
    """Other people's notes about their own work stay out of the progress display; errors do not."""
    import absl.logging

    absl.logging.set_verbosity(absl.logging.ERROR)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has its address but does not listen yet: before the slow part of a server's start.

    A client is refused until the server listens, and does not wait for an answer that takes minutes. Host "" means all
    addresses of this machine, those of IPv6 too where it has some.

    Raises:
      ConfigError: the port is taken, or the address is not this machine's.
    """
    both = not host and socket.has_dualstack_ipv6()
    try:
        where = host or ("::" if both else "0.0.0.0")
        family, kind, protocol, _, address = socket.getaddrinfo(where, port, type=socket.SOCK_STREAM)[0]
        out = socket.socket(family, kind, protocol)
        try:
            out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if both:
                out.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            out.bind(address)
        except OSError:
            out.close()
            raise
    except (OSError, UnicodeError) as error:  # a name that cannot be one of a machine is a UnicodeError
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot listen on {host}, port {port}: {why}.") from error
    return out
