"""What the programs of this project share at their command line. Mistakes are `ConfigError`s: one line, exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Callable
from typing import NoReturn

from jaxagent.config import ConfigError
from jaxagent.ranges import SECONDS, Range, at_least, between


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError` where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")


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


def bound(host: str, port: int) -> socket.socket:
    """A socket that has its address but does not listen yet: before the slow part of a server's start.

    A client is refused until the server listens, and does not wait for an answer that takes minutes.

    Raises:
      ConfigError: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        out = socket.socket(family, kind, protocol)
        try:
            out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            out.bind(address)
        except OSError:
            out.close()
            raise
    except (OSError, UnicodeError) as error:  # a name that cannot be one of a machine is a UnicodeError
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot listen on {host}, port {port}: {why}.") from error
    return out
