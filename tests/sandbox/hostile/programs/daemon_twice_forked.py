# limit_s: 10
import contextlib
import os
import signal
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in range(1, 31):
            with contextlib.suppress(OSError):
                signal.signal(s, signal.SIG_IGN)
        while True:
            time.sleep(1)
    os._exit(0)
os._exit(0)
