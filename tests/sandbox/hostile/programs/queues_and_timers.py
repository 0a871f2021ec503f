# limit_s: 10
# What one user of the host has a number of, whatever namespace: signals and timers that wait, message queues.
import ctypes
import os
import signal

from prelude import libc, won


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
