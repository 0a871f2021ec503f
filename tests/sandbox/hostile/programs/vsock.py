# limit_s: 10
import socket

from prelude import won

for cid in (1, 2, 3):
    try:
        s = socket.socket(40, socket.SOCK_STREAM)
        won("socket")
        s.settimeout(1)
        s.connect((cid, 1024))
        won(cid)
    except OSError as e:
        print(e)
