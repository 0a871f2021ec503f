"""From a process of the host to process 1 of a new sandbox: namespaces, the root, limits, no privileges.

The reasons for each step are in `native/launch.c`, which does the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct

from jaxagent.sandbox.init.config import Config
from jaxagent.sandbox.init.host import Host
from jaxagent.sandbox.init.root import make_root, open_layers
from jaxagent.sandbox.init.system import (
    AMBIENT,
    CAPBSET_DROP,
    DUMPABLE,
    NO_NEW_PRIVS,
    SECCOMP,
    checked,
    die_with_parent,
    libc,
    prctl,
    write_file,
)

NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000  # user, pid, mount, ipc, uts
NEW_NETWORK = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
CAPSET = {"x86_64": 126, "aarch64": 91}  # numbers of the system call
CAPABILITY_VERSION, CAPABILITIES = 0x20080522, 64
AMBIENT_CLEAR_ALL, SECCOMP_FILTER = 4, 2


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def launch(config: Config, host: Host) -> None:
    """Returns as process 1 of the new sandbox; the process that called it waits for that one's end, and ends.

    Raises:
      OSError: a step failed; its name is in the text.
    """
    die_with_parent(config.parent)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for path in config.cgroups:
        write_file(path, "0")
    layers = _become_user(config)
    prctl(DUMPABLE, 1)
    uid, gid = os.geteuid(), os.getegid()
    checked(libc.unshare(NEW_NAMESPACES | (0 if config.host_network else NEW_NETWORK)), "new namespaces")
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{config.inner_uid} {uid} 1")
    write_file("/proc/self/gid_map", f"{config.inner_uid} {gid} 1")
    prctl(DUMPABLE, 0)
    child = os.fork()
    if child:
        host.close()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    die_with_parent(0)
    os.setsid()
    make_root(config, host, layers)
    hostname = config.hostname.encode()
    checked(libc.sethostname(hostname, len(hostname)), "hostname")
    if not config.host_network:
        _raise_loopback()


def _become_user(config: Config) -> list[int]:
    """Under root, becomes the sandbox's user; returns the layers' mounts where their files belong to another one."""
    layers: list[int] = []
    if config.host_uid is None or os.geteuid() != 0:
        return layers
    if config.disk_uid not in (None, config.host_uid):
        layers = open_layers(config, config.host_uid, config.disk_uid)
    os.setgroups([])
    os.setresgid(*[config.host_uid] * 3)
    os.setresuid(*[config.host_uid] * 3)
    die_with_parent(config.parent)  # the kernel forgets it where the user changes
    return layers


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def lock_down(config: Config) -> None:
    """Resource limits, no new privileges, no capabilities, the system call filter. Raises OSError."""
    for kind, value in config.limits:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    os.umask(0o022)
    prctl(NO_NEW_PRIVS, 1)
    with contextlib.suppress(OSError):  # past the last one, or not ours to drop, where no_new_privs covers it
        for capability in range(CAPABILITIES):
            prctl(CAPBSET_DROP, capability)
    prctl(AMBIENT, AMBIENT_CLEAR_ALL)
    header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
    checked(libc.syscall(CAPSET[os.uname().machine], header, b"\0" * 24), "capset")
    prctl(DUMPABLE, 1)
    try:
        config.mercy = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    except OSError as failure:
        config.gaps.append(f"programs do not die before process 1: {failure.strerror}")
    prctl(DUMPABLE, 0)
    if config.filter:
        program = Program(len(config.filter) // 8, config.filter)
        prctl(SECCOMP, SECCOMP_FILTER, ctypes.addressof(program))
