# limit_s: 4
# Takes everything that the kernel counts per user, and holds it.
import array
import ctypes
import os
import signal
import socket
import time

from prelude import libc

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
