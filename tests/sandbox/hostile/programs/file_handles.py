# limit_s: 10
import ctypes
import struct

from prelude import syscall, won

b = ctypes.create_string_buffer(256)
b[0:4] = struct.pack("I", 128)
if syscall(304, -100, b, 0) >= 0:
    won()
