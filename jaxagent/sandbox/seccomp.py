"""The system call filter, as a classic BPF program: what agents' programs never need and kernels have had bugs in.

Refused calls fail with EPERM; clone3, whose flags a filter cannot see, calls of another ABI and calls newer than this
list fail with ENOSYS, so that libraries fall back to what can be checked. Numbers are those of the kernel's tables for
the two architectures.

Sockets are of three families and two protocols, and have only the options of `OPTIONS`: the kernel charges to nobody
what others make it keep (netlink's messages, keys of TCP, lists of multicast groups, errors that nobody reads). Filters
that a program installs itself, on sockets or for its own calls, are refused too: the memory for compiled filters is
one number for the whole host (net.core.bpf_jit_limit), and when it is used up no sandbox can start.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
FIRST_UNKNOWN = 467  # of both tables; calls of x32 have larger numbers still
NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} and, below 0x100, NEWTIME
FAMILIES = (1, 2, 10)  # unix, inet, inet6; everything else (netlink, vsock, packet, alg, ...) is refused
PROTOCOLS = (0, 6, 17)  # of inet and inet6: the type's own one, TCP, UDP; not MPTCP, SCTP, ICMP, ...

PRCTL = {"x86_64": 157, "aarch64": 167}
SET_SECCOMP = 22  # of prctl; a kernel without such filters says EINVAL
SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
# level: options that setsockopt grants; every other one of every level is ENOPROTOOPT, as on a kernel without it.
OPTIONS = {
    0: (1, 2, 8, 10, 12, 13, 15, 18, 20, 24, 32, 33, 34, 49, 51),  # TOS, TTL, PKTINFO, MTU_DISCOVER, ..., not groups
    1: (*range(2, 7), 9, 10, 12, 13, 15, 16, *range(18, 22), 25, 29, 34, 35, 40, 42, 45, 47, 49, 63, 64, 66, 67, 76),
    6: (*range(1, 11), 12, 13, 18, 23, 25, 30, 34, 36),  # NODELAY, ..., not MD5SIG, AO_ADD_KEY, ULP, REPAIR
    17: (1, 103, 104),  # CORK, SEGMENT, GRO
    41: (16, 17, 18, 19, 23, 26, 49, 51, 62, 66, 67, 70, 72, 78),  # UNICAST_HOPS, ..., V6ONLY, not groups
}
# Options that do nothing and say that they did: a request for larger buffers is only a wish, and the C library asks for
# errors of datagrams, which it can do without. level: options.
IGNORED = {0: (11,), 1: (7, 8), 41: (25,)}  # IP_RECVERR; SO_SNDBUF, SO_RCVBUF; IPV6_RECVERR

# Calls that fail with ENOSYS, as on a kernel that was built without them. name: (x86_64, aarch64)
ABSENT = {
    "clone3": (435, 435),
    "io_setup": (206, 0),  # requests of all users together are limited by fs.aio-max-nr
    "seccomp": (317, 277),
}

# name: (x86_64, aarch64); -1 where an architecture lacks the call
REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, -1),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, -1),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}

# Calls about owners and users. With one user id mapped they cannot be granted, but programs that unpack and install
# (tar, dpkg, useradd) end when they are refused; so while an image is built they do nothing and say that they did.
PRETENDED = {
    "capset": (126, 91),
    "chown": (92, -1),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "lchown": (94, -1),
    "setfsgid": (123, 152),
    "setfsuid": (122, 151),
    "setgid": (106, 144),
    "setgroups": (116, 159),
    "setregid": (114, 143),
    "setresgid": (119, 149),
    "setresuid": (117, 147),
    "setreuid": (113, 145),
    "setuid": (105, 146),
}

# Refused but to user 0, whose images come with debuggers: with them one process writes into another. What an agent
# could gain by that is the place of a process that is spared while the test looks at the process table.
TRACING = {"process_vm_writev": (311, 271), "ptrace": (101, 117)}
PRLIMIT64 = {"x86_64": 302, "aarch64": 261}  # refused for others: process 1 could be starved of descriptors

LOAD, JUMP_EQ, JUMP_GE, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER, ARCH, ARGUMENT_0, ARGUMENT_1, ARGUMENT_2 = 0, 4, 16, 24, 32  # offsets in seccomp_data; low halves


def program(machine: str | None = None, pretend: bool = False, tracing: bool = False) -> bytes:
    """The filter for this machine; empty where its numbers are not known.

    Args:
      machine: as `platform.machine` says it.
      tracing: allow the calls of `TRACING`.
      pretend: answer the calls of `PRETENDED` with success, without doing anything.
    """
    machine = machine or platform.machine()
    if machine not in AUDIT:
        return b""
    column = list(AUDIT).index(machine)
    unknown = (RETURN, 0, 0, FAIL | errno.ENOSYS)
    code = [(LOAD, 0, 0, ARCH), (JUMP_EQ, 1, 0, AUDIT[machine]), unknown]
    code += [(LOAD, 0, 0, NUMBER), (JUMP_GE, 0, 1, FIRST_UNKNOWN), unknown]
    refused = REFUSED if tracing else {**REFUSED, **TRACING}
    for calls, error in ((refused, errno.EPERM), (PRETENDED if pretend else {}, 0), (ABSENT, errno.ENOSYS)):
        for number in [numbers[column] for numbers in calls.values() if numbers[column] >= 0]:
            code += [(JUMP_EQ, 0, 1, number), (RETURN, 0, 0, FAIL | error)]
    code += _refused_if(PRLIMIT64[machine], (JUMP_EQ, 1, 0, 0), errno.EPERM)
    code += _refused_if(PRCTL[machine], (JUMP_EQ, 0, 1, SET_SECCOMP), errno.EINVAL)
    code += _options(SETSOCKOPT[machine])
    code += _refused_if(CLONE[machine], (JUMP_SET, 0, 1, NAMESPACES & ~0xFF), errno.EPERM)
    for call in (SOCKET[machine], SOCKETPAIR[machine]):
        code += [(JUMP_EQ, 0, 6 + len(FAMILIES) + len(PROTOCOLS), call), (LOAD, 0, 0, ARGUMENT_0)]
        code += _one_of(FAMILIES, errno.EAFNOSUPPORT)
        code += [(JUMP_EQ, 2 + len(PROTOCOLS), 0, FAMILIES[0]), (LOAD, 0, 0, ARGUMENT_2)]
        code += [*_one_of(PROTOCOLS, errno.EPROTONOSUPPORT), (RETURN, 0, 0, ALLOW)]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("<HBBI", *line) for line in code)  # operation, jump if true, jump if false, constant


def _refused_if(call: int, test: tuple[int, int, int, int], error: int) -> list[tuple[int, int, int, int]]:
    """A call whose first argument decides: the test goes on to the error, or jumps over it."""
    allowed = (RETURN, 0, 0, ALLOW)
    return [(JUMP_EQ, 0, 4, call), (LOAD, 0, 0, ARGUMENT_0), test, (RETURN, 0, 0, FAIL | error), allowed]


def _one_of(values: Sequence[int], error: int) -> list[tuple[int, int, int, int]]:
    """Goes on where what was loaded is one of these, else fails with the error."""
    tests = [(JUMP_EQ, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*tests, (RETURN, 0, 0, FAIL | error)]


def _options(call: int) -> list[tuple[int, int, int, int]]:
    """`setsockopt`, of this number."""
    levels = []
    for level, options in OPTIONS.items():
        ignored = IGNORED.get(level, ())
        body = [(LOAD, 0, 0, ARGUMENT_2)]
        body += [(JUMP_EQ, len(ignored) - i, 0, option) for i, option in enumerate(ignored)]
        body += [(JUMP_GE, 1, 1, 0), (RETURN, 0, 0, FAIL)] if ignored else []
        body += [*_one_of(options, errno.ENOPROTOOPT), (RETURN, 0, 0, ALLOW)]
        levels += [(JUMP_EQ, 0, len(body), level), *body]
    levels.append((RETURN, 0, 0, FAIL | errno.ENOPROTOOPT))
    return [(JUMP_EQ, 0, len(levels) + 1, call), (LOAD, 0, 0, ARGUMENT_1), *levels]
