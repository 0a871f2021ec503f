# limit_s: 10
import os

from prelude import OUTSIDER, OWNER, syscall, won

seen = [int(p) for p in os.listdir("/proc") if p.isdigit()]
if OUTSIDER in seen and len(seen) > 20:
    won("sees the host")
for pid in [1, OUTSIDER, OWNER]:
    if syscall(101, 16, pid, 0, 0) == 0:
        won(pid)
