"""What is kept of a command's output."""

from __future__ import annotations

import os
import struct

CHUNK_BYTES = 65536
MOST_AT_ONCE_BYTES = 1 << 22


class Output:
    """Keeps the first half of the allowed bytes and the last half; counts all.

    Args:
      keep: bytes that are kept, at most.
    """

    def __init__(self, keep: int) -> None:
        self._first, self._last = keep // 2, keep - keep // 2
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def take(self, data: bytes) -> None:
        """Adds what was printed."""
        self.total += len(data)
        room = self._first - len(self._head)
        self._head += data[: max(room, 0)]
        self._tail += data[max(room, 0) :]
        if len(self._tail) > self._last + CHUNK_BYTES:  # not each time, since it moves all that is kept
            self._cut()

    def read(self, fd: int, most: int = MOST_AT_ONCE_BYTES) -> bool:
        """Takes what is there, but never for ever. False when nobody writes any more."""
        start = self.total
        while self.total - start < most:
            try:
                data = os.read(fd, CHUNK_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self.take(data)
        return True

    def result(self, status: int, flags: int) -> bytes:
        """The answer to the host: status, flags, how much there was, and what is kept of it."""
        self._cut()
        return struct.pack("<iBQ", status, flags, self.total) + self._head + self._tail

    def _cut(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._last)]
