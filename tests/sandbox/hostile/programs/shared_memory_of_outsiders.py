# limit_s: 10
import ctypes

from prelude import MEMORY_ID, MEMORY_KEY, libc, won

libc.shmat.restype = ctypes.c_void_p
for identifier in (libc.shmget(MEMORY_KEY, 0, 0), MEMORY_ID):
    if identifier >= 0 and libc.shmat(identifier, None, 0) not in (None, ctypes.c_void_p(-1).value):
        won(identifier)
