# limit_s: 10
import os

from prelude import won

for name in ("mem", "maps", "environ", "root", "cwd", "fd/10", "fd/11", "syscall"):
    try:
        open("/proc/1/" + name, "rb").read(1)
        won(name)
    except OSError as e:
        print(name, e)
try:
    os.listdir("/proc/1/fd")
    won("fd")
except OSError:
    pass
