"""Weights over HTTP: whoever has chunks of a version hands them on. A few threads, no JAX, nothing that is not a chunk.

    GET /v1/manifest/{version}    what the version is; 404 where it is not here whole
    GET /v1/base/0                the same of the frozen weights under a run's adapters
    GET /v1/chunk/{SHA-256}       a chunk's bytes, also of a version that is still being copied
    GET /v1/file/{name}           a file beside the versions, of those that are SHARED

Every request carries the run's token. Who asks for what is not here gets 404, never something else. No more than MOST
requests are answered at once; others are told to come again (503), and there are MOST_CONNECTIONS. What a chunk is its
reader decides, by its digest: a server that errs or lies costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from jaxagent.config.command import bound_socket
from jaxagent.fleet.weights import BASE, MANIFEST, path_of
from jaxagent.fleet.wire import ANY, LOCAL, url_of
from jaxagent.io.connections import has_token

SHARED = ("probe.json",)
MOST = 32  # answers at once
MOST_CONNECTIONS = 512
WAIT_S = 5.0  # for one of them to end
IDLE_S = 60.0  # a connection that is silent, or whose reader takes nothing, for so long is closed
RETRY_S = 1
LOOK_S = 0.2  # between two looks whether it is to end
_WHAT = r"(?P<of>manifest|base)/(?P<version>\d{1,9})|chunk/(?P<digest>[0-9a-f]{64})|file/(?P<name>[a-z][a-z_.]{0,60})"
_PATH = re.compile(f"/v1/(?:{_WHAT})")


class WeightServer:
    """Serves folders of versions. Use as a context manager.

    Args:
      folders: of versions; looked through in this order.
      host, port: where to listen; port 0 = a free one, host 0.0.0.0 = on all addresses, those of IPv6 too.
      address: the host's name as others reach it; "" = `host`.

    Raises:
      ConfigError: the address is taken, or not this machine's.
    """

    def __init__(
        self,
        folders: Sequence[str | pathlib.Path],
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        address: str = "",
        most: int = MOST,
    ):
        self._folders = [pathlib.Path(folder) for folder in folders]
        self.token = token.encode()
        self._places = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._sent = self._refused = self._sending = 0
        self._http = _Server((host, port), functools.partial(_Handler, self))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(LOOK_S,), name="weights", daemon=True)
        self.url = url_of(address or host, self._http.server_address[1])

    def __enter__(self) -> WeightServer:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def numbers(self) -> dict[str, float]:
        """Answers under way, bytes that were sent, and requests that were told to come again."""
        with self._lock:
            sent_bytes, refused, sending = map(float, (self._sent, self._refused, self._sending))
        return {"sending": sending, "weights_sent_bytes": sent_bytes, "weights_busy": refused}

    def find(self, path: str) -> BinaryIO | None:
        """The file that a request means, open; None: it is not here."""
        request = _PATH.fullmatch(path)
        if request is None:
            return None
        if request["name"]:
            paths = [folder / request["name"] for folder in self._folders if request["name"] in SHARED]
        elif request["version"]:
            folders = [folder / BASE for folder in self._folders] if request["of"] == BASE else self._folders
            paths = [path_of(folder, int(request["version"])) / MANIFEST for folder in folders]
        else:
            folders = [each for folder in self._folders for each in (folder, folder / BASE)]
            paths = [place / f"{request['digest']}.bin" for folder in folders for place in _places(folder)]
        for file in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return file.open("rb")
        return None

    @contextlib.contextmanager
    def place(self) -> Iterator[bool]:
        """One of the places for answers; yields whether there was one."""
        got = self._places.acquire(timeout=WAIT_S)
        with self._lock:
            self._sending += got
        try:
            yield got
        finally:
            with self._lock:
                self._sending -= got
            if got:
                self._places.release()

    def count(self, sent_bytes: int) -> None:
        """Bytes that were sent; 0: a request was told to come again."""
        with self._lock:
            self._sent += sent_bytes
            self._refused += not sent_bytes


def listening_host(address: str) -> str:
    """Where a process listens whom others reach by this name: on all addresses, unless the name is of this machine."""
    return LOCAL if address in ("", LOCAL, "localhost") else "0.0.0.0"


def _places(folder: pathlib.Path) -> list[pathlib.Path]:
    """Where chunks lie: versions, and versions that are being copied. Newest first: that is what is asked for."""
    with contextlib.suppress(FileNotFoundError):
        there = (path for path in folder.iterdir() if path.name.isdigit() or path.name.startswith(".copying-"))
        return sorted(there, key=lambda path: path.name.removeprefix(".copying-"), reverse=True)
    return []


class _Server(http.server.ThreadingHTTPServer):
    """A thread for each of so many connections; more are closed at once, and their readers come again."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Callable[..., http.server.BaseHTTPRequestHandler]):
        self._connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound_socket("" if address[0] in ANY else address[0], address[1])
        self.server_address = self.socket.getsockname()
        self.server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In the thread that accepts."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the connection's own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that is gone is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def __init__(self, weights: WeightServer, *request: Any):
        self.weights = weights
        super().__init__(*request)  # which answers everything that comes

    def do_GET(self) -> None:
        """One request."""
        if not has_token({"Authorization": self.headers.get("Authorization", "")}, self.weights.token):
            self.close_connection = True
            return self._say(401, "the token is wrong")
        with self.weights.place() as place:
            if not place:
                self.weights.count(0)
                return self._say(503, "busy", {"Retry-After": str(RETRY_S)})
            file = self.weights.find(self.path)
            if file is None:
                return self._say(404, "not here")
            with file:
                self._send(file)

    def _send(self, file: BinaryIO) -> None:
        size = file.seek(0, 2)
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.flush()
        try:
            sent_bytes = self.connection.sendfile(file) if size else 0
        except OSError:  # the reader is gone, or too slow
            self.close_connection = True
            return
        self.weights.count(max(1, sent_bytes))

    def _say(self, status: int, text: str | bytes, headers: Mapping[str, str] | None = None) -> None:
        body = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests come by the thousand."""
