# limit_s: 10
import ctypes

from prelude import INOTIFY, libc, won

n = 0
while n < 400 and libc.inotify_init1(0) >= 0:
    n += 1
if n > INOTIFY:
    won(f"{n} instances, error {ctypes.get_errno()}")
