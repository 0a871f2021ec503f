# limit_s: 10
import os

from prelude import libc, syscall, won

os.makedirs("/tmp/m", exist_ok=True)
for a in (
    (b"none", b"/tmp/m", b"tmpfs", 0),
    (b"proc", b"/tmp/m", b"proc", 0),
    (b"/", b"/tmp/m", None, 4096),
    (None, b"/", None, 32 | 4096),
):
    if libc.mount(*a, None) == 0:
        won(a)
for p in (b"/proc", b"/proc/sys", b"/usr", b"/"):
    if libc.umount2(p, 2) == 0:
        won(p)
if syscall(430, b"tmpfs", 0) >= 0:
    won("fsopen")
if syscall(428, -100, b"/", 1) >= 0:
    won("open_tree")
