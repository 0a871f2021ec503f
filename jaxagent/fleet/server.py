"""The coordinator's process: one per run, without JAX. It may be killed at any moment and started again.

    server.run(folder, plan, token, listen="0.0.0.0:0", config=digest, exact=True, judge=usable)

In the folder: `ledger/` (with the episodes), `address.json` (where it listens), `coordinator.log` (what it decided).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import logging
import logging.handlers
import os
import pathlib
import queue
import socket
import time
from collections.abc import Callable, Iterator

from jaxagent.config import ConfigError
from jaxagent.config.command import bound_socket
from jaxagent.config.errors import ending_signals
from jaxagent.fleet import wire
from jaxagent.fleet.api import FINISH_S, Api, Judge
from jaxagent.fleet.book import Book
from jaxagent.fleet.client import run_in
from jaxagent.fleet.core import CoordinatorError, Core, logger
from jaxagent.fleet.line import Line
from jaxagent.fleet.members import Members
from jaxagent.fleet.plan import Plan
from jaxagent.fleet.status import note_damaged
from jaxagent.io import connections, files

LEDGER, ADDRESS, LOG = "ledger", "address.json", "coordinator.log"
LOG_BYTES, LOGS = 10 * 2**20, 3
MOST_CONNECTIONS = 8192
IDLE_S = 75.0  # of a connection without a whole request
ASK_S = 2.0  # who has this port


def run(
    folder: str | pathlib.Path,
    plan: Plan,
    token: str,
    listen: str = "127.0.0.1:0",
    config: str = "",
    exact: bool = False,
    judge: Judge | None = None,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM, SIGHUP or SIGINT.

    Args:
      folder: of the run's fleet; made where there is none.
      listen: HOST:PORT; port 0 = any free one; see `address_of`.
      config: digest of the run's settings, which all processes must have; "" = not compared.
      exact: numerics are exact: with rule `pinned`, processes that would sample other bits are refused.
      judge: whether a complete group is learnt from; see `Playing`.
      alive: called once a second or more often by the event loop: for whoever watches it.

    Raises:
      ConfigError: the address, the token or the ledger cannot be used.
      CoordinatorError: the disk failed, or another coordinator took over: start it again.
    """
    folder = pathlib.Path(folder)
    host, port = address_of(listen)
    connections.raise_descriptors()  # a connection is an open file
    with _bound(host, port, folder) as address, log(folder):

        def clock() -> float:
            alive()
            return time.monotonic()

        asyncio.run(serve(folder, plan, token, address, config, exact, judge, signals=True, clock=clock))


async def serve(
    folder: pathlib.Path,
    plan: Plan,
    token: str,
    address: socket.socket,
    config: str = "",
    exact: bool = False,
    judge: Judge | None = None,
    signals: bool = False,
    stop: asyncio.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Serves until `stop` is set, or a signal comes. Else as `run`."""
    stop = asyncio.Event() if stop is None else stop
    if signals:
        for signum in ending_signals():
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    try:
        book = Book(folder / LEDGER, plan, exact)
    except OSError as error:
        raise CoordinatorError(f"the ledger in {folder} cannot be opened: {error}") from error
    with contextlib.closing(book):
        for note in book.notes:
            logger.info("%s", note)
        for which, wrong, answer in book.damage:
            note_damaged(folder, which, wrong, answer)
        members = Members(book.run, config, strict=exact and plan.rule == "pinned")
        core = Core(book, folder, members, clock)
        api = Api(core, token, judge)
        async with connections.serving(api.app(), address, MOST_CONNECTIONS, IDLE_S, finish_s=FINISH_S):
            url = url_of(address)
            row = {"url": url, "run": book.run, "epoch": book.epoch, "pid": os.getpid()}
            files.replace(folder / ADDRESS, json.dumps(row))
            logger.info("coordinator of run %s, epoch %d, listens on %s", book.run, book.epoch, url)
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait([stopping, core.failed], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        if core.failed.done():
            core.failed.result()
        logger.info("the coordinator ends")


def address_of(listen: str) -> tuple[str, int]:
    """HOST:PORT; an IPv6 address stands in brackets, and 0.0.0.0, [::] or nothing means all that the machine has ("").

    Raises ConfigError: it is none.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) < 2**16:
        raise ConfigError(f"--listen='{listen}' must be HOST:PORT, such as 0.0.0.0:8200.")
    host = host.removeprefix("[").removesuffix("]")
    return "" if host in wire.ANY else host, int(port)


def _bound(host: str, port: int, folder: pathlib.Path) -> socket.socket:
    """As `config.command.bound_socket`, whose error also says whose coordinator has the port."""
    try:
        return bound_socket(host, port)
    except ConfigError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
        own, run = run_in(folder / ADDRESS), ""
        with contextlib.suppress(OSError, http.client.HTTPException):
            line = Line(wire.LOCAL if host in wire.ANY else host, port)
            run = line.ask("GET", "/v1/status", b"", {}, ASK_S, wire.MAX_CALL_BYTES).headers.get(wire.RUN, "")
            line.close()
        if not run:
            who = "Another program has it"
        elif run == own:
            who = f"An earlier coordinator of this run ({run}) has it, and ends when it sees that this one is there"
        else:
            who = f"The coordinator of another run ({run:.40}) has it"
        raise ConfigError(
            f"{error} {who}: end that, or give fleet.listen another port (0: any free one)."
        ) from error.__cause__


def url_of(address: socket.socket) -> str:
    """By which others reach it: this machine's name where it listens on all addresses."""
    host, port = address.getsockname()[:2]
    return wire.url_of(socket.gethostname() if host in wire.ANY else host, port)


@contextlib.contextmanager
def log(folder: pathlib.Path) -> Iterator[None]:
    """What the coordinator decides goes to a file, written by a thread: a slow disk holds nobody up."""
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.handlers.RotatingFileHandler(folder / LOG, maxBytes=LOG_BYTES, backupCount=LOGS, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    file.handleError = lambda record: None  # a full disk stops no coordinator
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(10_000)
    handler = logging.handlers.QueueHandler(waiting)
    handler.handleError = lambda record: None
    listener = logging.handlers.QueueListener(waiting, file)
    listener.start()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        listener.stop()
        file.close()
