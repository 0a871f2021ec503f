"""Serves a web application on a port of 127.0.0.1 that the system chooses, and writes the port to standard output.

    python serve_app.py package.module:app
    python serve_app.py path/to/file.py:app        or of a function that makes it: package.module:make_app()

It runs in the server's own Python, which has uvicorn, and imports nothing of ours.
"""

from __future__ import annotations

import os
import pkgutil
import runpy
import socket
import sys

PORT = "serves on port "  # how the line begins that says it


def main(target: str) -> None:
    """Serves until it is killed."""
    sys.path[0] = os.getcwd()  # and not the folder of this file
    import uvicorn

    place, _, name = target.removesuffix("()").rpartition(":")
    app = runpy.run_path(place)[name] if place.endswith(".py") else pkgutil.resolve_name(f"{place}:{name}")
    app = app() if target.endswith("()") else app
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws_ping_interval=None))
    print(f"\n{PORT}{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
