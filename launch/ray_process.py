"""What Ray places on a node: an actor that holds one process of a run, and nothing else. No data passes through Ray.

The process ends with its actor, however that ends: its node, its driver, `ray.kill`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import select
import signal
import sys
import time
from collections.abc import Mapping

from jaxagent.config import ConfigError
from jaxagent.config.command import bound_socket
from jaxagent.fleet.child import Child, Program
from jaxagent.fleet.vitals import Sign

HOST, PORT = "THIS-NODE", "THIS-PORT"  # in a command: the address of the node where it is started, a free port of it
LOOK_S = 1.0
STACKS_S = 2.0  # for writing them


def where(port: int = 0) -> tuple[str, int]:
    """This node's address, and a port of it that is free now: `port`, where it is."""
    import ray

    for wanted in (port, 0):
        with contextlib.suppress(ConfigError), bound_socket("0.0.0.0", wanted) as free:
            return ray.util.get_node_ip_address(), free.getsockname()[1]
    raise ConfigError("No port is free.")


def at(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Process:
    """The actor. Each call is short."""

    def start(
        self, program: Program, folder: pathlib.Path, environment: Mapping[str, str], start_s: float, port: int
    ) -> tuple[str, int]:
        """Starts a process as a `Child`; returns what its command has for `HOST` and `PORT`. "python" is this one."""
        address, free = where(port)
        here = at(address, free)
        command = [word.replace(f"{HOST}:{PORT}", here).replace(HOST, address) for word in program.command]
        command[0] = sys.executable if command[0] == "python" else command[0]
        self._child = Child(dataclasses.replace(program, command=tuple(command)), folder, environment, start_s)
        return address, free

    def look(self) -> tuple[int | None, str, Sign | None, str]:
        """After a second at most: exit code, why it hangs, newest sign of life, last line; shows what it prints."""
        child, until = self._child, time.monotonic() + LOOK_S
        while child.exit_code() is None and (left := until - time.monotonic()) > 0:
            select.select(child.readable, [], [], min(left, 0.1))
            child.pump()
        if (hang := child.hangs()) and child.write_stacks():
            time.sleep(STACKS_S)
        sign = child.sign()  # without its time, which is of this machine's clock
        return child.exit_code(), hang, sign and dataclasses.replace(sign, at=math.inf), child.last_line()

    def send(self, signum: int) -> None:
        """A signal, to the process alone."""
        self._child.send(signal.Signals(signum))

    def kill(self) -> None:
        """The process, and what it has started, is gone when this returns."""
        self._child.kill()
        self._child.close()
