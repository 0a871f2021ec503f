# limit_s: 10
import os
import signal
import time

from prelude import won

n = 0
try:
    while n < 300:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        n += 1
except OSError:
    pass
print("forked", n)
if n > 60:
    won(n)
os.kill(-1, signal.SIGTERM)
