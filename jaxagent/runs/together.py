"""Where the processes of one trainer must do the same, or take turns. With one process nothing here does anything."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from jaxagent.config import Config, to_dict
from jaxagent.learner import peers
from jaxagent.runs.stopping import Stopping


class Unwritten:
    """A log in a process that does not write it: process 0 writes what all have in common."""

    position = 0

    def write(self, *_: Any) -> None:
        """Nothing."""

    append = extend = write

    def close(self) -> None:
        """Nothing."""


@contextlib.contextmanager
def one_after_another(what: str) -> Iterator[None]:
    """Process 0 does what is inside, which may write files for all, and then the others, which find them."""
    if not peers.is_first():
        peers.meet(what)
    yield
    if peers.is_first():
        peers.meet(what)


def start(bundle: int | None, identity: Mapping[str, Any], cfg: Config) -> None:
    """Compares what the processes go on from.

    Args:
      bundle: the newest.
      identity: of `Parts`.
      cfg: of the run.

    Raises:
      PeerError: they see another workdir, other data, or another config.
    """
    if peers.count() > 1:
        for what, value in (("newest bundle", bundle), ("data", dict(identity)), ("config", to_dict(cfg))):
            text = json.dumps(value, sort_keys=True, default=str)
            peers.agree(f"the {what}", hashlib.sha256(text.encode()).hexdigest()[:16])


def asks_to_end(here: bool, stopping: Stopping) -> bool:
    """Whether any process is to save after this step, and end; a signal that one has got is then everybody's."""
    said = peers.meet("the end of a step", [here, stopping.asked])
    if signals := [number for _, number in said if number is not None]:
        stopping.asked = stopping.asked or signal.Signals(signals[0])
    peers.ending_together = any(ending for ending, _ in said)
    return peers.ending_together
