# limit_s: 10
import socket

from prelude import TCP, connect, trying

trying(connect, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", TCP))
trying(connect, socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80))
