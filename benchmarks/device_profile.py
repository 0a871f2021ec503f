"""Where an accelerator's time goes: the kernels of a call, by name, from jax's own profiler.

Function in -> a table of kernels with their share of the device's time, and how long the device was idle between them.
"""

from __future__ import annotations

import collections
import pathlib
import tempfile
from collections.abc import Callable

import jax


def kernels(call: Callable[[], object]) -> tuple[dict[str, tuple[int, float]], float]:
    """Runs `call` once under the profiler.

    Returns:
      ({kernel: (launches, seconds)}, seconds from the first kernel's start to the last one's end).
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        total: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        first, last = float("inf"), 0.0
        for plane in data.planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    total[event.name][0] += 1
                    total[event.name][1] += event.duration_ns / 1e9
                    first, last = min(first, event.start_ns), max(last, event.start_ns + event.duration_ns)
    return {name: (int(n), s) for name, (n, s) in total.items()}, max(0.0, (last - first) / 1e9)


def table(call: Callable[[], object], rows: int = 18) -> str:
    """The kernels that take the most, one line each, and what the device spent idle."""
    by_name, span = kernels(call)
    busy = sum(seconds for _, seconds in by_name.values())
    largest = sorted(by_name.items(), key=lambda item: -item[1][1])[:rows]
    lines = [f"{s * 1e3:9.2f} ms {s / max(span, 1e-9):6.1%} {n:6d} x {name[:90]}" for name, (n, s) in largest]
    launches = sum(n for n, _ in by_name.values())
    return "\n".join([*lines, f"{busy * 1e3:9.2f} ms busy of {span * 1e3:.2f} ms, {launches} launches"])
