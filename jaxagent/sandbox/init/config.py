"""What the sandbox is made of, as the host's directives say it before "go"."""

from __future__ import annotations

import os
import struct

from jaxagent.sandbox.init.host import Host

# What each type of directive (see `wire.Directives`) sets.
NUMBERS = {"p": "parent", "u": "host_uid", "d": "disk_uid", "i": "inner_uid", "n": "host_network"}
TEXTS = {"m": "mount_point", "t": "tmpfs", "l": "lower", "h": "hostname", "w": "directory"}
LISTS = {"g": "cgroups", "a": "open"}
PAIRS = {"b": "binds", "o": "read_only", "k": "settings"}


class Config:
    """The values of all directives."""

    def __init__(self) -> None:
        self.parent = 0  # process id of whoever starts this program; 0 = not checked
        self.host_uid: int | None = None  # to become; None = the user that this process already is
        self.disk_uid: int | None = None  # owner of the layers' files on disk, where that is another
        self.inner_uid = 0  # what programs inside see
        self.host_network = 0  # 1 = the host's network, only while an image is built
        self.mount_point = self.tmpfs = self.lower = self.hostname = ""
        self.directory = "/"
        self.cgroups: list[str] = []  # files that take this process's id
        self.binds: list[tuple[str, str]] = []  # host directory, path inside
        self.read_only: list[tuple[str, str]] = []  # both inside
        self.open: list[str] = []  # writable although below one of `read_only`
        self.settings: list[tuple[str, str]] = []  # path below /proc/sys, value
        self.gaps: list[str] = []  # protections that cannot be had here, for the host to tell
        self.mercy = -1  # process 1's own oom_score_adj, as a file that stays open
        self.limits: list[tuple[int, int]] = []  # resource, value
        self.environment: dict[str, str] = {}
        self.filter = b""  # seccomp

    def read(self, host: Host) -> None:
        """Reads directives up to "go".

        Raises:
          ValueError: an unknown one.
          HostGone: the host closed the connection.
        """
        while True:
            kind, _, data = host.read()
            if kind == "z":
                return
            words = [os.fsdecode(word) for word in data.split(b"\0")[:-1]]
            if kind in NUMBERS:
                setattr(self, NUMBERS[kind], struct.unpack("<I", data)[0])
            elif kind in TEXTS:
                setattr(self, TEXTS[kind], words[0])
            elif kind in LISTS:
                getattr(self, LISTS[kind]).append(words[0])
            elif kind in PAIRS:
                getattr(self, PAIRS[kind]).append((words[0], words[1]))
            elif kind == "e":
                name, _, value = words[0].partition("=")
                self.environment[name] = value
            elif kind == "r":
                self.limits.append(struct.unpack("<IQ", data))
            elif kind == "s":
                self.filter = data
            else:
                raise ValueError("unknown directive")
