# limit_s: 30
from prelude import INODES, won

n = 0
try:
    while n < 60000:
        open("/tmp/f%d" % n, "w").close()
        n += 1
except OSError as e:
    print(n, e)
if n >= 60000 and INODES:
    won(n)
