"""A host that plays episodes for a rollout service.

    python -m jaxagent.service.node --server=http://10.0.0.5:8080 --token_file=TOKEN --node_id=host1 \
        --player=my_package.my_module:player

A player is a function that opens what its sessions share and yields a `jaxagent.service.play.Play`:

    @contextlib.contextmanager
    def player(here):                                        # here.config, here.run: see `jaxagent.service.play.Here`
        with open_my_environment(here.config) as rollout:    # task, sample -> Episode
            yield of_rollout(rollout)

`jaxagent.service.agents:player` is the one for environments that agent programs play. --config=FILE[:PRESET] and
--config.section.field=VALUE are those of `python -m jaxagent.main`.

SIGTERM ends it when what it plays has ended, after --drain_s at the latest; a second one at once. What it has not ended
goes to other nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import operator
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from jaxagent.config import Config, ConfigError, flags
from jaxagent.config.command import Parser, count, exit_code, seconds
from jaxagent.config.errors import as_config_error
from jaxagent.fleet.wire import RefusedCallError
from jaxagent.io.http import HttpError, checked_url
from jaxagent.service.client import ServiceClient
from jaxagent.service.host import PATIENCE_S, Node
from jaxagent.service.play import Here, Places, Play
from jaxagent.service.server import read_token

Player = Callable[[Here], contextlib.AbstractContextManager[Play]]


def imported(name: str) -> Player:
    """The player "package.module:function". Raises ConfigError: there is none."""
    module, _, function = name.partition(":")
    with as_config_error(f"--player='{name}'"):
        return operator.attrgetter(function)(importlib.import_module(module))


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The command line: this program's flags, and those of the config."""
    parser = Parser(
        prog="python -m jaxagent.service.node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--server", required=True, help="URL of the rollout service")
    parser.add_argument("--token_file", required=True, help="file with the service's token")
    parser.add_argument("--player", required=True, help="package.module:function, see above")
    parser.add_argument("--node_id", default=socket.gethostname(), help="default: this host's name")
    parser.add_argument("--gateway_url", default="", help="where its agents reach the policy")
    parser.add_argument("--gateway_token_file", default="", help="file with the gateway's admin token")
    parser.add_argument("--max_init_workers", type=count, default=4, help="sessions that prepare at once")
    parser.add_argument("--max_run_workers", type=count, default=8, help="agents that run at once")
    parser.add_argument("--max_postrun_workers", type=count, default=4, help="sessions that are judged at once")
    parser.add_argument("--drain_s", type=seconds, default=600.0, help="how long SIGTERM waits for sessions to end")
    refused = "how long it asks again where the server is away at its start, or refuses its token"
    parser.add_argument("--patience_s", type=seconds, default=PATIENCE_S, help=refused)
    options, rest = parser.parse_known_args(argv)
    if wrong := next((flag for flag in rest if not flag.startswith("--config")), ""):
        raise ConfigError(f"Unknown flag '{wrong}'.")
    return options, rest


async def serve(options: argparse.Namespace, token: str, player: Player, config: Config | None) -> None:
    """Plays until drained.

    Raises:
      ConfigError: the server refuses this node.
      WaitedInVainError: the server is away, or refuses a token that it took before, for --patience_s.
    """
    loop = asyncio.get_running_loop()
    stack = contextlib.ExitStack()

    def run(coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)

    admin = read_token(options.gateway_token_file) if options.gateway_token_file else ""
    here = Here(config, run, options.gateway_url, admin)
    # In a thread: players open environments, which wait for what they run on the loop.
    play = await asyncio.to_thread(lambda: stack.enter_context(player(here)))
    places = Places(*(int(n) for n in (options.max_init_workers, options.max_run_workers, options.max_postrun_workers)))
    client = ServiceClient(options.server, token)
    node = Node(client, play, options.node_id, places, options.drain_s, options.gateway_url, options.patience_s)
    running = asyncio.create_task(node.run())

    def stop() -> None:
        loop.add_signal_handler(signal.SIGTERM, running.cancel)
        node.drain()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        await running
    except asyncio.CancelledError:
        if not running.cancelled():
            raise
    except (HttpError, RefusedCallError) as failure:
        raise ConfigError(f"This node ends: {failure}.") from failure
    finally:
        await client.close()
        await asyncio.to_thread(stack.close)
    print(f"played {node.ended} sessions", flush=True)


def run(options: argparse.Namespace, of_config: Sequence[str]) -> None:
    """Plays until drained or interrupted."""
    options.server = checked_url(options.server, "--server")
    if options.gateway_url:
        options.gateway_url = checked_url(options.gateway_url, "--gateway_url")
    token = read_token(options.token_file)
    config = flags.parse_config([sys.argv[0], *of_config]) if of_config else None
    sys.path.insert(0, os.getcwd())  # where the user's own player may lie
    asyncio.run(serve(options, token, imported(options.player), config))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for what its operator can mend."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    return exit_code(lambda: run(*arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
