"""Replay, a guest of the runs: steps of a run are made again from bundles and record, and compared bit by bit.

`python -m jaxagent.replay` is the command, and `main` runs one command line of it. `record_diff` compares two plays of
an episode, `recorded_run` says which steps of a workdir can be made again, `run` makes them and the certificate.
"""

from jaxagent.replay.command import main

__all__ = ["main"]
