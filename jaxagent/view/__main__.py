"""Runs on a page: curves, every episode token by token, groups, two runs side by side.

    python -m jaxagent.view runs                          # all runs below a folder, or one run's workdir
    python -m jaxagent.view runs --host=0.0.0.0           # from other machines, with a token

It reads, also while runs train, and changes nothing. On the page a recorded step can be made again (jaxagent.replay),
which takes the processor for a while and writes its certificate into the run's folder.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.config.command import Parser, bound_socket, exit_code, port
from jaxagent.io import connections
from jaxagent.view.runs import Runs
from jaxagent.view.server import View

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m jaxagent.view",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", help="a folder of runs, or the workdir of one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; other than this machine's: a token")
    parser.add_argument("--port", type=port, default=8090, help="0: any free one, which is printed")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Serves until interrupted. Raises ConfigError: there is no run, or the address cannot be had."""
    root = Path(options.runs)
    if not root.is_dir():
        raise ConfigError(f"There is no folder '{root}'.")
    runs = Runs(root)
    if not runs.folders():
        raise ConfigError(f"There is no run in '{root}', nor in a folder below it.")
    token = "" if options.host in LOOPBACK else secrets.token_urlsafe(24)
    with bound_socket(options.host, int(options.port)) as address:
        host, number = address.getsockname()[:2]
        address.listen()  # whoever follows the line at once waits, and is not refused
        shown = f"[{host}]" if ":" in host else host
        # Behind the #: it goes to no server's log, and is in no request but those that need it.
        shown += f":{number}/" + (f"#token={token}" if token else "")

        async def say_where(_: web.Application) -> None:  # once a signal ends the server as it should
            print(f"http://{shown}", flush=True)

        app = View(runs, token).app()
        app.on_startup.append(say_where)
        connections.run(app, address)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a user's mistake."""
    return exit_code(lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
