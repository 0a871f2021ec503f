# limit_s: 10
import ctypes

from prelude import syscall, won

for number in (*range(467, 480), 600, 1024, 0x3FFFFFFF):
    if syscall(number, -1, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 38:
        won(number)
