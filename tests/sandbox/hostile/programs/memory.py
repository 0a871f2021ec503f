# limit_s: 10
import os

from prelude import won

data = []
for _i in range(1000):
    data.append(bytearray(os.urandom(4096) * 256))
won("4 GiB")
