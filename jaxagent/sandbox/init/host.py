"""The connection to the host: frames as `wire.py` describes them, over what were standard input and output."""

from __future__ import annotations

import fcntl
import os
import struct

HEADER = struct.Struct("<IBI")
MAX_FRAME_BYTES = 80 << 20
MAX_ERROR_BYTES = 500
READ_BYTES = 1 << 20  # at once


class HostGone(Exception):
    """The other end of the connection is closed: the sandbox ends."""


class Host:
    """The connection's descriptors, moved away from where programs could reach them."""

    def __init__(self) -> None:
        self.incoming = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
        self.outgoing = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
        self.auxiliary = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 10)  # to `launch`, a socket for the upper directory
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        if null > 2:
            os.close(null)

    def read(self) -> tuple[str, int, bytes]:
        """(type, id, data) of the next frame. Raises HostGone."""
        size, kind, number = HEADER.unpack(self._read(HEADER.size))
        if size > MAX_FRAME_BYTES:
            raise HostGone
        return chr(kind), number, self._read(size)

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.incoming, min(size, READ_BYTES))
            if not part:
                raise HostGone
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, kind: str, number: int, data: bytes = b"") -> None:
        """Sends a frame. Raises HostGone."""
        view = memoryview(HEADER.pack(len(data), ord(kind), number) + data)
        try:
            while view:
                view = view[os.write(self.outgoing, view) :]
        except OSError as failure:
            raise HostGone from failure

    def write_error(self, number: int, failure: Exception, text: str = "") -> None:
        """Sends why a request, or the start (number 0), failed. Raises HostGone."""
        what = text or (failure.strerror if isinstance(failure, OSError) else str(failure)) or "failed"
        code = getattr(failure, "errno", 0) or 0
        self.write("E", number, struct.pack("<i", code) + what.encode()[:MAX_ERROR_BYTES])

    def close(self) -> None:
        """Closes the three descriptors, in a process that does not serve."""
        for fd in (self.incoming, self.outgoing, self.auxiliary):
            os.close(fd)
