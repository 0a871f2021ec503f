"""The root of a sandbox: an overlay over read-only layers, what is bound into it, /dev and /proc.

The reasons for each step are in `native/launch.c`, which does the same.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct

from jaxagent.sandbox.init.config import Config
from jaxagent.sandbox.init.host import Host
from jaxagent.sandbox.init.system import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    checked,
    libc,
    mount,
    write_file,
)

TERMINALS = 24  # of one sandbox
NEW_USER_NAMESPACE = 0x10000000
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}  # numbers of system calls
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_IDMAP, AT_EMPTY_PATH, AT_RECURSIVE = 1, 4, 0x100000, 0x1000, 0x8000
AT_FDCWD = -100
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def open_layers(config: Config, host_uid: int, disk_uid: int) -> list[int]:
    """The layers as mounts that stand nowhere yet, in which files of `disk_uid` belong to `host_uid`. Needs root.

    Raises:
      OSError: the kernel or a file system cannot do it.
    """
    namespace, layers = _id_map(disk_uid, host_uid), []
    attributes = struct.pack("<QQQQ", MOUNT_ATTR_IDMAP, 0, 0, namespace)
    for path in config.lower.split(":"):
        flags = OPEN_TREE_CLONE | os.O_CLOEXEC
        fd = checked(libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), "id-mapped layers")
        mapped = libc.syscall(MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, attributes, len(attributes))
        checked(mapped, "id-mapped layers")
        layers.append(fd)
    os.close(namespace)
    return layers


def _id_map(disk_uid: int, host_uid: int) -> int:
    """A user namespace whose map is the change of ids that a mount is to make. A process has to make one."""
    ready, made = os.pipe2(os.O_CLOEXEC)
    until, hold = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.close(hold)
            checked(libc.unshare(NEW_USER_NAMESPACE), "id-mapped layers: a user namespace")
            os.write(made, b"x")
            os.read(until, 1)
        finally:
            os._exit(0)
    os.close(made)
    os.close(until)
    if not os.read(ready, 1):
        raise OSError(errno.EPERM, "id-mapped layers: a user namespace cannot be made")
    try:
        for name in ("uid_map", "gid_map"):
            write_file(f"/proc/{child}/{name}", f"{disk_uid} {host_uid} 1")
    except OSError as failure:
        raise OSError(failure.errno, f"id-mapped layers: a map: {failure.strerror}") from failure
    fd = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    os.close(hold)
    os.close(ready)
    os.waitpid(child, 0)
    return fd


def make_root(config: Config, host: Host, layers: list[int]) -> None:
    """Makes the root and enters it.

    Args:
      layers: what `open_layers` returned; [] for those at `config.lower` as they are.

    Raises:
      OSError: a step failed; its name is in the text.
    """
    base, root = config.mount_point, config.mount_point + "/root"
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, config.tmpfs)
    for name in ("/root", "/upper", "/work"):
        os.mkdir(base + name, 0o755)
    lower = _place_layers(base, layers) if layers else config.lower
    options = f"lowerdir={lower},upperdir={base}/upper,workdir={base}/work,userxattr"
    mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, options)
    _send_directory(host, base + "/upper")
    for source, target in config.binds:
        _bind_read_only(config, source, root + target)
    _make_devices(base, root)
    _make_proc(config, root)
    os.chdir(root)
    checked(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    for source, target in config.read_only:  # only now, since an image's links must lead into the image
        if os.path.exists(source):
            _bind_read_only(config, source, target)
    for path in filter(os.path.exists, config.open):
        mount(path, path, None, MS_BIND)
        mount(None, path, None, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)


def _place_layers(base: str, layers: list[int]) -> str:
    """Mounts them below `base`; returns the text for overlayfs."""
    paths = []
    for i, fd in enumerate(layers):
        paths.append(f"{base}/layer{i}")
        os.mkdir(paths[-1], 0o755)
        path = os.fsencode(paths[-1])
        moved = libc.syscall(MOVE_MOUNT, fd, b"", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH)
        checked(moved, "id-mapped layers: into place")
        os.close(fd)
    return ":".join(paths)


def _send_directory(host: Host, path: str) -> None:
    """Gives the host a descriptor of the upper directory, for snapshots."""
    upper = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with socket.socket(fileno=host.auxiliary) as side:
        side.sendmsg([b"u"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [upper]))])
    os.close(upper)


def _bind_read_only(config: Config, source: str, target: str) -> None:
    """Shows a directory at another path, read-only with everything below."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = struct.pack("<QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)
    path = os.fsencode(target)
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes, len(attributes)) == 0:
        return
    config.gaps.append("mounts below read-only directories are as they are on the host (mount_setattr)")
    try:
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    except OSError:
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _make_devices(base: str, root: str) -> None:
    """/dev: six devices of the host, terminals of its own, shared memory that counts as disk."""
    os.mkdir(base + "/dev", 0o755)
    mount(base + "/dev", root + "/dev", None, MS_BIND)
    for name in DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_WRONLY | os.O_CREAT, 0o666))
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    os.mkdir(root + "/dev/pts", 0o755)
    options = f"newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}"
    mount("devpts", root + "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    os.symlink("pts/ptmx", root + "/dev/ptmx")
    os.symlink("/proc/self/fd", root + "/dev/fd")
    for i, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{i}", f"{root}/dev/{name}")
    os.mkdir(base + "/shm")
    os.chmod(base + "/shm", 0o1777)
    os.mkdir(root + "/dev/shm", 0o755)
    mount(base + "/shm", root + "/dev/shm", None, MS_BIND)
    mount(None, root + "/dev", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _make_proc(config: Config, root: str) -> None:
    """/proc, with settings of its own that are read-only then."""
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    write_settings(config, root)
    _bind_read_only(config, root + "/proc/sys", root + "/proc/sys")


def write_settings(config: Config, root: str = "") -> None:
    """Those of the new namespaces. Older kernels lack some, or have one for the whole host."""
    for path, value in config.settings:
        try:
            write_file(f"{root}/proc/sys/{path}", value)
        except OSError as failure:
            config.gaps.append(f"{path}: {failure.strerror}")
