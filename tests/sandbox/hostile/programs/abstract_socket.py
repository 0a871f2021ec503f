# limit_s: 10
import socket

from prelude import ABSTRACT, connect, trying

trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, "\0" + ABSTRACT)
