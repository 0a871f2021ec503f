# limit_s: 10
import os

from prelude import won

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
