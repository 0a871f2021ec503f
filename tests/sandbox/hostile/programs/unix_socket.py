# limit_s: 10
import socket

from prelude import DIRECTORY, connect, trying

trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, DIRECTORY + "/socket")
for p in ("/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private"):
    trying(connect, socket.AF_UNIX, socket.SOCK_STREAM, p)
