"""What Ray places on a node: an actor that holds one process of a run, and nothing else. No data passes through Ray.

The process is started by `launch.keep`, which starts it again where it stands, watches its progress, and kills it
when this actor is gone. So whatever ends an actor (its node, its driver, `ray.kill`) ends the process.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

HOST = "THIS-NODE"  # in a command: the address of the node where it is started
_POLL_S = 1.0


class Process:
    """The actor. Each call is short; what it does not know of is on disk or in the coordinator."""

    def __init__(self):
        self._keep: subprocess.Popen[bytes] | None = None
        self._log: pathlib.Path | None = None

    def where(self) -> tuple[str, int]:
        """This node's address, and a port of it that is free now."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], restarts: int, grace_s: float, log: str
    ) -> str:
        """Starts the process; returns the node's address.

        Args:
          name: in messages.
          command: "python" in front is this actor's own.
          environment: beside the actor's, which has the devices that Ray chose.
          restarts: on this node.
          log: a file for its output; "" = the actor's, which Ray shows in the driver's console.
        """
        if log:
            self._log = pathlib.Path(log)
            self._log.parent.mkdir(parents=True, exist_ok=True)
        vitals = pathlib.Path(tempfile.mkdtemp(prefix="jaxagent-")) / name
        words = [sys.executable, "-m", "jaxagent.launch.keep", "--until_eof", f"--name={name}", f"--vitals={vitals}"]
        words += [f"--restarts={restarts}", f"--grace_s={grace_s}", *([f"--log={log}"] if log else [])]
        own = [sys.executable, *command[1:]] if command[0] == "python" else list(command)
        address, _ = self.where()
        own = [word.replace(f"--host={HOST}", f"--host={address}") for word in own]
        self._keep = subprocess.Popen(
            [*words, "--", *own],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,  # closed when this actor ends
            start_new_session=True,
        )
        return address

    def code(self) -> int | None:
        """Its exit code when it will not be started again here; None while it lives, after a moment."""
        assert self._keep is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._keep.wait(timeout=_POLL_S)
            return code if code >= 0 else 128 - code
        return None

    def stop(self) -> None:
        """SIGTERM: the process saves, and ends."""
        if self._keep is not None:
            self._keep.terminate()

    def end(self, wait_s: float) -> None:
        """The process is gone when this returns: closes what `keep` listens to, and waits for it."""
        if self._keep is None:
            return
        assert self._keep.stdin is not None
        self._keep.stdin.close()
        try:
            self._keep.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            self._keep.kill()  # and the system kills its child

    def last_line(self) -> str:
        """Of its log, for a message."""
        with contextlib.suppress(OSError, AttributeError):
            lines = self._log.read_text(errors="replace", encoding="utf-8")[-4000:].strip().splitlines()  # type: ignore[union-attr]
            return lines[-1] if lines else ""
        return ""
