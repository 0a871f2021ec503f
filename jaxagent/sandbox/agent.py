"""What `native/` does, in Python: for hosts and images without a C compiler. Runs by itself (`python -I -S agent.py`).

    agent.py launch NAME   makes namespaces and a copy-on-write root, then serves as process 1
    agent.py agent NAME    only serves, inside a place that something else made

The protocol is in `wire.py`; the reasons are told in `native/agent.c` and `native/launch.c`, which this file follows.
Nothing may be imported after the root is changed, so all modules are loaded here.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import termios
import time
import warnings  # noqa: F401  (os.execvpe wants it, when it is too late)

TIMED_OUT, SHELL_LOST, FLOODED = 1, 2, 4
GRACE_S, DRAIN_S, OLD_CHANNELS, CHUNK = 0.3, 0.05, 16, 65536
TERMINALS, TERMINAL_S, INOTIFY_INSTANCES = 24, 5.0, 8
NO_TERMINAL = "cannot start a shell, since the host is out of terminals (raise kernel.pty.max there)"
MAX_FRAME = 80 << 20
NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000
NEW_NETWORK = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
PDEATHSIG, DUMPABLE, SECCOMP, CAPBSET_DROP, SUBREAPER, NO_NEW_PRIVS, AMBIENT = 1, 4, 22, 24, 36, 38, 47
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR, AT_RECURSIVE = 428, 429, 442, 0x8000
SHELLS = (
    ("/bin/bash", ["bash", "--norc", "--noprofile", "--noediting", "+H", "+o", "history", "-i"]),
    ("/usr/bin/bash", ["bash", "--norc", "--noprofile", "--noediting", "+H", "+o", "history", "-i"]),
    ("/bin/sh", ["sh", "-i"]),
)

libc = ctypes.CDLL(None, use_errno=True)


def checked(result, what):
    """Raises OSError with the name of what failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(*arguments):
    """prctl(2); the result is not checked."""
    return libc.prctl(*(ctypes.c_ulong(a) for a in [*arguments, 0, 0, 0, 0][:5]))


def mount(source, target, kind, flags, options=None):
    """mount(2)."""
    encode = lambda s: None if s is None else os.fsencode(s)  # noqa: E731
    checked(
        libc.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(options)),
        target,
    )


# ---- frames
class Owner:
    """The socket or pipes to the owner, moved away from where programs could reach them."""

    def __init__(self):
        self.incoming = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
        self.outgoing = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
        self.auxiliary = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 10)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        if null > 2:
            os.close(null)

    def _read(self, size):
        parts = []
        while size:
            part = os.read(self.incoming, min(size, 1 << 20))
            if not part:
                owner_gone()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def read(self):
        """(type, id, data) of the next frame."""
        size, kind, number = struct.unpack("<IBI", self._read(9))
        if size > MAX_FRAME:
            owner_gone()
        return chr(kind), number, self._read(size)

    def write(self, kind, number, data=b""):
        """Sends a frame."""
        view = memoryview(struct.pack("<IBI", len(data), ord(kind), number) + data)
        try:
            while view:
                view = view[os.write(self.outgoing, view) :]
        except OSError:
            owner_gone()

    def error(self, number, failure, text=""):
        """Sends why something failed."""
        what = text or (failure.strerror if isinstance(failure, OSError) else str(failure)) or "failed"
        self.write("E", number, struct.pack("<i", getattr(failure, "errno", 0) or 0) + what.encode()[:500])


owner: Owner
config: dict = {name: [] for name in ("binds", "read_only", "open", "cgroups", "limits", "layers")}
config |= {"environment": {}, "directory": "/", "filter": b""}


def read_config():
    """Directives up to "go"."""
    names = {"m": "mount_point", "t": "tmpfs", "l": "lower", "h": "hostname", "w": "directory"}
    while True:
        kind, _, data = owner.read()
        words = [os.fsdecode(word) for word in data.split(b"\0")[:-1]]
        if kind == "z":
            return
        if kind in names:
            config[names[kind]] = words[0]
        elif kind in "pudin":
            config[kind] = struct.unpack("<I", data)[0]
        elif kind == "g":
            config["cgroups"].append(words[0])
        elif kind == "b":
            config["binds"].append((words[0], words[1]))
        elif kind == "o":
            config["read_only"].append((words[0], words[1]))
        elif kind == "a":
            config["open"].append(words[0])
        elif kind == "e":
            name, _, value = words[0].partition("=")
            config["environment"][name] = value
        elif kind == "r":
            config["limits"].append(struct.unpack("<IQ", data))
        elif kind == "s":
            config["filter"] = data
        else:
            raise ValueError("unknown directive")


# ---- namespaces and root
def write_file(path, text):
    """A file of /proc or of a control group."""
    with open(path, "w") as file:
        file.write(text)


def die_with_parent(parent):
    """The kernel kills this process with the thread that started it."""
    prctl(PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)


def bind_read_only(source, target):
    """A host directory, read-only with everything below."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = struct.pack("<QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)
    if libc.syscall(MOUNT_SETATTR, -100, os.fsencode(target), AT_RECURSIVE, attributes, len(attributes)) == 0:
        return
    try:
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    except OSError:
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def make_devices(base, root):
    """/dev: six devices of the host, terminals of its own, shared memory that counts as disk."""
    os.mkdir(base + "/dev", 0o755)
    mount(base + "/dev", root + "/dev", None, MS_BIND)
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
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


def id_map(on_disk, here):
    """A user namespace whose map is the change of ids that a mount is to make. A process has to make one."""
    ready, made = os.pipe2(os.O_CLOEXEC)
    until, hold = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.close(hold)
            checked(libc.unshare(0x10000000), "id-mapped layers: a user namespace")
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
            write_file(f"/proc/{child}/{name}", f"{on_disk} {here} 1")
    except OSError as failure:
        raise OSError(failure.errno, f"id-mapped layers: a map: {failure.strerror}") from failure
    fd = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    os.close(hold)
    os.close(ready)
    os.waitpid(child, 0)
    return fd


def open_layers():
    """The layers as mounts that stand nowhere yet, which needs root; make_root puts them into place."""
    namespace = id_map(config["d"], config["u"])
    attributes = struct.pack("<QQQQ", 0x100000, 0, 0, namespace)
    for path in config["lower"].split(":"):
        fd = checked(libc.syscall(OPEN_TREE, -100, os.fsencode(path), 1 | os.O_CLOEXEC), "id-mapped layers")
        checked(libc.syscall(MOUNT_SETATTR, fd, b"", 0x1000, attributes, len(attributes)), "id-mapped layers")
        config["layers"].append(fd)
    os.close(namespace)


def place_layers(base):
    """The text for overlayfs."""
    paths = []
    for i, fd in enumerate(config["layers"]):
        paths.append(f"{base}/layer{i}")
        os.mkdir(paths[-1], 0o755)
        path = os.fsencode(paths[-1])
        checked(libc.syscall(MOVE_MOUNT, fd, b"", -100, path, 4), "id-mapped layers: into place")
        os.close(fd)
    return ":".join(paths)


def make_root():
    """The overlay, what is bound into it, /dev and /proc; then it is the root."""
    base, root = config["mount_point"], config["mount_point"] + "/root"
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, config["tmpfs"])
    for name in ("/root", "/upper", "/work"):
        os.mkdir(base + name, 0o755)
    lower = place_layers(base) if config["layers"] else config["lower"]
    options = f"lowerdir={lower},upperdir={base}/upper,workdir={base}/work,userxattr"
    mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, options)
    upper = os.open(base + "/upper", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with socket.socket(fileno=owner.auxiliary) as side:
        side.sendmsg([b"u"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [upper]))])
    os.close(upper)
    for source, target in config["binds"]:
        bind_read_only(source, root + target)
    make_devices(base, root)
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    write_file(root + "/proc/sys/user/max_user_namespaces", "0")
    if os.path.exists(root + "/proc/sys/user/max_inotify_instances"):
        write_file(root + "/proc/sys/user/max_inotify_instances", str(INOTIFY_INSTANCES))
    bind_read_only(root + "/proc/sys", root + "/proc/sys")
    os.chdir(root)
    checked(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    for source, target in config["read_only"]:  # only now, since an image's links must lead into the image
        if os.path.exists(source):
            bind_read_only(source, target)
    for path in filter(os.path.exists, config["open"]):
        mount(path, path, None, MS_BIND)
        mount(None, path, None, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)


def launch():
    """Returns as process 1 of the new sandbox."""
    die_with_parent(config.get("p", 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for path in config["cgroups"]:
        write_file(path, "0")
    if "u" in config and os.geteuid() == 0:
        if config.get("d", config["u"]) != config["u"]:
            open_layers()
        os.setgroups([])
        os.setresgid(*[config["u"]] * 3)
        os.setresuid(*[config["u"]] * 3)
        die_with_parent(config.get("p", 0))
    prctl(DUMPABLE, 1)
    uid, gid = os.geteuid(), os.getegid()
    network = 0 if config.get("n") else NEW_NETWORK  # the host's only while an image is built
    checked(libc.unshare(NEW_NAMESPACES | network), "new namespaces")
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{config['i']} {uid} 1")
    write_file("/proc/self/gid_map", f"{config['i']} {gid} 1")
    prctl(DUMPABLE, 0)
    child = os.fork()
    if child:
        for fd in (owner.incoming, owner.outgoing, owner.auxiliary):
            os.close(fd)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    die_with_parent(0)
    os.setsid()
    make_root()
    checked(libc.sethostname(config["hostname"].encode(), len(config["hostname"].encode())), "hostname")
    if not network:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def lock_down():
    """Limits, no new privileges, no capabilities, the filter."""
    for kind, value in config["limits"]:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    os.umask(0o022)
    checked(prctl(NO_NEW_PRIVS, 1), "no_new_privs")
    for capability in range(64):
        prctl(CAPBSET_DROP, capability)
    prctl(AMBIENT, 4)
    header = struct.pack("<Ii", 0x20080522, 0)
    checked(libc.syscall(CAPSET[os.uname().machine], header, b"\0" * 24), "capset")
    prctl(DUMPABLE, 0)
    if config["filter"]:
        program = Program(len(config["filter"]) // 8, config["filter"])
        checked(prctl(SECCOMP, 2, ctypes.addressof(program)), "seccomp")


# ---- processes
shell = fresh = 0
last_status = shell_status = fresh_status = 0
terminal = channel = -1
channel_path = ""
old_channels: list = []
last_drain = 0.0
wake_read = -1


def owner_gone():
    """Ends; process 1 of a pid namespace takes everything with it."""
    if os.getpid() != 1:
        kill_everything()
    os._exit(0)


def reap():
    """Collects what ended."""
    global shell, fresh, shell_status, fresh_status
    try:
        while os.read(wake_read, 4096):
            pass
    except BlockingIOError:
        pass
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not pid:
            return True
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code
        if pid == shell:
            shell, shell_status = 0, code
        if pid == fresh:
            fresh, fresh_status = 0, code


def kill_children():
    """Where process 1 is somebody else: the tree below this process, round by round."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            pids = [int(word) for word in file.read().split()]
    except OSError:
        return False
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def remove_system_v():
    """System V objects, which outlive their processes."""
    for name, remove in (
        ("shm", lambda number: libc.shmctl(number, 0, None)),
        ("msg", lambda number: libc.msgctl(number, 0, None)),
        ("sem", lambda number: libc.semctl(number, 0, 0)),
    ):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/sysvipc/{name}") as file:
            for line in file.readlines()[1:] if os.getpid() == 1 else ():
                remove(int(line.split()[1]))


def kill_everything():
    """Every process of the sandbox but this one."""
    global shell, fresh, terminal, channel
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            if not reap():
                break
        else:
            kill_children()
            if not reap() and not kill_children():
                break
        time.sleep(0.0005)
    remove_system_v()
    shell = fresh = 0
    for fd in [*old_channels, terminal, channel]:
        if fd >= 0:
            os.close(fd)
    old_channels.clear()
    terminal = channel = -1


def others(spared):
    """(pid, is spared) of every process below this one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            mine = os.getpid() == 1 or int(fields[1]) == os.getpid()
            if int(name) != os.getpid() and fields[0] != b"Z" and mine:
                found.append((int(name), (int(name), int(fields[19])) in spared))
    return found


def kill_others(spared):
    """Kills all but the processes of `spared`, {(pid, start)}, which are stopped: they show, and do nothing."""
    global shell, fresh, terminal
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)  # so that none makes another meanwhile
        left = [pid for pid, keep in others(spared) if not keep]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if not left:
            break
        time.sleep(0.0005)
    for pid, keep in others(spared):
        if keep:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
    remove_system_v()
    shell = fresh = 0
    if terminal >= 0:
        os.close(terminal)
    terminal = -1


def start():
    """fork(2); a fork bomb that holds every process is killed first."""
    try:
        return os.fork()
    except BlockingIOError:
        kill_everything()
        return os.fork()


def in_child():
    """What every program starts with."""
    signal.set_wakeup_fd(-1)
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        write_file("/proc/self/oom_score_adj", "500")


def modes(fd, with_signals):
    """A terminal that changes no byte; ^C is the one character it acts on, where it acts at all."""
    control = [b"\0"] * 32
    control[termios.VMIN], control[termios.VINTR] = b"\1", b"\3"
    local = termios.ISIG if with_signals else 0
    settings = [0, 0, termios.CS8 | termios.CREAD | termios.B38400, local, termios.B38400, termios.B38400, control]
    termios.tcsetattr(fd, termios.TCSANOW, settings)


def open_terminal(with_signals):
    """(master, path of the other end)."""
    flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    try:  # not the link /dev/ptmx, which is the agent's to remove
        fd = os.open("/dev/pts/ptmx", flags)
    except OSError:
        with contextlib.suppress(OSError):
            os.chmod("/dev/pts/ptmx", 0o666)  # its owner can have closed it
        fd = os.open("/dev/pts/ptmx" if os.access("/dev/pts/ptmx", os.W_OK) else "/dev/ptmx", flags)
    fcntl.ioctl(fd, 0x40045431, struct.pack("i", 0))  # TIOCSPTLCK
    number = struct.unpack("i", fcntl.ioctl(fd, 0x80045430, b"\0" * 4))[0]  # TIOCGPTN
    modes(fd, with_signals)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return fd, f"/dev/pts/{number}"


class Output:
    """Keeps the first half of the allowed bytes and the last half; counts all."""

    def __init__(self, keep):
        self.keep, self.half, self.total = keep, keep // 2, 0
        self.head, self.tail = bytearray(), bytearray()

    def take(self, data):
        """Adds what was printed."""
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[: max(room, 0)]
        self.tail += data[max(room, 0) :]
        most = self.keep - self.half
        if len(self.tail) > most + CHUNK:
            del self.tail[: len(self.tail) - most]

    def answer(self, number, status, flags):
        """Sends the result."""
        most = self.keep - self.half
        tail = self.tail[len(self.tail) - most :] if len(self.tail) > most else self.tail
        owner.write("D", number, struct.pack("<iBQ", status, flags, self.total) + self.head + tail)

    def read(self, fd, most=1 << 22):
        """Reads what is there, but never for ever. False when nobody writes any more."""
        start = self.total
        while self.total - start < most:
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self.take(data)
        return True


def drain_old():
    """A little of what background processes print, so that they are not blocked for ever."""
    global last_drain
    if not old_channels or time.monotonic() - last_drain < DRAIN_S:
        return
    last_drain = time.monotonic()
    for fd in list(old_channels):
        if not Output(0).read(fd, CHUNK):
            old_channels.remove(fd)
            os.close(fd)


def wait(fds, end):
    """Polls {fd: events}; returns {fd: events} that happened."""
    poll = select.poll()
    for fd, events in fds.items():
        if fd >= 0:
            poll.register(fd, events)
    if old_channels:
        end = min(end, time.monotonic() + DRAIN_S)
    timeout = None if end == float("inf") else max(0.0, end - time.monotonic()) * 1000
    happened = dict(poll.poll(timeout))
    if happened.get(owner.incoming, 0) & (select.POLLHUP | select.POLLERR | select.POLLRDHUP):
        owner_gone()
    return happened


# ---- the shell
def start_shell():
    """A new interactive shell on its own terminal."""
    global terminal, shell
    if terminal >= 0:
        os.close(terminal)
    terminal, path = open_terminal(True)
    pid = start()
    if pid == 0:
        try:
            in_child()
            os.setsid()
            fd = os.open(path, os.O_RDWR)
            fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
            for target in range(3):
                os.dup2(fd, target)
            if fd > 2:
                os.close(fd)
            try:
                os.chdir(config["directory"])
            except OSError:
                os.chdir("/")
            for program, arguments in SHELLS:
                if os.path.exists(program):
                    os.execve(program, arguments, config["environment"])
        finally:
            os._exit(127)
    shell = pid


def ready():
    """A shell, and a terminal for the command's output."""
    global channel, channel_path
    if not shell:
        start_shell()
    if channel < 0:
        channel, channel_path = open_terminal(False)


def own_terminals():
    """How many terminals of this sandbox are open."""
    try:
        return sum(name.isdigit() for name in os.listdir("/dev/pts"))
    except OSError:
        return 0


def surely_ready():
    """The same whatever the agent's processes hold. Where the host has no terminal left, others are waited for."""
    end = time.monotonic() + TERMINAL_S
    while True:
        try:
            return ready()
        except OSError as failure:
            if failure.errno != errno.ENOSPC or own_terminals() > OLD_CHANNELS + 2:
                break
            if time.monotonic() > end:
                raise OSError(errno.ENOSPC, NO_TERMINAL) from failure
        wait({owner.incoming: select.POLLRDHUP}, time.monotonic() + 0.05)
    kill_everything()
    return ready()


def run_in_shell(number, data):
    """R: see `native/agent.c`."""
    global channel, terminal, last_status
    deadline_s, keep, flood = struct.unpack_from("<dQQ", data)
    nonce, word = data[24:40], data[41:-1]
    out, flags, status, lost = Output(keep), 0, -1, False
    surely_ready()
    end = time.monotonic() + deadline_s
    modes(terminal, True)
    probe = b"\nprintf '\\n%s:%s\\n' " + nonce + b' "$?"\n'
    restore = b"(exit %d); " % last_status if last_status else b""
    pending = memoryview(restore + b"eval " + word + b" </dev/null >" + channel_path.encode() + b" 2>&1;" + probe[1:])
    recent, marker = b"", b"\n" + nonce + b":"
    stage, next_at, pause, listen_at = 0, end, 0.002, 0.0
    while status < 0:
        drain_old()
        now = time.monotonic()
        fds = {owner.incoming: select.POLLRDHUP, wake_read: select.POLLIN}
        fds[terminal] = select.POLLIN | (select.POLLOUT if pending else 0)
        if now >= listen_at:
            fds[channel] = select.POLLIN
        happened = wait(fds, min(next_at, listen_at) if listen_at > now else next_at)
        events = happened.get(terminal, 0)
        if events & select.POLLOUT:
            with contextlib.suppress(OSError):
                pending = pending[os.write(terminal, pending) :]
        if happened.get(channel):
            if out.read(channel):
                pause = 0.002
            else:
                listen_at, pause = time.monotonic() + pause, min(2 * pause, 0.05)
        if events & (select.POLLIN | select.POLLHUP):
            with contextlib.suppress(OSError):
                recent = (recent + os.read(terminal, 4096))[-8192:]
            found = recent.rfind(marker)
            line = recent[found + len(marker) :].partition(b"\n") if found >= 0 else (b"", b"", b"")
            if line[1] and line[0].isdigit():
                status = int(line[0]) & 255
        if happened.get(wake_read):
            reap()
            if not shell and status < 0:
                status, lost = shell_status, True
        if status >= 0:
            break
        if not flags and out.total > flood:
            flags, next_at = FLOODED, time.monotonic()
        if time.monotonic() < next_at:
            continue
        if stage == 0 and not flags:
            flags = TIMED_OUT
        if stage >= 2:
            kill_everything()
            status, lost = 137, True
            break
        if stage == 1:
            try:
                group = struct.unpack("i", fcntl.ioctl(terminal, termios.TIOCGPGRP, b"\0" * 4))[0]
                if group > 1:
                    os.killpg(group, signal.SIGKILL)
            except OSError:
                pass
        modes(terminal, True)
        with contextlib.suppress(OSError):
            os.write(terminal, b"\3")
        time.sleep(0.002)
        pending = memoryview(probe)
        stage, next_at = stage + 1, time.monotonic() + GRACE_S
    if channel >= 0 and out.read(channel):
        if len(old_channels) == OLD_CHANNELS:
            os.close(old_channels.pop(0))
        old_channels.append(channel)
        channel = -1
    if lost:
        if terminal >= 0:
            os.close(terminal)
        terminal = -1
        flags |= SHELL_LOST
    last_status = 0 if lost else status
    out.answer(number, status, flags)


def run_fresh(number, data):
    """X: see `native/agent.c`."""
    global fresh
    deadline_s, keep, flood = struct.unpack_from("<dQQ", data)
    (count,) = struct.unpack_from("<I", data, 24)
    strings = [os.fsdecode(word) for word in data[28:].split(b"\0")[:-1]]
    directory, argv, variables = strings[0], strings[1 : count + 1], strings[count + 1 :]
    environment = dict(v.split("=", 1) for v in variables)
    out, flags = Output(keep), 0
    reading, writing = os.pipe2(os.O_CLOEXEC)
    end = time.monotonic() + deadline_s
    pid = start()
    if pid == 0:
        code = 126
        try:
            in_child()
            os.setsid()
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            try:
                os.chdir(directory)
            except OSError as failure:
                os.write(2, f"{directory}: {failure.strerror}\n".encode())
                os._exit(126)
            os.execvpe(argv[0], argv, environment)
        except OSError as failure:
            os.write(2, f"{argv[0]}: {failure.strerror}\n".encode())
            code = 127 if failure.errno == errno.ENOENT else 126
        finally:
            os._exit(code)
    fresh = pid
    os.close(writing)
    os.set_blocking(reading, False)
    open_end = True
    while fresh:
        drain_old()
        fds = {owner.incoming: select.POLLRDHUP, wake_read: select.POLLIN}
        if open_end:
            fds[reading] = select.POLLIN
        happened = wait(fds, end)
        if happened.get(reading):
            open_end = out.read(reading)
        if happened.get(wake_read):
            reap()
        if not flags and fresh and (time.monotonic() >= end or out.total > flood):
            flags = TIMED_OUT if time.monotonic() >= end else FLOODED
            end = float("inf")
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
    out.read(reading)
    os.close(reading)
    out.answer(number, fresh_status, flags)


# ---- files
def file_get(number, data):
    """G."""
    (most,) = struct.unpack_from("<Q", data)
    fd = os.open(data[8:-1], os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(info.st_mode) or info.st_dev == os.stat("/proc").st_dev:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if info.st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        owner.write("D", number, file.read(info.st_size))


def file_put(number, data):
    """P."""
    mode, length = struct.unpack_from("<II", data)
    path, contents = data[8 : 8 + length], data[9 + length :]
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    temporary = path + b".%s.part" % os.urandom(8).hex().encode()  # no program can know it and be in the way
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(contents)
            os.fchmod(fd, mode & 0o7777)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    owner.write("D", number)


def file_list(number, data):
    """L."""
    (most,) = struct.unpack_from("<I", data)
    found: list = []

    def walk(fd, prefix, depth):
        for name in os.listdir(fd):
            encoded = os.fsencode(name)
            path = prefix + encoded
            try:
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue
            if len(path) >= 4096:
                continue
            if len(found) >= most:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            kinds = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l"}
            kind = kinds.get(stat.S_IFMT(info.st_mode), b"o")
            found.append(struct.pack("<cIQH", kind, info.st_mode & 0o7777, info.st_size, len(path)) + path)
            if kind == b"d" and depth < 64:
                try:
                    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                except OSError:
                    continue
                try:
                    walk(below, path + b"/", depth + 1)
                finally:
                    os.close(below)

    fd = os.open(data[4:-1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        walk(fd, b"", 0)
    finally:
        os.close(fd)
    owner.write("D", number, b"".join(found))


def kill_request(number, data):
    """K."""
    spared = set(struct.iter_unpack("<IQ", data))
    if spared:
        kill_others(spared)
    else:
        kill_everything()
    owner.write("D", number)


REQUESTS = {"R": run_in_shell, "X": run_fresh, "G": file_get, "P": file_put, "L": file_list, "K": kill_request}


def serve():
    """One request after the other, for ever."""
    global wake_read
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # to process 1 a signal without a handler is not delivered
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    if os.getpid() != 1:
        prctl(SUBREAPER, 1)
    owner.write("H", 0)
    while True:
        happened = wait({owner.incoming: select.POLLIN | select.POLLRDHUP, wake_read: select.POLLIN}, float("inf"))
        drain_old()
        if happened.get(wake_read):
            reap()
        if not happened.get(owner.incoming):
            continue
        kind, number, data = owner.read()
        try:
            REQUESTS[kind](number, data)
        except (OSError, ValueError, KeyError) as failure:
            owner.error(number, failure)


def main():
    """Entry point."""
    global owner
    owner = Owner()
    try:
        read_config()
        if sys.argv[1] == "launch":
            launch()
        else:
            os.close(owner.auxiliary)
        lock_down()
    except (OSError, ValueError) as failure:
        owner.error(0, failure, str(failure))
        os._exit(71)
    serve()


if __name__ == "__main__":
    main()
