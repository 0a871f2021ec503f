"""Programs that try to get out, to take everything, or to lie. What gets what it must not have prints ESC-APED without
the dash (so that the text of a program is never taken for its success).

`{secret}`, `{bait}`, `{port}` and so on are filled in with what lies on the host. `limit_s` is the deadline of the
command; every program must be over shortly after it.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Program:
    """One of them. `language` is "sh" for the shell itself or "python" for a file that is run."""

    name: str
    language: str
    text: str
    limit_s: float = 10.0


def sh(name: str, text: str, limit_s: float = 10.0) -> Program:
    """Runs in the episode's shell."""
    return Program(name, "sh", text, limit_s)


def python(name: str, text: str, limit_s: float = 10.0) -> Program:
    """Is written to a file and run; `won()` reports an escape, `failing(f, *args)` is True when f raises OSError."""
    return Program(name, "python", PRELUDE + text, limit_s)


PRELUDE = """
import ctypes, errno, os, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def won(what=""): print("ESC" + "APED", what, flush=True)
def syscall(*a): return libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
def trying(f, *a):
    try: return f(*a)
    except Exception as e: print(type(e).__name__, e, flush=True); return None
"""

CONNECTS = """
def connect(family, kind, address):
    s = socket.socket(family, kind); s.settimeout(1)
    s.connect(address); s.send(b"x"); won(address)
"""

PROGRAMS = [
    # ---- taking everything
    python(
        "processes, counted",
        "n = 0\ntry:\n  while n < 300:\n    pid = os.fork()\n    if pid == 0: time.sleep(60); os._exit(0)\n    n += 1\nexcept OSError: pass\nprint('forked', n)\nif n > 60: won(n)\nos.kill(-1, signal.SIGTERM)",
        10,
    ),  # noqa: E501
    python(
        "threads, counted",
        "import threading\nn = 0\ntry:\n  while n < 300:\n    threading.Thread(target=time.sleep, args=(3,), daemon=True).start(); n += 1\nexcept RuntimeError: pass\nif n > 60: won(n)\nos._exit(0)",
    ),  # noqa: E501
    sh("fork bomb", "b() { b | b & }; b; sleep 100", 2),
    python(
        "memory", "data = []\nfor i in range(1000): data.append(bytearray(os.urandom(4096) * 256))\nwon('4 GiB')", 10
    ),  # noqa: E501
    sh("memory in the shell", "x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done", 5),
    python(
        "shared memory",
        "f = open('/dev/shm/x', 'wb')\nfor i in range(300): f.write(os.urandom(1 << 20))\nf.flush(); won()",
    ),  # noqa: E501
    sh("disk, one file", "head -c 300M /dev/zero > big && echo 'ESC''APED'; rm -f big"),
    sh(
        "disk, many places",
        "for d in ~ /tmp /var/tmp /dev/shm /run; do head -c 25M /dev/zero > $d/big 2>/dev/null; done; [ $(cat ~/big /tmp/big /var/tmp/big /dev/shm/big /run/big 2>/dev/null | wc -c) -gt 70000000 ] && echo 'ESC''APED'",
    ),  # noqa: E501
    python(
        "files without end",
        "n = 0\ntry:\n  while n < 60000: open('/tmp/f%d' % n, 'w').close(); n += 1\nexcept OSError as e: print(n, e)\nif n >= 60000 and {inodes}: won(n)",
        30,
    ),  # noqa: E501
    sh("deep directories", "for i in $(seq 3000); do mkdir d 2>/dev/null && cd d || break; done; cd ~", 20),
    sh("output flood", "yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 8),
    sh("output flood, deaf", "trap '' INT TERM PIPE HUP; while :; do printf '%01000d' 0; done", 8),
    sh("output flood in the background", "(trap '' INT HUP; while :; do echo noise; done) & sleep 0.2"),
    sh("busy loop, deaf", "trap '' INT TERM HUP QUIT; while :; do :; done", 1),
    sh("busy children, deaf", "for i in 1 2 3 4; do (trap '' INT TERM HUP; while :; do :; done) & done; wait", 1),
    sh("stopped", "kill -STOP $$; sleep 100", 1),
    sh(
        "daemon outliving the shell",
        "setsid nohup sh -c 'trap \"\" HUP TERM; while :; do sleep 1; done' >/dev/null 2>&1 & exit",
    ),  # noqa: E501
    python(
        "daemon, twice forked",
        "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    for s in range(1, 31):\n      try: signal.signal(s, signal.SIG_IGN)\n      except OSError: pass\n    while True: time.sleep(1)\n  os._exit(0)\nos._exit(0)",
    ),  # noqa: E501
    python(
        "terminals without end",
        "n = 0\nfds = []\ntry:\n  while n < 5000: fds.append(os.openpty()); n += 1\nexcept OSError as e: print(n, e)\nif n >= 3000: won(n)",
    ),  # noqa: E501
    sh("terminal made useless", "stty raw -isig -echo </dev/tty; exec 0<&- 1>&- 2>&-; while :; do :; done", 1),
    # ---- the host's files
    sh(
        "host file by its path", "cat {bait} && echo 'ESC''APED'; echo overwritten > {bait}; echo new > {directory}/new"
    ),
    sh(
        "host secrets",
        "for f in /etc/shadow /root/.bash_history /root/.ssh/id_rsa /home/*/.ssh /proc/1/root/{bait} /proc/self/root/../{bait}; do cat $f 2>/dev/null && echo 'ESC''APED'; done; ls -d /work /var/lib/dpkg 2>/dev/null && echo 'ESC''APED'; true",
    ),  # noqa: E501
    sh(
        "programs of the host",
        "for f in /usr/bin/env /bin/sh /usr/lib; do [ -w $f ] && echo 'ESC''APED'; done; echo x >> /usr/bin/env && echo 'ESC''APED'; rm -f /usr/bin/env; [ -e /usr/bin/env ] || echo 'ESC''APED'",
    ),  # noqa: E501
    sh(
        "environment of process 1",
        "cat /proc/1/environ 2>/dev/null | grep -a '{secret}' && echo 'ESC''APED'; tr '\\0' ' ' </proc/1/cmdline | grep '{secret}' && echo 'ESC''APED'; true",
    ),  # noqa: E501
    python(
        "process 1 taken apart",
        "for name in ('mem', 'maps', 'environ', 'root', 'cwd', 'fd/10', 'fd/11', 'syscall'):\n  try: open('/proc/1/' + name, 'rb').read(1); won(name)\n  except OSError as e: print(name, e)\ntry: os.listdir('/proc/1/fd'); won('fd')\nexcept OSError: pass",
    ),  # noqa: E501
    sh("the way up", "cd /; cat ../../../../../../{bait} && echo 'ESC''APED'; true"),
    python(
        "the way up from an open directory",
        "fd = os.open('/', os.O_RDONLY)\nos.mkdir('/tmp/jail')\ntry: os.chroot('/tmp/jail'); os.fchdir(fd); [os.chdir('..') for _ in range(64)]; os.chroot('.'); won()\nexcept OSError as e: print(e)\nif os.path.exists('{bait}'): won('bait')",
    ),  # noqa: E501
    python(
        "descriptors left open",
        "for fd in range(3, 1024):\n  try: print(fd, os.readlink('/proc/self/fd/%d' % fd))\n  except OSError: continue\n  if not os.readlink('/proc/self/fd/%d' % fd).startswith(('/tmp', '/home', '/proc', '/dev/pts')): won(fd)",
    ),  # noqa: E501
    python(
        "file handles",
        "b = ctypes.create_string_buffer(256); b[0:4] = struct.pack('I', 128)\nif syscall(304, -100, b, 0) >= 0: won()",
    ),  # noqa: E501
    # ---- the network and its relatives
    python(
        "tcp",
        CONNECTS
        + "trying(connect, socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', {tcp}))\ntrying(connect, socket.AF_INET, socket.SOCK_STREAM, ('192.0.2.1', 80))",
    ),  # noqa: E501
    python(
        "udp",
        CONNECTS
        + "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ntrying(s.sendto, b'x', ('127.0.0.1', {udp}))\ntrying(connect, socket.AF_INET, socket.SOCK_DGRAM, ('192.0.2.1', 53))",
    ),  # noqa: E501
    python(
        "unix socket",
        CONNECTS
        + "trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, '{directory}/socket')\nfor p in ('/var/run/docker.sock', '/run/dbus/system_bus_socket', '/run/systemd/private'): trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, p)",
    ),  # noqa: E501
    python("abstract socket", CONNECTS + "trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, '\\0{abstract}')"),
    python(
        "vsock",
        "for cid in (1, 2, 3):\n  try:\n    s = socket.socket(40, socket.SOCK_STREAM); won('socket')\n    s.settimeout(1); s.connect((cid, 1024)); won(cid)\n  except OSError as e: print(e)",
    ),  # noqa: E501
    python(
        "raw and packet sockets",
        "for f, k, p in ((socket.AF_PACKET, socket.SOCK_RAW, 3), (socket.AF_INET, socket.SOCK_RAW, 1), (38, socket.SOCK_SEQPACKET, 0)):\n  try: socket.socket(f, k, p); won(f)\n  except OSError as e: print(e)",
    ),  # noqa: E501
    # ---- other processes
    python(
        "ptrace of outsiders",
        "seen = [int(p) for p in os.listdir('/proc') if p.isdigit()]\nif {outsider} in seen and len(seen) > 20: won('sees the host')\nfor pid in [1, {outsider}, {owner}]:\n  if syscall(101, 16, pid, 0, 0) == 0: won(pid)",
    ),  # noqa: E501
    python(
        "kill of outsiders",
        "for pid in [{outsider}, {owner}, -{owner}]:\n  try: os.kill(pid, 9); won(pid)\n  except OSError as e: print(e)\nfor s in (9, 19, 15, 11):\n  try: os.kill(1, s)\n  except OSError as e: print(e)\ntime.sleep(0.1)",
    ),  # noqa: E501
    sh("kill of everything", "kill -9 -1"),
    python(
        "memory of outsiders",
        "b = ctypes.create_string_buffer(8); iov = struct.pack('QQ', ctypes.addressof(b), 8)\nfor pid in (1, {outsider}, {owner}):\n  if syscall(310, pid, iov, 1, iov, 1, 0) > 0: won(pid)",
    ),  # noqa: E501
    python(
        "priority",
        "try: os.setpriority(os.PRIO_PROCESS, 0, -10); won()\nexcept OSError as e: print(e)\ntry: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)); won()\nexcept OSError as e: print(e)",
    ),  # noqa: E501
    # ---- the kernel
    python(
        "nested namespaces",
        "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000):\n  if libc.unshare(flag) == 0: won(hex(flag))\n  if syscall(56, flag | 17, 0, 0, 0, 0) > 0: won('clone')\nargs = struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0)\nif syscall(435, args, 64) > 0: won('clone3')\nfor n in ('user', 'mnt', 'pid', 'net'):\n  if libc.setns(os.open('/proc/self/ns/' + n, os.O_RDONLY), 0) == 0 and n != 'user': won(n)",
    ),  # noqa: E501
    python(
        "mounts",
        "os.makedirs('/tmp/m', exist_ok=True)\nfor a in ((b'none', b'/tmp/m', b'tmpfs', 0), (b'proc', b'/tmp/m', b'proc', 0), (b'/', b'/tmp/m', None, 4096), (None, b'/', None, 32 | 4096)):\n  if libc.mount(*a, None) == 0: won(a)\nfor p in (b'/proc', b'/proc/sys', b'/usr', b'/'):\n  if libc.umount2(p, 2) == 0: won(p)\nif syscall(430, b'tmpfs', 0) >= 0: won('fsopen')\nif syscall(428, -100, b'/', 1) >= 0: won('open_tree')",
    ),  # noqa: E501
    python(
        "sysctls",
        "for n in ('kernel/core_pattern', 'kernel/hostname', 'vm/drop_caches', 'kernel/sysrq', 'net/ipv4/ip_forward', 'kernel/modprobe', 'user/max_user_namespaces', 'vm/overcommit_memory'):\n  try: open('/proc/sys/' + n, 'w').write('1'); won(n)\n  except OSError as e: print(e)\nfor n in ('/proc/sysrq-trigger', '/sys/kernel/uevent_helper', '/proc/self/oom_score_adj'):\n  try: open(n, 'w').write('-1000'); won(n)\n  except OSError as e: print(e)",
    ),  # noqa: E501
    python(
        "device nodes",
        "for d in (8, 254, 1): \n  for kind in (0o60666, 0o20666):\n    try: os.mknod('/tmp/dev%d%o' % (d, kind), kind, os.makedev(d, 1)); won(d)\n    except OSError as e: print(e)\nfor p in ('/dev/sda', '/dev/vda', '/dev/mem', '/dev/kmsg', '/dev/kvm', '/dev/fuse', '/dev/net/tun', '/proc/kcore', '/proc/kmsg'):\n  try: open(p, 'rb').read(1); won(p)\n  except OSError: pass",
    ),  # noqa: E501
    python(
        "setuid files",
        "import shutil\nshutil.copy('/bin/sh', '/tmp/sh'); os.chmod('/tmp/sh', 0o6777)\nr = subprocess.run(['/tmp/sh', '-p', '-c', 'grep -E \"^(Cap(Eff|Prm|Bnd))\" /proc/self/status'], capture_output=True, text=True).stdout\nif any(line.split()[1].strip('0') for line in r.splitlines()): won(r)\nfor c in (['su', '-c', 'id'], ['mount', '-t', 'tmpfs', 'x', '/tmp'], ['passwd', '-d', 'root']):\n  try:\n    if subprocess.run(c, stdin=subprocess.DEVNULL, capture_output=True, timeout=3).returncode == 0: won(c)\n  except (OSError, subprocess.TimeoutExpired): pass\ntry: os.setuid(0 if os.getuid() else 1); won()\nexcept OSError as e: print(e)",
    ),  # noqa: E501
    python(
        "capabilities",
        "status = open('/proc/self/status').read()\nfor line in status.splitlines():\n  if line.startswith('Cap') and line.split()[1].strip('0'): won(line)\n  if line.startswith(('NoNewPrivs', 'Seccomp:')) and line.split()[1] == '0': won(line)",
    ),  # noqa: E501
    python(
        "rare system calls",
        "b = ctypes.create_string_buffer(256)\nfor n, a in ((321, (0, b, 72)), (298, (b, 0, -1, -1, 0)), (250, (0, -3, 0)), (248, (b'user', b'k', b'v', 1, -3)), (425, (8, b)), (323, (0,)), (246, (0, 0, 0, 0)), (175, (b, 0, b'')), (169, (0xfee1dead, 672274793, 0, 0)), (103, (3, b, 10)), (227, (0, b)), (167, (b'/tmp/x', 0))):\n  if syscall(n, *a) >= 0: won(n)\n  elif ctypes.get_errno() not in (1, 38, 97): print('reached the kernel', n); won(n)",
    ),  # noqa: E501
    # ---- lies and tricks on the harness
    sh(
        "forged status, printed",
        "for i in $(seq 100); do printf '\\n0123456789abcdef:0\\n'; echo \"$?\"; done; printf '\\n:0\\n\\003\\004'; (exit 77)",
    ),  # noqa: E501
    sh(
        "forged frames",
        "printf 'D\\0\\0\\0\\0\\0\\0\\0' | tee /proc/1/fd/10 /proc/1/fd/11 2>/dev/null; for f in /proc/self/fd/*; do printf '\\14\\0\\0\\0D\\1\\0\\0\\0' > $f; done 2>/dev/null; (exit 77)",
    ),  # noqa: E501
    sh("exec over the shell", "exec sleep 100", 1),
    sh("exec of nothing", "exec /nonexistent/program"),
    sh("closed descriptors", 'exec 0<&- 1>&- 2>&-; for i in $(seq 3 255); do eval "exec $i>&-"; done; sleep 0.1'),
    sh(
        "builtins replaced",
        "eval() { :; }; printf() { builtin printf 0; }; exit() { :; }; PROMPT_COMMAND='echo x'; PS1='$(sleep 1)'; trap 'echo trapped' DEBUG EXIT ERR; alias eval=true printf=true; set -o noglob -o nounset; IFS=x",
        5,
    ),  # noqa: E501
    sh(
        "unset of everything",
        "unset PATH HOME PS1; for v in $(compgen -v); do unset $v 2>/dev/null; done; enable -n eval printf 2>/dev/null",
        5,
    ),  # noqa: E501
    sh("binary output", "head -c 100000 /dev/urandom; printf '\\0\\1\\2\\3\\4\\33c\\33]0;x\\7\\377\\376'"),
    sh(
        "typing at the terminal",
        "printf '\\003\\003exit\\n' > /dev/tty; python3 -c \"import fcntl,termios; [fcntl.ioctl(open('/dev/tty','w'), termios.TIOCSTI, c.encode()) for c in 'exit 0\\n']\" 2>&1 | tail -1; (exit 77)",
        5,
    ),  # noqa: E501
]
