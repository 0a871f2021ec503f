"""A port inside that the host serves. The reasons are in `native/port.c`, which does the same."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct

from jaxagent.sandbox.init.host import HEADER, HostGone
from jaxagent.sandbox.init.session import Session

BACKLOG = 64
NO_SOCKET = (
    "this back end reaches the sandbox through a pipe, which carries no socket: use the namespaces or the bubblewrap "
    "back end"
)


def open_port(session: Session, number: int, data: bytes) -> None:
    """Answers O: listens at a port (0 = any free one) and sends the socket out. Raises OSError, and HostGone."""
    if len(data) != 2:
        raise OSError(errno.EINVAL, "a port's number is wanted")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(("127.0.0.1", struct.unpack("<H", data)[0]))
            listener.listen(BACKLOG)
        except OSError as failure:
            raise OSError(failure.errno, f"cannot listen inside: {failure.strerror}") from failure
        listener.setblocking(False)
        answer = struct.pack("<H", listener.getsockname()[1])
        frame = HEADER.pack(len(answer), ord("D"), number) + answer
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))]
        try:
            with socket.socket(fileno=os.dup(session.host.outgoing)) as outgoing:
                sent = outgoing.sendmsg([frame], rights)
        except OSError as failure:
            text = NO_SOCKET if failure.errno == errno.ENOTSOCK else f"cannot send the socket out: {failure.strerror}"
            raise OSError(failure.errno, text) from failure
    if sent != len(frame):
        raise HostGone
