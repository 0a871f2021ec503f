# limit_s: 10
import os
import struct

from prelude import libc, syscall, won

for flag in (268435456, 131072, 536870912, 1073741824, 134217728, 67108864, 33554432):
    if libc.unshare(flag) == 0:
        won(hex(flag))
    if syscall(56, flag | 17, 0, 0, 0, 0) > 0:
        won("clone")
args = struct.pack("8Q", 268435456, 0, 0, 0, 17, 0, 0, 0)
if syscall(435, args, 64) > 0:
    won("clone3")
for n in ("user", "mnt", "pid", "net"):
    if libc.setns(os.open("/proc/self/ns/" + n, os.O_RDONLY), 0) == 0 and n != "user":
        won(n)
