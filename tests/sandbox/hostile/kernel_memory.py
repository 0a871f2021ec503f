"""Makes the kernel hold memory in one way: `kernel_memory.py WAY MIB`. Says "begins", then "held" when one of its four
processes has what it can get, and holds it. None tries more, so that a host where a way works is not taken down.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import socket
import struct
import sys
import time

PROCESSES, MOST_DESCRIPTORS, MOST_S = 4, 900, 5.0
libc = ctypes.CDLL(None, use_errno=True)
keep = []
LARGE = 4 << 20  # a buffer


def fill(send, size, most):
    """Sends until no more is taken."""
    got = 0
    with contextlib.suppress(OSError):
        while got < most:
            got += send(b"x" * size) or size
    return got


def more(got, most):
    return got < most and len(keep) < MOST_DESCRIPTORS and time.monotonic() < end


def netlink_messages(most):
    got, sender = 0, socket.socket(16, socket.SOCK_RAW, 2)  # NETLINK_USERSOCK
    sender.bind((0, 0))
    sender.setsockopt(1, 7, LARGE)
    sender.setblocking(False)
    while more(got, most):
        unread = socket.socket(16, socket.SOCK_RAW, 2)
        unread.setsockopt(1, 8, LARGE)
        unread.bind((0, 0))
        keep.append(unread)
        message = struct.pack("IHHII", 65016, 100, 0, 1, 0) + bytes(65000)
        to = unread.getsockname()
        got += fill(lambda _, to=to, message=message: sender.sendto(message, to), 1, most - got)


def netlink_answers(most):
    for _ in range(most // (8 << 20)):
        unread = socket.socket(16, socket.SOCK_RAW, 0)  # NETLINK_ROUTE
        unread.setsockopt(1, 8, LARGE)
        unread.bind((0, 0))
        unread.setblocking(False)
        keep.append(unread)
        question = struct.pack("IHHII", 32, 18, 1, 1, 0) + struct.pack("BxHiII", 0, 0, 1, 0, 0)  # RTM_GETLINK
        fill(lambda _, to=unread, question=question: to.sendto(question, (0, 0)) and 0, 1500, 6000 * 1500)


def udp(most, family=socket.AF_INET, host="127.0.0.1"):
    got, sender = 0, socket.socket(family, socket.SOCK_DGRAM)
    sender.setblocking(False)
    while more(got, most):
        unread = socket.socket(family, socket.SOCK_DGRAM)
        unread.setsockopt(1, 8, LARGE)
        unread.bind((host, 0))
        keep.append(unread)
        to = unread.getsockname()
        got += fill(lambda data, to=to: sender.sendto(data, to), 60000, 150 * 60000)


def udp6(most):
    udp(most, socket.AF_INET6, "::1")


def tcp(most, protocol=0, size=LARGE):
    got, server = 0, socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    server.bind(("127.0.0.1", 0))
    server.setsockopt(1, 8, size)
    server.listen(100)
    while more(got, most):
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
        client.setsockopt(1, 7, size)
        client.connect(server.getsockname())
        keep.extend([client, server.accept()[0]])
        for end in keep[-2:]:
            end.setblocking(False)
            got += fill(end.send, 1 << 16, most - got)


def tcp_at_its_least(most):
    tcp(most, size=1)


def multipath_tcp(most):
    tcp(most, 262)


def tcp_that_nobody_accepts(most):
    got = 0
    while more(got, most):
        server = socket.socket()
        server.bind(("127.0.0.1", 0))
        server.listen(4096)
        keep.append(server)
        for _ in range(4000):
            with socket.socket() as client:
                client.setblocking(False)
                client.connect_ex(server.getsockname())
                if not select.select([], [client], [], 0.02)[1] or got > most:
                    break
                got += 2300 + fill(client.send, 1 << 16, most - got)


def times_of_what_was_sent(most):
    """Copies in the queues of errors: SOF_TIMESTAMPING_TX_SOFTWARE with each message."""
    got = 0
    while more(got, most):
        sender, sink = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        sender.setsockopt(1, 8, LARGE)
        sender.setblocking(False)
        sink.bind(("127.0.0.1", 0))
        keep.append(sender)
        for _ in range(max(8, sender.getsockopt(1, 8) // 60000)):
            stamp, to = [(1, 37, struct.pack("I", 2))], sink.getsockname()
            got += fill(lambda data, to=to, s=sender, stamp=stamp: s.sendmsg([data], stamp, 0, to), 60000, 1)
        sink.close()


def errors_of_datagrams(most):
    got = 0
    while more(got, most):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.setsockopt(1, 8, LARGE)
        sender.setsockopt(0, 11, 1)  # IP_RECVERR
        keep.append(sender)
        for _ in range(sender.getsockopt(1, 8) // 1280):
            got += 1280 + fill(lambda data, s=sender: s.sendto(data, ("127.0.0.1", 9)), 1000, 1)


def keys_of_tcp(most):
    got = 0
    while more(got, most):
        keep.append(socket.socket())
        for i in range(1000):
            address = struct.pack("HH4B8x", 2, 0, 10, i >> 8 & 255, i & 255, 1).ljust(128, b"\0")
            key = struct.pack("BBHi", 0, 0, 16, 0) + b"k" * 16 + bytes(64)
            try:
                keep[-1].setsockopt(6, 14, address + key)  # TCP_MD5SIG
            except OSError as failure:
                if failure.errno != 12:  # ENOMEM: this socket's are used up
                    raise
                break
            got += 160


def groups_of_multicast(most):
    got = 0
    while more(got, most):
        keep.append(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        for i in range(2000):
            group = struct.pack("!BB10xI", 255, 1, (os.getpid() & 255) << 24 | len(keep) << 12 | i)
            keep[-1].setsockopt(41, 20, group + struct.pack("i", 1))
            got += 320


def unix_streams(most):
    got = 0
    while more(got, most):
        keep.extend(socket.socketpair())
        keep[-1].setsockopt(1, 7, LARGE)
        keep[-1].setblocking(False)
        got += fill(keep[-1].send, 1 << 16, most - got)


def pipes(most):
    got = 0
    while more(got, most):
        keep.extend(os.pipe())
        os.set_blocking(keep[-1], False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(keep[-1], 1031, 1 << 20)  # F_SETPIPE_SZ
        got += fill(lambda data, fd=keep[-1]: os.write(fd, data), 1 << 16, most - got)


def watches_of_epoll(most):
    got, watched = 0, [os.eventfd(0) for _ in range(400)]
    while more(got, most):
        keep.append(select.epoll())
        for fd in watched:
            keep[-1].register(fd)
            got += 200


def queues_of_system_v(most):
    got, message = 0, struct.pack("l", 1) + bytes(8000)
    while more(got, most):
        queue = libc.msgget(0, 0o1600)
        got += 1 + fill(lambda _, q=queue: 8000 if libc.msgsnd(q, message, 8000, 0o4000) == 0 else 1 / 0, 1, most - got)


def attributes_of_files(most):
    got = 0
    while more(got, most):
        path = f"/tmp/x{os.getpid()}-{got}"
        open(path, "w").close()
        for i in range(100):
            os.setxattr(path, f"user.{i}", bytes(60000))
            got += 60000


def page_tables(most):
    import mmap

    for _ in range(most // (2 << 20)):
        keep.append(mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for at in range(0, 1 << 30, 2 << 20):
            keep[-1][at]


if __name__ == "__main__":
    end = time.monotonic() + MOST_S
    os.write(1, b"begins\n")
    for _ in range(PROCESSES):
        if os.fork() == 0:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            try:
                globals()[sys.argv[1]]((int(sys.argv[2]) << 20) // PROCESSES)
            except (OSError, MemoryError, ZeroDivisionError) as failure:
                os.write(1, f"{failure}\n".encode())
            os.write(1, b"held\n")
            time.sleep(60)
            os._exit(0)
    for _ in range(PROCESSES):
        os.wait()
        os.write(1, b"held\n")  # nothing, any more: it was killed
