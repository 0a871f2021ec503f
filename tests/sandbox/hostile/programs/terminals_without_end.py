# limit_s: 10
import os

from prelude import TERMINALS, won

n = 0
fds = []
try:
    while n < 5000:
        fds.append(os.openpty())
        n += 1
except OSError as e:
    print(n, e)
if n > TERMINALS:
    won(n)
