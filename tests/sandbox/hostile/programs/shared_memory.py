# limit_s: 10
import os

from prelude import won

try:
    fd = os.open("/dev/shm/x", os.O_CREAT | os.O_WRONLY)
    for _ in range(300):
        if os.write(fd, os.urandom(1 << 20)) < 1 << 20:
            raise OSError("short")
    won()
except OSError as e:
    print(e)
