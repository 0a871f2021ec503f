# limit_s: 10
import os
import threading
import time

from prelude import won

n = 0
try:
    while n < 300:
        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        n += 1
except RuntimeError:
    pass
if n > 60:
    won(n)
os._exit(0)
