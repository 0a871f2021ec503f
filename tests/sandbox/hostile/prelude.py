"""What hostile programs share. Copied into the sandbox beside them, with `host.json`: where things lie on the host."""

import ctypes
import json
import pathlib
import socket

HOST = json.loads(pathlib.Path(__file__).with_name("host.json").read_text())
BAIT, DIRECTORY, ABSTRACT = HOST["bait"], HOST["directory"], HOST["abstract"]
TCP, UDP, OUTSIDER, OWNER, INODES = HOST["tcp"], HOST["udp"], HOST["outsider"], HOST["owner"], HOST["inodes"]
MEMORY_KEY, MEMORY_ID, SYSCTLS_READ_ONLY = HOST["memory_key"], HOST["memory_id"], HOST["sysctls_read_only"]
TERMINALS, INOTIFY, CORES = HOST["terminals"], HOST["inotify"], HOST["cores"]
libc = ctypes.CDLL(None, use_errno=True)


def won(what=""):
    """Reports an escape."""
    print("ESC" + "APED", what, flush=True)  # in two parts: a program's text, printed, is no escape


def syscall(*arguments):
    """syscall(2) with long arguments."""
    return libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])


def trying(function, *arguments):
    """Calls it; an exception is printed."""
    try:
        return function(*arguments)
    except Exception as failure:
        print(type(failure).__name__, failure, flush=True)


def connect(family, kind, address):
    """An escape if something answers."""
    with socket.socket(family, kind) as s:
        s.settimeout(1)
        s.connect(address)
        s.send(b"x")
        won(address)
