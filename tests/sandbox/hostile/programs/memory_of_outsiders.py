# limit_s: 10
import ctypes
import struct

from prelude import OUTSIDER, OWNER, syscall, won

b = ctypes.create_string_buffer(8)
iov = struct.pack("QQ", ctypes.addressof(b), 8)
for pid in (1, OUTSIDER, OWNER):
    if syscall(310, pid, iov, 1, iov, 1, 0) > 0:
        won(pid)
