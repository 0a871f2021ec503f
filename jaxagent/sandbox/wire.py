"""Frames between the host and the program inside a sandbox: u32 size, u8 type, u32 id, data; all little-endian.

Before "go" (z) the host sends directives, one per frame, that say what to make (see `number`, `texts` and
`limit`; s: the seccomp filter). Then requests:

  R  run in the shell: f64 deadline_s, u64 bytes to keep, u64 flood bytes, 16 characters nonce, 0, quoted command, 0
  X  fresh process: the same three numbers, u32 number of arguments, then directory, arguments, environment, each with 0
  G  get a file: u64 most bytes, path, 0        P  put: u32 mode, u32 path length, path, 0, contents
  L  list: u32 most entries, path, 0            K  kill every process; or all but some, which are
                                                stopped: u32 pid, u64 start of each
  O  open a port: u16 number, 0 = any free one; the answer D has its number, and carries the listening socket

and the inside answers H (ready, with the protections that it could not make), D (done, with data) or E (i32 errno,
message). Whatever comes from inside is untrusted: sizes are bounded and contents are parsed as data.
"""

from __future__ import annotations

import array
import re
import socket
import struct
from collections.abc import Mapping, Sequence

from jaxagent.sandbox.base import CommandResult, Entry, SandboxError

HEADER = struct.Struct("<IBI")
RUN = struct.Struct("<dQQ")
DONE = struct.Struct("<iBQ")
ENTRY = struct.Struct("<cIQH")
MAX_FRAME_BYTES = 80 * 2**20
TIMED_OUT, SHELL_LOST, FLOODED = 1, 2, 4
KINDS = {b"f": "file", b"d": "directory", b"l": "link", b"o": "other"}


def frame(kind: str, data: bytes = b"", number: int = 0) -> bytes:
    """One frame."""
    return HEADER.pack(len(data), ord(kind), number) + data


def text(value: str) -> bytes:
    """A zero-ended string; paths keep undecodable bytes."""
    return value.encode("utf-8", "surrogateescape") + b"\0"


def shell_word(command: str) -> bytes:
    """The command as one word for any POSIX shell, free of the bytes that a terminal acts on.

    NUL bytes are dropped: no shell has them. ^C, which the terminal would turn into a signal, is written as an escape.
    """
    command = command.replace("\0", "")
    if "\x03" not in command:
        return ("'" + command.replace("'", "'\\''") + "'").encode("utf-8", "surrogateescape")
    escaped = re.sub(r"[\\\x03]", lambda m: "\\\\" if m[0] == "\\" else "\\0003", command).replace("'", "'\\''")
    return f"\"$(printf %b '{escaped}')\"".encode("utf-8", "surrogateescape")


def run_request(command: str, deadline_s: float, keep: int, flood: int, nonce: str) -> bytes:
    """The data of an R frame."""
    return RUN.pack(deadline_s, keep, flood) + nonce.encode() + b"\0" + shell_word(command) + b"\0"


def execute_request(
    argv: Sequence[str], env: Mapping[str, str], directory: str, deadline_s: float, keep: int, flood: int
) -> bytes:
    """The data of an X frame. Raises SandboxError for arguments that no program can have."""
    strings = [directory, *argv, *(f"{k}={v}" for k, v in env.items())]
    if not argv or any("\0" in s for s in strings) or len(strings) > 4000:
        raise SandboxError("a program needs 1 to 4000 arguments and variables, without NUL bytes")
    return RUN.pack(deadline_s, keep, flood) + struct.pack("<I", len(argv)) + b"".join(text(s) for s in strings)


def parse_result(data: bytes, duration_s: float) -> CommandResult:
    """The answer to R or X."""
    if len(data) < DONE.size:
        raise SandboxError("a malformed answer came out of the sandbox")
    status, flags, total = DONE.unpack_from(data)
    return CommandResult(
        output=data[DONE.size :],
        exit_code=status & 255,
        timed_out=bool(flags & TIMED_OUT),
        flooded=bool(flags & FLOODED),
        shell_lost=bool(flags & SHELL_LOST),
        output_total_bytes=total,
        duration_s=duration_s,
    )


def parse_entries(data: bytes) -> list[Entry]:
    """The answer to L."""
    entries, at = [], 0
    try:
        while at < len(data):
            kind, mode, size, length = ENTRY.unpack_from(data, at)
            at += ENTRY.size + length
            path = data[at - length : at].decode("utf-8", "surrogateescape")
            entries.append(Entry(path, KINDS[kind], mode & 0o7777, size))
    except (struct.error, KeyError) as failure:
        raise SandboxError("a malformed listing came out of the sandbox") from failure
    return entries


def number(kind: str, value: int) -> bytes:
    """A directive: p parent pid, u host uid, d the layers' uid on disk, i inner uid, n 1 = the host's network."""
    return frame(kind, struct.pack("<I", value))


def texts(kind: str, *values: str) -> bytes:
    """g cgroup.procs, m mount point, t tmpfs options, l lower dirs, b bind, h hostname, e env, w directory.

    k: a setting below /proc/sys, and its value.
    """
    return frame(kind, b"".join(text(v) for v in values))


def limit(resource: int, value: int) -> bytes:
    """r: a resource limit, soft and hard."""
    return frame("r", struct.pack("<IQ", resource, value))


def descriptors(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in what `recvmsg` returned beside the bytes. The caller closes them."""
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
