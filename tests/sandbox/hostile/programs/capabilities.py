# limit_s: 10
from prelude import won

status = open("/proc/self/status").read()
for line in status.splitlines():
    if line.startswith("Cap") and line.split()[1].strip("0"):
        won(line)
    if line.startswith(("NoNewPrivs", "Seccomp:")) and line.split()[1] == "0":
        won(line)
