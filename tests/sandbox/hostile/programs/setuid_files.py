# limit_s: 10
import os
import shutil
import subprocess

from prelude import won

shutil.copy("/bin/sh", "/tmp/sh")
os.chmod("/tmp/sh", 3583)
r = subprocess.run(
    ["/tmp/sh", "-p", "-c", 'grep -E "^(Cap(Eff|Prm|Bnd))" /proc/self/status'], capture_output=True, text=True
).stdout
if any(line.split()[1].strip("0") for line in r.splitlines()):
    won(r)
COMMANDS = [["mount", "-t", "tmpfs", "x", "/tmp"]]
if os.getuid() != 0:  # what looks like root may change its own /etc/passwd, and become itself
    COMMANDS += [["su", "-c", "id"], ["passwd", "-d", "root"]]
for c in COMMANDS:
    try:
        if subprocess.run(c, stdin=subprocess.DEVNULL, capture_output=True, timeout=3).returncode == 0:
            won(c)
    except (OSError, subprocess.TimeoutExpired):
        pass
try:
    os.setuid(0 if os.getuid() else 1)
    won()
except OSError as e:
    print(e)
