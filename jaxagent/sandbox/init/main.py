"""Entry point, with the same command line as the program in C:

    init launch NAME   makes namespaces and a copy-on-write root, then serves as process 1
    init serve NAME    only serves, inside a place that something else made

Directives and requests come over standard input, so that no argument shows anything; NAME is only there to be seen.
"""

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Sequence

from jaxagent.sandbox.init.command import run_in_shell
from jaxagent.sandbox.init.config import Config
from jaxagent.sandbox.init.files import get_file, list_directory, put_file
from jaxagent.sandbox.init.fresh import run_fresh
from jaxagent.sandbox.init.host import Host, HostGone
from jaxagent.sandbox.init.launch import launch, lock_down
from jaxagent.sandbox.init.ports import open_port
from jaxagent.sandbox.init.root import write_settings
from jaxagent.sandbox.init.session import Session

FAILED = 71  # exit status


def kill(session: Session, number: int, data: bytes) -> None:
    """Answers K."""
    spared = set(struct.iter_unpack("<IQ", data))
    if not (session.kill_others(spared) if spared else session.kill_all()):
        raise OSError(0, "processes that were killed do not end")
    session.host.write("D", number)


REQUESTS = {
    "R": run_in_shell,
    "X": run_fresh,
    "G": get_file,
    "P": put_file,
    "L": list_directory,
    "K": kill,
    "O": open_port,
}


def serve(session: Session, gaps: Sequence[str]) -> None:
    """Answers one request after the other, for ever. Raises HostGone."""
    host, wake = session.host, session.processes.wake
    host.write("H", 0, "; ".join(gaps).encode())
    while True:
        happened = session.wait({host.incoming: select.POLLIN | select.POLLRDHUP, wake: select.POLLIN}, float("inf"))
        session.terminals.drain()
        if happened.get(wake):
            session.processes.reap()
        if not happened.get(host.incoming):
            continue
        kind, number, data = host.read()
        try:
            REQUESTS[kind](session, number, data)
        except (OSError, ValueError, KeyError) as failure:
            host.write_error(number, failure)


def main() -> None:
    """Starts the sandbox and serves it; never returns."""
    host, config = Host(), Config()
    try:
        try:
            config.read(host)
            if sys.argv[1] == "launch":
                launch(config, host)
            else:
                os.close(host.auxiliary)
                write_settings(config)
            lock_down(config)
        except (OSError, ValueError) as failure:
            host.write_error(0, failure, str(failure))
            os._exit(FAILED)
        session = Session(host, config)
        try:
            serve(session, config.gaps)
        except HostGone:
            if os.getpid() != 1:  # process 1 of a pid namespace takes everything with it
                session.kill_all()
    except HostGone:
        pass
    os._exit(0)
