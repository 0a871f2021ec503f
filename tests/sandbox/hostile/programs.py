"""The hostile programs: what each does inside, and in how many seconds it must have ended.

Commands are for the sandbox's shell, with `won`, BAIT, DIRECTORY and SECRET; Python programs begin with `HEAD`.
"""

# ruff: noqa: E501

import dataclasses

HEAD = """import array, contextlib, ctypes, os, resource, shutil, signal, socket, struct, subprocess, threading, time
from prelude import *
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """One of them."""

    name: str
    limit_s: float
    text: str
    python: bool


def _program(name: str, limit_s: float, text: str, python: bool = True) -> Program:
    return Program(name, limit_s, (HEAD if python else "") + text.strip("\n") + "\n", python)


def _command(name: str, limit_s: float, text: str) -> Program:
    return _program(name, limit_s, text, python=False)


# fmt: off
PROGRAMS = (
    _command("binary_output", 10, r"head -c 100000 /dev/urandom; printf '\0\1\2\3\4\33c\33]0;x\7\377\376'"),
    _command("builtins_replaced", 5, r"""
eval() { :; }; printf() { builtin printf 0; }; exit() { :; }; PROMPT_COMMAND='echo x'; PS1='$(sleep 1)'; trap 'echo trapped' DEBUG EXIT ERR; alias eval=true printf=true; set -o noglob -o nounset; IFS=x
"""),
    _command("busy_children_deaf", 1, r"for i in 1 2 3 4; do (trap '' INT TERM HUP; while :; do :; done) & done; wait"),
    _command("busy_loop_deaf", 1, r"trap '' INT TERM HUP QUIT; while :; do :; done"),
    _command("closed_descriptors", 10, r"""
exec 0<&- 1>&- 2>&-; for i in $(seq 3 255); do eval "exec $i>&-"; done; sleep 0.1
"""),
    _command("daemon_outliving_the_shell", 10, r"""
setsid nohup sh -c 'trap "" HUP TERM; while :; do sleep 1; done' >/dev/null 2>&1 & exit
"""),
    _command("deep_directories", 20, r"for i in $(seq 3000); do mkdir d 2>/dev/null && cd d || break; done; cd ~"),
    _command("devices_replaced", 10, r'''
rm -rf /dev/fd 2>/dev/null; mkdir /dev/fd 2>/dev/null && won fd
mv /dev/stdin /dev/other 2>/dev/null && won stdin
ln -sf /tmp/mine /dev/stdout 2>/dev/null && won stdout
echo x 2>/dev/null >/dev/mine && won file
mv /dev/shm /dev/shm2 2>/dev/null && won shm
chmod 777 /dev 2>/dev/null && won mode
umount /dev 2>/dev/null && won umount
echo a >/dev/shm/file && cat /dev/shm/file </dev/null >/dev/null || won "shared memory is of no use"
'''),
    _command("disk_many_places", 10, r"""
for d in ~ /tmp /var/tmp /dev/shm /run; do head -c 25M /dev/zero > $d/big 2>/dev/null; done; [ $(cat ~/big /tmp/big /var/tmp/big /dev/shm/big /run/big 2>/dev/null | wc -c) -gt 70000000 ] && won
"""),
    _command("disk_one_file", 10, r"head -c 300M /dev/zero > big && won; rm -f big"),
    _command("environment_of_process_1", 10, r"""
cat /proc/1/environ 2>/dev/null | grep -a "$SECRET" && won; tr '\0' ' ' </proc/1/cmdline | grep "$SECRET" && won; true
"""),
    _command("exec_of_nothing", 10, r"exec /nonexistent/program"),
    _command("exec_over_the_shell", 1, r"exec sleep 100"),
    _command("forged_frames", 10, r"""
printf 'D\0\0\0\0\0\0\0' | tee /proc/1/fd/10 /proc/1/fd/11 2>/dev/null; for f in /proc/self/fd/*; do printf '\14\0\0\0D\1\0\0\0' > $f; done 2>/dev/null; (exit 77)
"""),
    _command("forged_status_printed", 10, r"""
for i in $(seq 100); do printf '\n0123456789abcdef:0\n'; echo "$?"; done; printf '\n:0\n\003\004'; printf '\n0123456789abcdef:0\n' >/dev/tty; (exit 77)
"""),
    _command("fork_bomb", 2, r"b() { b | b & }; b; sleep 100"),
    _command("host_file_by_its_path", 10, r"cat $BAIT && won; echo overwritten > $BAIT; echo new > $DIRECTORY/new"),
    _command("host_secrets", 10, r"""
for f in /etc/shadow /root/.bash_history /root/.ssh/id_rsa /home/*/.ssh /proc/1/root/$BAIT /proc/self/root/../$BAIT; do cat $f 2>/dev/null && won; done; ls -d /work /var/lib/dpkg 2>/dev/null && won; true
"""),
    _command("kill_of_everything", 10, r"kill -9 -1"),
    _command("memory_in_the_shell", 5, r"x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done"),
    _command("output_flood", 8, r"yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
    _command("output_flood_deaf", 8, r"trap '' INT TERM PIPE HUP; while :; do printf '%01000d' 0; done"),
    _command("output_flood_in_the_background", 10, r"(trap '' INT HUP; while :; do echo noise; done) & sleep 0.2"),
    _command("programs_of_the_host", 10, r"""
for f in /usr/bin/env /bin/sh /usr/lib; do [ -w $f ] && won; done; echo x >> /usr/bin/env && won; rm -f /usr/bin/env; [ -e /usr/bin/env ] || won
"""),
    _command("signals_to_process_1", 10, r"""
for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 18 19 20 21 22 24 25 31 34 50 64; do kill -$n 1 2>/dev/null; done
sleep 0.2
"""),
    _command("stopped", 1, r"kill -STOP $$; sleep 100"),
    _command("terminal_made_useless", 1, r"stty raw -isig -echo </dev/tty; exec 0<&- 1>&- 2>&-; while :; do :; done"),
    _command("the_way_up", 10, r"cd /; cat ../../../../../../$BAIT && won; true"),
    _command("typing_at_the_terminal", 5, r"""
printf '\003\003exit\n' > /dev/tty; python3 -c "import fcntl,termios; [fcntl.ioctl(open('/dev/tty','w'), termios.TIOCSTI, c.encode()) for c in 'exit 0\n']" 2>&1 | tail -1; (exit 77)
"""),
    _command("unset_of_everything", 5, r"""
unset PATH HOME PS1; for v in $(compgen -v); do unset $v 2>/dev/null; done; enable -n eval printf 2>/dev/null
"""),
    _program("abstract_socket", 10, r'trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, "\0" + ABSTRACT)'),
    _program("asynchronous_reads", 10, r"""
# The requests of all users of a host together are limited (fs.aio-max-nr).

context = ctypes.c_ulong()
if syscall(206, 1024, ctypes.addressof(context)) == 0:
    won()
"""),
    _program("budgets_of_the_user", 4, r"""
# Takes everything that the kernel counts per user, and holds it.

signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while libc.inotify_init1(0) >= 0:
    pass
while libc.sigqueue(os.getpid(), 40, None) >= 0:
    pass
for i in range(100):
    if libc.mq_open(b"/q%d" % i, os.O_CREAT | os.O_RDWR, 0o600, None) < 0:
        break
timer = ctypes.c_void_p()
for i in range(100_000):
    if libc.timer_create(1, None, ctypes.byref(timer)) < 0:
        break
for i in range(4):  # 16 pages for each of 1,600 pipes; the kernel gives one user 16,384
    if os.fork() == 0:
        held = [os.pipe() for _ in range(400)]
        time.sleep(60)
        os._exit(0)
sockets = [socket.socketpair() for _ in range(5)]
descriptors = array.array("i", [os.open("/dev/null", os.O_RDONLY) for _ in range(250)])
for mine, _ in sockets:  # 1,250 descriptors on their way
    mine.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
time.sleep(0.5)
print("held", flush=True)
time.sleep(60)
"""),
    _program("capabilities", 10, r"""
status = open("/proc/self/status").read()
for line in status.splitlines():
    if line.startswith("Cap") and line.split()[1].strip("0"):
        won(line)
    if line.startswith(("NoNewPrivs", "Seccomp:")) and line.split()[1] == "0":
        won(line)
"""),
    _program("core_dumps", 10, r"""
if resource.getrlimit(resource.RLIMIT_CORE) != (CORES, CORES):
    won(resource.getrlimit(resource.RLIMIT_CORE))
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
    os._exit(1)
if os.WCOREDUMP(os.waitpid(pid, 0)[1]):
    won("a core was dumped")
"""),
    _program("daemon_twice_forked", 10, r"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in range(1, 31):
            with contextlib.suppress(OSError):
                signal.signal(s, signal.SIG_IGN)
        while True:
            time.sleep(1)
    os._exit(0)
os._exit(0)
"""),
    _program("descriptors_left_open", 10, r"""
for fd in range(3, 1024):
    try:
        print(fd, os.readlink("/proc/self/fd/%d" % fd))
    except OSError:
        continue
    if not os.readlink("/proc/self/fd/%d" % fd).startswith(("/tmp", "/home", "/proc", "/dev/pts")):
        won(fd)
"""),
    _program("device_nodes", 10, r"""
for d in (8, 254, 1):
    for kind in (25014, 8630):
        try:
            os.mknod("/tmp/dev%d%o" % (d, kind), kind, os.makedev(d, 1))
            won(d)
        except OSError as e:
            print(e)
for p in (
    "/dev/sda",
    "/dev/vda",
    "/dev/mem",
    "/dev/kmsg",
    "/dev/kvm",
    "/dev/fuse",
    "/dev/net/tun",
    "/proc/kcore",
    "/proc/kmsg",
):
    try:
        open(p, "rb").read(1)
        won(p)
    except OSError:
        pass
"""),
    _program("file_handles", 10, r"""
b = ctypes.create_string_buffer(256)
b[0:4] = struct.pack("I", 128)
if syscall(304, -100, b, 0) >= 0:
    won()
"""),
    _program("files_without_end", 30, r"""
n = 0
try:
    while n < 60000:
        open("/tmp/f%d" % n, "w").close()
        n += 1
except OSError as e:
    print(n, e)
if n >= 60000 and INODES:
    won(n)
"""),
    _program("filters_of_its_own", 10, r"""
RETURN = ctypes.create_string_buffer(struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 1, ctypes.addressof(RETURN)))

for family, kind in ((socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_STREAM)):
    with socket.socket(family, kind) as s:
        for option in (26, 50, 51, 52):
            if libc.setsockopt(s.fileno(), 1, option, program, 16) == 0:
                won(f"a filter on a socket, option {option}")
            elif ctypes.get_errno() != 92:  # ENOPROTOOPT, which is the sandbox's answer
                won(f"option {option} reached the kernel")
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if syscall(157, 22, 2, ctypes.addressof(program), 0, 0) == 0:
    won("prctl")
for flags in (0, 1, 8):
    if syscall(317, 1, flags, ctypes.addressof(program)) >= 0:
        won("seccomp")
"""),
    _program("inotify_without_end", 10, r"""
n = 0
while n < 400 and libc.inotify_init1(0) >= 0:
    n += 1
if n > INOTIFY:
    won(f"{n} instances, error {ctypes.get_errno()}")
"""),
    _program("kill_of_outsiders", 10, r"""
for pid in [OUTSIDER, OWNER, -OWNER]:
    try:
        os.kill(pid, 9)
        won(pid)
    except OSError as e:
        print(e)
for s in (9, 19, 15, 11):
    try:
        os.kill(1, s)
    except OSError as e:
        print(e)
time.sleep(0.1)
"""),
    _program("memory", 10, r"""
data = []
try:
    for _ in range(1000):
        data.append(bytearray(os.urandom(4096) * 256))
    won("1 GiB")
except MemoryError:
    print("no more")
"""),
    _program("memory_of_outsiders", 10, r"""
b = ctypes.create_string_buffer(8)
iov = struct.pack("QQ", ctypes.addressof(b), 8)
for pid in (1, OUTSIDER, OWNER):
    if syscall(310, pid, iov, 1, iov, 1, 0) > 0:
        won(pid)
"""),
    _program("mounts", 10, r"""
os.makedirs("/tmp/m", exist_ok=True)
for a in (
    (b"none", b"/tmp/m", b"tmpfs", 0),
    (b"proc", b"/tmp/m", b"proc", 0),
    (b"/", b"/tmp/m", None, 4096),
    (None, b"/", None, 32 | 4096),
):
    if libc.mount(*a, None) == 0:
        won(a)
for p in (b"/proc", b"/proc/sys", b"/usr", b"/"):
    if libc.umount2(p, 2) == 0:
        won(p)
if syscall(430, b"tmpfs", 0) >= 0:
    won("fsopen")
if syscall(428, -100, b"/", 1) >= 0:
    won("open_tree")
"""),
    _program("nested_namespaces", 10, r"""
for flag in (268435456, 131072, 536870912, 1073741824, 134217728, 67108864, 33554432):
    if libc.unshare(flag) == 0:
        won(hex(flag))
    if syscall(56, flag | 17, 0, 0, 0, 0) > 0:
        won("clone")
args = struct.pack("8Q", 268435456, 0, 0, 0, 17, 0, 0, 0)
if syscall(435, args, 64) > 0:
    won("clone3")
for n in ("user", "mnt", "pid", "net"):
    if libc.setns(os.open("/proc/self/ns/" + n, os.O_RDONLY), 0) == 0 and n != "user":
        won(n)
"""),
    _program("newer_system_calls", 10, r"""
for number in (*range(467, 480), 600, 1024, 0x3FFFFFFF):
    if syscall(number, -1, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 38:
        won(number)
"""),
    _program("priority", 10, r"""
try:
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    won()
except OSError as e:
    print(e)
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    won()
except OSError as e:
    print(e)
"""),
    _program("process_1_taken_apart", 10, r"""
for name in ("mem", "maps", "environ", "root", "cwd", "fd/10", "fd/11", "syscall"):
    try:
        open("/proc/1/" + name, "rb").read(1)
        won(name)
    except OSError as e:
        print(name, e)
for fd in range(64):  # their numbers may be seen
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.open("/proc/1/fd/%d" % fd, flags)
            won(fd)
        except OSError:
            pass
"""),
    _program("processes_counted", 10, r"""
n = 0
try:
    while n < 300:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        n += 1
except OSError:
    pass
print("forked", n)
if n > 60:
    won(n)
os.kill(-1, signal.SIGTERM)
"""),
    _program("ptrace_of_outsiders", 10, r"""
seen = [int(p) for p in os.listdir("/proc") if p.isdigit()]
if OUTSIDER in seen and len(seen) > 20:
    won("sees the host")
for pid in [1, OUTSIDER, OWNER]:
    if syscall(101, 16, pid, 0, 0) == 0:
        won(pid)
"""),
    _program("queues_and_timers", 10, r'''
# What one user of the host has a number of, whatever namespace: signals and timers that wait, message queues.

def count(function, most):
    """How often it succeeds."""
    return next((n for n in range(most) if function(n) < 0), most)

signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
if (n := count(lambda _: libc.sigqueue(os.getpid(), 40, None), 5000)) > 1024:
    won(f"{n} signals wait")
timer = ctypes.c_void_p()
if (n := count(lambda _: libc.timer_create(1, None, ctypes.byref(timer)), 5000)) > 1024:
    won(f"{n} timers")
if (n := count(lambda i: libc.mq_open(b"/q%d" % i, os.O_CREAT | os.O_RDWR, 0o600, None), 20)) > 4:
    won(f"{n} message queues")
'''),
    _program("rare_system_calls", 10, r"""
b = ctypes.create_string_buffer(256)
for n, a in (
    (321, (0, b, 72)),
    (298, (b, 0, -1, -1, 0)),
    (250, (0, -3, 0)),
    (248, (b"user", b"k", b"v", 1, -3)),
    (425, (8, b)),
    (323, (0,)),
    (246, (0, 0, 0, 0)),
    (175, (b, 0, b"")),
    (169, (4276215469, 672274793, 0, 0)),
    (103, (3, b, 10)),
    (227, (0, b)),
    (167, (b"/tmp/x", 0)),
):
    if syscall(n, *a) >= 0:
        won(n)
    elif ctypes.get_errno() not in (1, 38, 97):
        print("reached the kernel", n)
        won(n)
"""),
    _program("raw_and_packet_sockets", 10, r"""
for f, k, p in (
    (socket.AF_PACKET, socket.SOCK_RAW, 3),
    (socket.AF_INET, socket.SOCK_RAW, 1),
    (38, socket.SOCK_SEQPACKET, 0),
):
    try:
        socket.socket(f, k, p)
        won(f)
    except OSError as e:
        print(e)
"""),
    _program("read_only_mounts", 10, r"""
for path in ("/usr", "/proc/sys") if SYSCTLS_READ_ONLY else ("/usr",):
    if not os.statvfs(path).f_flag & os.ST_RDONLY:
        won(path)
"""),
    _program("setuid_files", 10, r"""
shutil.copy("/bin/sh", "/tmp/sh")
os.chmod("/tmp/sh", 3583)
r = subprocess.run(
    ["/tmp/sh", "-p", "-c", 'grep -E "^(Cap(Eff|Prm|Bnd))" /proc/self/status'], capture_output=True, text=True
).stdout
if any(line.split()[1].strip("0") for line in r.splitlines()):
    won(r)
COMMANDS = [["mount", "-t", "tmpfs", "x", "/tmp"]]
if os.getuid() != 0:  # what looks like root may change its own /etc/passwd, and become itself
    COMMANDS += [["su", "-c", "id"], ["passwd", "-d", "root"]]
for c in COMMANDS:
    try:
        if subprocess.run(c, stdin=subprocess.DEVNULL, capture_output=True, timeout=3).returncode == 0:
            won(c)
    except (OSError, subprocess.TimeoutExpired):
        pass
try:
    os.setuid(0 if os.getuid() else 1)
    won()
except OSError as e:
    print(e)
"""),
    _program("shared_memory", 10, r"""
try:
    fd = os.open("/dev/shm/x", os.O_CREAT | os.O_WRONLY)
    for _ in range(300):
        if os.write(fd, os.urandom(1 << 20)) < 1 << 20:
            raise OSError("short")
    won()
except OSError as e:
    print(e)
"""),
    _program("shared_memory_left", 10, r"""
# Fills the memory with System V segments that no process has any more.

libc.shmat.restype = ctypes.c_void_p
libc.shmget.argtypes = (ctypes.c_int, ctypes.c_size_t, ctypes.c_int)
libc.shmat.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
libc.shmdt.argtypes = (ctypes.c_void_p,)
while True:
    segment = libc.shmget(0, 8 << 20, 0o1600)
    if segment < 0:
        break
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 1, 8 << 20)
    libc.shmdt(address)
    libc.msgget(0, 0o1600)
    libc.semget(0, 1, 0o1600)
    print("held", flush=True)
"""),
    _program("shared_memory_of_outsiders", 10, r"""
libc.shmat.restype = ctypes.c_void_p
for identifier in (libc.shmget(MEMORY_KEY, 0, 0), MEMORY_ID):
    if identifier >= 0 and libc.shmat(identifier, None, 0) not in (None, ctypes.c_void_p(-1).value):
        won(identifier)
"""),
    _program("sysctls", 10, r"""
KERNEL = ("core_pattern", "hostname", "sysrq", "modprobe", "hotplug", "pid_max")
OTHER = ("net/ipv4/ip_forward", "user/max_user_namespaces", "vm/overcommit_memory", "vm/drop_caches")

def write(path, text):
    try:
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, text)  # the kernel may say no only here
        won(path)
    except OSError as e:
        print(e)

for name in (*(f"kernel/{k}" for k in KERNEL), *OTHER):
    write(f"/proc/sys/{name}", b"1")
for path in ("/proc/sysrq-trigger", "/sys/kernel/uevent_helper", "/proc/irq/default_smp_affinity"):
    write(path, b"1")
write("/proc/self/oom_score_adj", b"-1000")
"""),
    _program("tcp", 10, r"""
trying(connect, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", TCP))
trying(connect, socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80))
"""),
    _program("terminals_without_end", 10, r"""
n = 0
fds = []
try:
    while n < 5000:
        fds.append(os.openpty())
        n += 1
except OSError as e:
    print(n, e)
if n > TERMINALS:
    won(n)
"""),
    _program("the_way_up_from_an_open_directory", 10, r"""
fd = os.open("/", os.O_RDONLY)
os.mkdir("/tmp/jail")
try:
    os.chroot("/tmp/jail")
    os.fchdir(fd)
    [os.chdir("..") for _ in range(64)]
    os.chroot(".")
    won()
except OSError as e:
    print(e)
if os.path.exists(BAIT):
    won("bait")
"""),
    _program("threads_counted", 10, r"""
n = 0
try:
    while n < 300:
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        n += 1
except RuntimeError:
    pass
if n > 60:
    won(n)
os._exit(0)
"""),
    _program("udp", 10, r"""
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
trying(s.sendto, b"x", ("127.0.0.1", UDP))
trying(connect, socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53))
"""),
    _program("unix_socket", 10, r"""
trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, DIRECTORY + "/socket")
for p in ("/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private"):
    trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, p)
"""),
    _program("vsock", 10, r"""
for cid in (1, 2, 3):
    try:
        s = socket.socket(40, socket.SOCK_STREAM)
        won("socket")
        s.settimeout(1)
        s.connect((cid, 1024))
        won(cid)
    except OSError as e:
        print(e)
"""),
)
