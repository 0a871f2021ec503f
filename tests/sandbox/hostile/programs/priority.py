# limit_s: 10
import os

from prelude import won

try:
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    won()
except OSError as e:
    print(e)
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    won()
except OSError as e:
    print(e)
