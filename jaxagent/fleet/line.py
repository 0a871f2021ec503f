"""One HTTP/1.1 connection, kept between calls, with a deadline for every call as a whole.

`http.client` alone has a time-out for each read, which a server that drips bytes never meets.
"""

from __future__ import annotations

import http.client
import math
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

CONNECT_S = 10.0


class Reply(NamedTuple):
    """An answer."""

    status: int
    headers: Mapping[str, str]  # names as in "Fleet-Sum", whatever a proxy has made of them
    body: bytes


class Line:
    """A connection. One thread at a time.

    Args:
      quiet_s: in which something must come, or go, and the connection be there.
    """

    def __init__(self, host: str, port: int, quiet_s: float = math.inf):
        self._http, self._quiet_s = http.client.HTTPConnection(host, port), quiet_s
        self._wire: _Wire | None = None
        self.used = False  # whether an answer came over it before the newest request

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str], seconds: float, most: int) -> Reply:
        """Sends a request and reads the answer.

        Args:
          seconds: for all of it.
          most: bytes of an answer.

        Raises:
          OSError, http.client.HTTPException: it failed, or took too long; the next call connects anew.
        """
        deadline = time.monotonic() + seconds
        try:
            self.used = self._wire is not None
            if self._wire is None:
                limit_s = min(CONNECT_S, self._quiet_s, seconds)
                raw = socket.create_connection((self._http.host, self._http.port), limit_s)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._wire = self._http.sock = _Wire(fileno=raw.detach())
                self._wire.quiet_s = self._quiet_s
            self._wire.deadline = deadline
            self._http.request(method, path, body, dict(headers))
            answer = self._http.getresponse()
            content = answer.read(most + 1)
            if len(content) > most:
                raise http.client.HTTPException(f"the answer has more than {most} bytes")
            if not answer.isclosed():
                raise http.client.HTTPException("the answer was cut off")
            if answer.will_close:
                self.close()
            return Reply(answer.status, {name.title(): value for name, value in answer.headers.items()}, content)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the connection."""
        self._wire = None
        self._http.close()


class _Wire(socket.socket):
    """A socket with one deadline for all that is sent and received until the next one."""

    deadline, quiet_s = 0.0, math.inf

    def sendall(self, *data: Any) -> None:
        self._set()
        super().sendall(*data)  # its time-out is for the whole

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self._set()
        return super().recv_into(buffer, nbytes, flags)

    def _set(self) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline of the call is over")
        self.settimeout(min(left_s, self.quiet_s))
