"""Rollouts as a service: keeps what was asked and answered; nodes on any hosts play it.

    python -m jaxagent.service.server --store=runs/service.sqlite --token_file=TOKEN --port=8080

Clients submit groups of sessions, nodes (`python -m jaxagent.service.node`) take them, report their phases, and send
episodes back. Everything is in one SQLite file: a server that is killed and started again has lost no episode that it
acknowledged, and nodes go on with what they play. Routes, states and what may fail: docs/rollout_service.md. It speaks
plain HTTP: use it on a private network, or through a tunnel.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.config.command import Parser, bound_socket, count, exit_code, port, seconds
from jaxagent.io import connections
from jaxagent.service import callbacks, leases
from jaxagent.service.api import Api
from jaxagent.service.states import ServiceRules
from jaxagent.service.store import ServiceStore, StoreError

logger = logging.getLogger(__name__)
SWEEPS_PER_LEASE = 4
LONGEST_SWEEP_S = 5.0


async def serve(
    store: ServiceStore, rules: ServiceRules, token: str, heartbeat_s: float, address: socket.socket
) -> None:
    """Serves until SIGINT or SIGTERM."""
    api = Api(store, rules, token, heartbeat_s)
    await store.do(leases.resumed, rules)
    async with connections.serving(api.app(), address, handle_signals=True):
        print(f"serving on http://{address.getsockname()[0]}:{address.getsockname()[1]}", flush=True)
        await asyncio.gather(callbacks.tell(store), sweep(store, rules, api))


async def sweep(store: ServiceStore, rules: ServiceRules, api: Api) -> None:
    """Looks for what time has ended, for ever."""
    while True:
        await asyncio.sleep(min(rules.lease_s / SWEEPS_PER_LEASE, LONGEST_SWEEP_S))
        try:
            if await store.do(leases.sweep, rules):
                api.ring()
        except StoreError as failure:
            api.counts["failed_sweeps"] += 1
            logger.warning("%s", failure)


def read_token(path: str) -> str:
    """The shared secret. Raises ConfigError: the file cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--token_file='{path}' cannot be read: {error}.") from error


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m jaxagent.service.server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rules = ServiceRules()
    parser.add_argument("--store", required=True, help="SQLite file; made where there is none")
    parser.add_argument("--token_file", required=True, help="file with the shared secret, at least 16 characters")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=8080, help="0: any free one, which is printed")
    parser.add_argument("--heartbeat_s", type=seconds, default=10.0, help="how often nodes are to be heard")
    parser.add_argument("--lease_s", type=seconds, default=rules.lease_s, help="a node unheard for so long is lost")
    parser.add_argument("--max_losses", type=count, default=rules.max_losses, help="lost nodes that end a session")
    parser.add_argument("--max_waiting", type=count, default=rules.max_waiting, help="sessions that may wait")
    parser.add_argument("--keep_s", type=seconds, default=rules.keep_s, help="how long ended tasks are kept")
    parser.add_argument("--callback_s", type=seconds, default=rules.callback_s, help="how long a callback is tried")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Serves until interrupted."""
    if options.lease_s < 2 * options.heartbeat_s:
        raise ConfigError("--lease_s must be at least twice --heartbeat_s: one beat may be late.")
    rules = ServiceRules(
        options.lease_s, int(options.max_losses), int(options.max_waiting), options.keep_s, options.callback_s
    )
    token = read_token(options.token_file)
    folder = Path(options.store).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    with (
        bound_socket(options.host, int(options.port)) as address,
        ServiceStore(options.store) as store,
        contextlib.suppress(web.GracefulExit),
    ):
        asyncio.run(serve(store, rules, token, options.heartbeat_s, address))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a user's mistake."""
    return exit_code(lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
