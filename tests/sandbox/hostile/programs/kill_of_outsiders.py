# limit_s: 10
import os
import time

from prelude import OUTSIDER, OWNER, won

for pid in [OUTSIDER, OWNER, -OWNER]:
    try:
        os.kill(pid, 9)
        won(pid)
    except OSError as e:
        print(e)
for s in (9, 19, 15, 11):
    try:
        os.kill(1, s)
    except OSError as e:
        print(e)
time.sleep(0.1)
