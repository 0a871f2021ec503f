# limit_s: 10
import socket

from prelude import won

for f, k, p in (
    (socket.AF_PACKET, socket.SOCK_RAW, 3),
    (socket.AF_INET, socket.SOCK_RAW, 1),
    (38, socket.SOCK_SEQPACKET, 0),
):
    try:
        socket.socket(f, k, p)
        won(f)
    except OSError as e:
        print(e)
