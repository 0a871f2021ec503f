# limit_s: 10
# Fills the memory with System V segments that no process has any more.
import ctypes

from prelude import libc

libc.shmat.restype = ctypes.c_void_p
libc.shmget.argtypes = (ctypes.c_int, ctypes.c_size_t, ctypes.c_int)
libc.shmat.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
libc.shmdt.argtypes = (ctypes.c_void_p,)
while True:
    segment = libc.shmget(0, 8 << 20, 0o1600)
    if segment < 0:
        break
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 1, 8 << 20)
    libc.shmdt(address)
    libc.msgget(0, 0o1600)
    libc.semget(0, 1, 0o1600)
    print("held", flush=True)
