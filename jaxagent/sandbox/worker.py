"""Back end (e), the far side: a server that keeps sandboxes on its own host for runs on others.

    python -m jaxagent.sandbox.worker --token_file=TOKEN --host=10.0.0.5 --port=8100 --max_sandboxes=256

Every request carries the token (`Authorization: Bearer ...`) and the client's id; sandboxes belong to the client that
started them, and the client names them, so that it can end one whose start it heard no answer to. A client that is not
heard for `--lease_s` has died: its sandboxes are closed. Roots, layers and snapshots are folders in `--folder` only.
Bodies are JSON, bytes in base64; the file transfers carry raw bytes. Use it on a private network or through a tunnel:
it speaks plain HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from jaxagent.config import ConfigError
from jaxagent.config.command import Parser, bound_socket, count, port, seconds
from jaxagent.config.parse import build
from jaxagent.io import connections
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import (
    MAX_FILE_BYTES,
    Backend,
    CommandResult,
    FileError,
    Sandbox,
    SandboxClosed,
    SandboxError,
    SandboxLost,
    Spec,
)
from jaxagent.sandbox.owner import Owner
from jaxagent.sandbox.snapshot import UNFINISHED

MAX_BODY_BYTES = MAX_FILE_BYTES + 2**20
MAX_DEADLINE_S = 24 * 3600.0
MAX_EARLY_CLOSES = 10_000
STRANGER_S = 10.0  # a connection without a request that carries the token is closed
NAME = re.compile(r"[0-9a-f]{16,64}")
CLIENT = "X-Jaxagent-Client"
STATUS = {ConfigError: 400, FileError: 404, SandboxLost: 410, SandboxClosed: 410, SandboxError: 500}  # closest first


@dataclasses.dataclass
class _Client:
    """Sandboxes of one run, and when it last sent a request or got an answer."""

    last_request_s: float  # on the monotonic clock
    sandboxes: dict[str, Sandbox] = dataclasses.field(default_factory=dict)
    starting: set[str] = dataclasses.field(default_factory=set)
    early_closes: dict[str, None] = dataclasses.field(default_factory=dict)  # closed before they were there; in order
    busy: int = 0  # requests in progress: a long command is a sign of life, too


class Worker:
    """The web application around any back end.

    Args:
      own_folder: where roots, layers and snapshots lie; "" for a worker without any.
      relay_to: hosts and ports that a sandbox's port may lead to. The token alone must be no way into this network.

    Attributes:
      trusted: connections that have shown the token, which stay when strangers fill the server.
    """

    def __init__(
        self,
        backend: Backend,
        token: str,
        max_sandboxes: int,
        lease_s: float,
        own_folder: str = "",
        relay_to: Sequence[tuple[str, int]] = (),
    ):
        if len(token) < 16:
            raise ConfigError("the sandbox worker's token must have at least 16 characters")
        self._backend = backend
        self._token = token.encode()
        self._max = max_sandboxes
        self._lease_s = lease_s
        if own_folder and not Path(own_folder).is_dir():
            raise ConfigError(f"the sandbox worker's --folder '{own_folder}' is not a directory")
        self._folder = own_folder
        self._relay_to = frozenset(relay_to)
        self._clients: dict[str, _Client] = {}
        self.trusted: weakref.WeakSet[asyncio.BaseTransport | None] = weakref.WeakSet()

    def app(self) -> web.Application:
        """Routes, and the task that ends what dead clients left."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/sandboxes", self._start),
                web.post("/sandboxes/{id}/run", self._run),
                web.post("/sandboxes/{id}/execute", self._execute),
                web.get("/sandboxes/{id}/file", self._read),
                web.put("/sandboxes/{id}/file", self._write),
                web.get("/sandboxes/{id}/list", self._list),
                web.post("/sandboxes/{id}/stop", self._stop),
                web.post("/sandboxes/{id}/snapshot", self._snapshot),
                web.post("/sandboxes/{id}/port", self._port),
                web.get("/sandboxes/{id}/oom_kills", self._oom_kills),
                web.delete("/sandboxes/{id}", self._close),
            ]
        )
        app.cleanup_ctx.append(self._lifetime)
        return app

    def serving(self, sock: socket.socket, most: int | None = None) -> contextlib.AbstractAsyncContextManager[None]:
        """Serves on a bound socket until the block is left, at most `most` connections at once."""
        return connections.serving(self.app(), sock, most, trusted=self.trusted, stranger_s=STRANGER_S)

    async def _lifetime(self, app: web.Application):
        watching = asyncio.get_running_loop().create_task(self._watch())
        yield
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        for client in list(self._clients.values()):
            await _close_all(client)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            for name, client in list(self._clients.items()):
                if not client.busy and time.monotonic() - client.last_request_s > self._lease_s:
                    del self._clients[name]
                    await _close_all(client)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]):
        if not connections.has_token(request.headers, self._token):
            refused = _failure("SandboxError", "the token is wrong", 401)
            refused.force_close()  # a stranger's connection is not kept
            return refused
        self.trusted.add(request.transport)
        name = request.headers.get(CLIENT, "")
        if not name:
            return _failure("SandboxError", f"no {CLIENT} header", 400)
        client = self._clients.setdefault(name, _Client(0.0))
        client.last_request_s, client.busy = time.monotonic(), client.busy + 1
        try:
            return await handler(request, client)
        except tuple(STATUS) as failure:
            kind = next(k for k in STATUS if isinstance(failure, k))
            return _failure(kind.__name__, str(failure), STATUS[kind])
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as failure:
            return _failure("SandboxError", f"malformed request: {type(failure).__name__}: {failure}", 400)
        finally:
            client.last_request_s, client.busy = time.monotonic(), client.busy - 1

    async def _health(self, request: web.Request, client: _Client) -> web.Response:
        running = sum(len(c.sandboxes) for c in self._clients.values())
        return web.json_response(
            {"backend": self._backend.name, "missing": self._backend.missing, "running": running, "max": self._max}
        )

    async def _start(self, request: web.Request, client: _Client) -> web.Response:
        body = await _body(request)
        name = str(body.pop("id"))
        if not NAME.fullmatch(name) or name in client.starting or name in client.sandboxes:
            raise ValueError("'id' must be 16 to 64 hexadecimal digits that were not used before")
        spec = within(self._folder, build(Spec, body, "spec"))
        running = sum(len(c.starting) + len(c.sandboxes) for c in self._clients.values())
        if running >= self._max:
            return _failure("SandboxLost", f"all {self._max} sandboxes of this worker are in use", 429)
        if name not in client.early_closes:
            client.starting.add(name)
            try:
                sandbox = await self._backend.start(spec)
            finally:
                client.starting.discard(name)
            if name not in client.early_closes:
                client.sandboxes[name] = sandbox
                return web.json_response({})
            await sandbox.close()
        raise SandboxClosed("the client closed this sandbox before it was there")

    def _sandbox(self, request: web.Request, client: _Client) -> Sandbox:
        try:
            return client.sandboxes[request.match_info["id"]]
        except KeyError:
            raise SandboxLost("this worker has no such sandbox; was it started again, or the lease over?") from None

    async def _run(self, request: web.Request, client: _Client) -> web.Response:
        body = await _body(request)
        sandbox = self._sandbox(request, client)
        result = await sandbox.run(str(body["command"]), _deadline(body), _natural(body, "output_bytes"))
        return web.json_response(result_to_json(result))

    async def _execute(self, request: web.Request, client: _Client) -> web.Response:
        body = await _body(request)
        argv, env = [str(a) for a in body["argv"]], {str(k): str(v) for k, v in body["env"].items()}
        sandbox, directory = self._sandbox(request, client), str(body["directory"])
        result = await sandbox.execute(argv, _deadline(body), _natural(body, "output_bytes"), env, directory)
        return web.json_response(result_to_json(result))

    async def _read(self, request: web.Request, client: _Client) -> web.Response:
        data = await self._sandbox(request, client).read(request.query["path"], _natural(request.query, "max_bytes"))
        return web.Response(body=data)

    async def _write(self, request: web.Request, client: _Client) -> web.Response:
        data, mode = await request.read(), _natural(request.query, "mode", 2**32 - 1)
        await self._sandbox(request, client).write(request.query["path"], data, mode)
        return web.json_response({})

    async def _list(self, request: web.Request, client: _Client) -> web.Response:
        most = _natural(request.query, "max_entries", 2**32 - 1)
        entries = await self._sandbox(request, client).list(request.query["path"], most)
        return web.json_response([dataclasses.astuple(e) for e in entries])

    async def _stop(self, request: web.Request, client: _Client) -> web.Response:
        sandbox = self._sandbox(request, client)
        named = [{"pid": pid, "start": start} for pid, start in (await _body(request))["spared"]]
        spared = [(_natural(process, "pid", 2**32 - 1), _natural(process, "start")) for process in named]
        await sandbox.stop_processes(spared)
        return web.json_response({})

    async def _snapshot(self, request: web.Request, client: _Client) -> web.Response:
        body = await _body(request)
        sandbox, directory = self._sandbox(request, client), new(self._folder, str(body["directory"]))
        return web.json_response({"layer": await sandbox.snapshot(directory)})

    async def _port(self, request: web.Request, client: _Client) -> web.Response:
        body = await _body(request)
        sandbox, port = self._sandbox(request, client), _natural(body, "port", 65535)
        target = str(body["host"]), _natural(body, "target_port", 65535)
        if target not in self._relay_to:
            place = f"{target[0]}:{target[1]}"
            raise SandboxError(f"this worker leads no port to {place}: start it with --relay_to={place}")
        return web.json_response({"port": await sandbox.open_port(port, target)})

    async def _oom_kills(self, request: web.Request, client: _Client) -> web.Response:
        return web.json_response({"oom_kills": await self._sandbox(request, client).oom_kills()})

    async def _close(self, request: web.Request, client: _Client) -> web.Response:
        name = request.match_info["id"]
        sandbox = client.sandboxes.pop(name, None)
        if sandbox is not None:
            await sandbox.close()
            return web.json_response({"oom_kills": await sandbox.oom_kills()})
        # Its start is in progress, or may be heard later than this, or it was closed already.
        client.early_closes[name] = None
        if len(client.early_closes) > MAX_EARLY_CLOSES:
            del client.early_closes[next(iter(client.early_closes))]
        return web.json_response({})


async def _close_all(client: _Client) -> None:
    """Closes a client's sandboxes; one that fails to close stops neither the others nor the watch over leases."""
    await asyncio.gather(*[sandbox.close() for sandbox in client.sandboxes.values()], return_exceptions=True)
    client.sandboxes.clear()


def _failure(kind: str, message: str, status: int) -> web.Response:
    return web.json_response({"kind": kind, "error": message}, status=status)


def _deadline(body: dict[str, Any]) -> float:
    deadline_s = float(body["deadline_s"])
    if not 0 <= deadline_s <= MAX_DEADLINE_S:
        raise ValueError(f"deadline_s must be from 0 to {MAX_DEADLINE_S:g}")
    return deadline_s


async def _body(request: web.Request) -> dict[str, Any]:
    body = await request.json()
    if not isinstance(body, dict):
        raise TypeError(f"the body must be an object, not {type(body).__name__}")
    return body


def _natural(values: Mapping[str, Any], name: str, most: int = 2**63 - 1) -> int:
    """A whole number from 0, from JSON or as the text of a query."""
    value = values[name]
    number = int(value) if isinstance(value, str) else value
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}")
    return number


def result_to_json(result: CommandResult) -> dict[str, Any]:
    """The result as JSON values, its output in base64."""
    return {**dataclasses.asdict(result), "output": base64.b64encode(result.output).decode()}


async def serve(options: argparse.Namespace) -> None:
    """Serves until cancelled."""
    async with contextlib.AsyncExitStack() as stack:
        address = stack.enter_context(bound_socket(options.host, options.port))  # before back ends are tried
        owner = Owner()
        stack.callback(owner.close)
        backend = await choose.choose_backend(owner, unsafe=options.unsafe)
        stack.push_async_callback(backend.close)
        token = Path(options.token_file).read_text(encoding="utf-8").strip()
        worker = Worker(backend, token, options.max_sandboxes, options.lease_s, options.folder, options.relay_to)
        await stack.enter_async_context(worker.serving(address))
        print(f"{backend.describe()}\nserving on http://{options.host}:{address.getsockname()[1]}", flush=True)
        await asyncio.Event().wait()


def _place(text: str) -> tuple[str, int]:
    """HOST:PORT; an IPv6 address stands in brackets."""
    host, _, number = text.rpartition(":")
    if not host or not number.isdecimal() or not 0 < int(number) < 2**16:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got '{text}'")
    return host.removeprefix("[").removesuffix("]"), int(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a user's mistake."""
    parser = Parser(prog="jaxagent.sandbox.worker", description=__doc__.split("\n")[0])
    parser.add_argument("--token_file", required=True, help="file with the shared secret, at least 16 characters")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8100, help="0: any free one, which is printed")
    parser.add_argument("--max_sandboxes", type=count, default=256)
    parser.add_argument("--lease_s", type=seconds, default=60.0, help="a client unheard for so long has died")
    parser.add_argument("--folder", default="", help="where clients' roots, layers and snapshots lie; without: none")
    relay = "a place that sandboxes' ports may lead to, such as the gateway of a run; may be given several times"
    parser.add_argument("--relay_to", type=_place, action="append", default=[], metavar="HOST:PORT", help=relay)
    parser.add_argument("--unsafe", action="store_true", help="plain processes where nothing else works")
    try:
        asyncio.run(serve(parser.parse_args(arguments)))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def within(folder: str, spec: Spec) -> Spec:
    """The spec with its root and layers as they really are. Raises ConfigError where one lies outside the folder.

    Below the folder lie trees that untrusted programs wrote, with links to anywhere. So what is named must exist and
    really lie inside, links followed; and what is made is always an entry of the folder itself.
    """
    root = spec.root and inside(folder, spec.root)
    return dataclasses.replace(spec, root=root, layers=tuple(inside(folder, layer) for layer in spec.layers))


def inside(folder: str, path: str) -> str:
    """The real path of a directory in the folder. Raises ConfigError."""
    real_folder = _real(folder, path)
    try:
        real = Path(path).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        raise ConfigError(f"sandbox layer '{path}' is not a directory") from None
    # What is still being written could yet become a link; a finished tree does not change.
    below = real.parts[len(real_folder.parts) :]
    if not real.is_relative_to(real_folder) or any(part.endswith(UNFINISHED) for part in below):
        raise ConfigError(f"'{path}' is not in the sandbox worker's folder {real_folder}")
    return str(real)


def new(folder: str, path: str) -> str:
    """The real path of a directory to be made. Raises ConfigError."""
    real_folder, target = _real(folder, path), Path(path)
    elsewhere = Path(os.path.realpath(target.parent)) != real_folder
    if elsewhere or target.name in ("", "..") or target.name.endswith(UNFINISHED):
        raise ConfigError(f"a snapshot must be named '{real_folder}/NAME' on this sandbox worker, not '{path}'")
    return str(real_folder / target.name)


def _real(folder: str, path: str) -> Path:
    if not folder:
        raise ConfigError(f"this sandbox worker was started without --folder, so it has no path '{path}'")
    return Path(folder).resolve()


if __name__ == "__main__":
    sys.exit(main())
