# limit_s: 10
import os

from prelude import BAIT, won

fd = os.open("/", os.O_RDONLY)
os.mkdir("/tmp/jail")
try:
    os.chroot("/tmp/jail")
    os.fchdir(fd)
    [os.chdir("..") for _ in range(64)]
    os.chroot(".")
    won()
except OSError as e:
    print(e)
if os.path.exists(BAIT):
    won("bait")
