"""Descriptors that come out of a sandbox with the bytes of a Unix socket."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence

MOST_DESCRIPTORS = 4  # taken from one message; the kernel drops the others
READ_BYTES = 2**16


def descriptors(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in what `recvmsg` returned beside the bytes. The caller closes them."""
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


@contextlib.contextmanager
def taking(
    transport: asyncio.Transport, data_received: Callable[[bytes], None], on_lost: Callable[[], None], fds: list[int]
) -> Iterator[None]:
    """Reads a transport's socket in its place, since asyncio drops the descriptors that come with the bytes.

    Args:
      data_received: gets the bytes.
      on_lost: called when the other end has closed the connection.
      fds: descriptors are added to it; the caller closes them.
    """
    loop = asyncio.get_running_loop()
    own = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))  # asyncio watches the other one

    def read() -> None:
        space = socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
        try:
            data, control, _, _ = own.recvmsg(READ_BYTES, space, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, control = b"", []
        fds.extend(descriptors(control))
        if data:
            return data_received(data)
        loop.remove_reader(own)
        return on_lost()

    transport.pause_reading()
    loop.add_reader(own, read)
    try:
        yield
    finally:
        loop.remove_reader(own)
        own.close()
        if not transport.is_closing():
            transport.resume_reading()
