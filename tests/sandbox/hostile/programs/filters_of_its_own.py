# limit_s: 10
import ctypes
import socket
import struct

from prelude import libc, syscall, won

RETURN = ctypes.create_string_buffer(struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 1, ctypes.addressof(RETURN)))

for family, kind in ((socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_STREAM)):
    with socket.socket(family, kind) as s:
        for option in (26, 50, 51, 52):
            if libc.setsockopt(s.fileno(), 1, option, program, 16) == 0:
                won(f"a filter on a socket, option {option}")
            elif ctypes.get_errno() != 92:  # ENOPROTOOPT, which is the sandbox's answer
                won(f"option {option} reached the kernel")
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if syscall(157, 22, 2, ctypes.addressof(program), 0, 0) == 0:
    won("prctl")
for flags in (0, 1, 8):
    if syscall(317, 1, flags, ctypes.addressof(program)) >= 0:
        won("seccomp")
