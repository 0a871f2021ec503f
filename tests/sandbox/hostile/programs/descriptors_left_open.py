# limit_s: 10
import os

from prelude import won

for fd in range(3, 1024):
    try:
        print(fd, os.readlink("/proc/self/fd/%d" % fd))
    except OSError:
        continue
    if not os.readlink("/proc/self/fd/%d" % fd).startswith(("/tmp", "/home", "/proc", "/dev/pts")):
        won(fd)
