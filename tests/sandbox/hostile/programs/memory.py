# limit_s: 10
import os

from prelude import won

data = []
try:
    for _ in range(1000):
        data.append(bytearray(os.urandom(4096) * 256))
    won("1 GiB")
except MemoryError:
    print("no more")
