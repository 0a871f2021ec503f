# limit_s: 10
import socket

from prelude import UDP, connect, trying

s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
trying(s.sendto, b"x", ("127.0.0.1", UDP))
trying(connect, socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53))
