# limit_s: 10
# The requests of all users of a host together are limited (fs.aio-max-nr).
import ctypes

from prelude import syscall, won

context = ctypes.c_ulong()
if syscall(206, 1024, ctypes.addressof(context)) == 0:
    won()
