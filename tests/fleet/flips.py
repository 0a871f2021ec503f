"""A link that flips bits of what passes, and the sum of its bytes does not show it: a proxy, a mesh, a bad memory."""

import contextlib
import random
import socket
import threading


class Flips:
    """Passes connections on to a port of this machine. Use as a context manager.

    Args:
      port: where to.
      chance: that one bit of what comes in at once is flipped, either way.
      seed: of these chances; which bytes come in at once is not in anybody's hands.
    """

    def __init__(self, port, chance=0.0, seed=0):
        self.port, self.chance, self.random = port, chance, random.Random(seed)
        self.flips = {"asked": 0, "answered": 0}
        self._aims = {}  # by direction: bytes until the one to hit, which bit of it
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._listening.close()

    def aim(self, direction, byte, bit):
        """Hits this bit of what passes next."""
        with self._lock:
            self._aims = {direction: (byte, bit)}

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                for way in (("asked", near, far), ("answered", far, near)):
                    threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, direction, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self._spoilt(direction, bytearray(data)))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _spoilt(self, direction, data):
        with self._lock:
            byte, bit = self._aims.pop(direction, (None, 0))
            if byte is not None and byte >= len(data):
                self._aims[direction] = (byte - len(data), bit)
                byte = None
            if byte is None and self.random.random() < self.chance:
                byte, bit = self.random.randrange(len(data)), self.random.randrange(8)
            if byte is not None:
                data[byte] ^= 1 << bit
                self.flips[direction] += 1
        return data
