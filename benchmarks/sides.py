"""Contenders of a benchmark, each in a process of its own, as its users run it: one line of JSON asks, one answers.

A side that waits does no work, so that the other has the machine to itself. `serve` is the other end.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Side:
    """One contender: `ask` sends a request, `answer` waits for what it says; `call` does both.

    Args:
      name: for messages.
      command: what follows the interpreter on its command line.
      timeout_s: for one answer; the first one holds all compilations.
    """

    def __init__(self, name: str, command: Sequence[str], timeout_s: float) -> None:
        self.name, self._timeout_s = name, timeout_s
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, request: Any) -> None:
        """Sends anything that JSON can say."""
        self._process.stdin.write(f"{json.dumps(request)}\n")

    def answer(self) -> Any:
        """Raises RuntimeError when the process died or is silent for `timeout_s`."""
        ready, _, _ = select.select([self._process.stdout], [], [], self._timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"No answer from the process of '{self.name}' within {self._timeout_s:.0f} s.")
        return json.loads(line)

    def call(self, request: Any) -> Any:
        """Asks, and waits for the answer."""
        self.ask(request)
        return self.answer()


def requests() -> Iterator[Any]:
    """What is asked of this process, until the asker goes."""
    for line in sys.stdin:
        yield json.loads(line)


def reply_with() -> Callable[[Any], None]:
    """How to answer. From now on whatever else writes to stdout, a library's progress say, goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr

    def reply(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    return reply
