# limit_s: 10
import ctypes

from prelude import syscall, won

b = ctypes.create_string_buffer(256)
for n, a in (
    (321, (0, b, 72)),
    (298, (b, 0, -1, -1, 0)),
    (250, (0, -3, 0)),
    (248, (b"user", b"k", b"v", 1, -3)),
    (425, (8, b)),
    (323, (0,)),
    (246, (0, 0, 0, 0)),
    (175, (b, 0, b"")),
    (169, (4276215469, 672274793, 0, 0)),
    (103, (3, b, 10)),
    (227, (0, b)),
    (167, (b"/tmp/x", 0)),
):
    if syscall(n, *a) >= 0:
        won(n)
    elif ctypes.get_errno() not in (1, 38, 97):
        print("reached the kernel", n)
        won(n)
