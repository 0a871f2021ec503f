"""What does a slow link between trainer and engines cost? 200 ms each way, 20 MB/s, for all engines together.

    python -m benchmarks.slow_link [--only=in_flight,pinned] [--quick]

A proxy (slow_proxy.py) stands before the trainer's server of weights; all else is the real thing.

**in_flight.** An engine plays with a model of 36 MB while the next versions come. How long does it stand still between
two dispatches when it takes one, and how long does the device need alone to lay that one out? Afterwards another
engine without the link plays the same episodes, with swaps after the same dispatches: all tokens must be equal.

**pinned.** How long does the trainer wait for a step's batch with and without the link? Episodes and updates are waits.
`s1` and `s2` have an engine per cohort. `s2_one_engine` has fewer engines than S: they play one step after another, and
fetch the next version while they play (`_late`: they do not).

`--quick`: fewer steps, a model of 9 MB, and of pinned `s1` alone. The last line is JSON:

  in_flight   pause_ms (and pause_most_ms, the worst): between two dispatches at a swap; copy_ms: what the device takes
              alone, the least of nine; over_copy_ms: the difference (goal: 50 ms at most); gap_ms: between any two
              dispatches; dispatch_ms, and while a version comes; coming_s: from the question to the swap
  pinned      of each case, without link and with it: wait_s of the trainer per step (mean, most), transfer_s, step_s
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import pathlib
import tempfile
import time

from benchmarks import slow_link_in_flight, slow_link_pinned
from benchmarks.slow_link_pinned import Case, Link

LINK = Link()
# Transfer and play together are shorter than S updates, and in s2 the transfer alone is longer than one.
CASES = {
    "s1": Case(staleness=1, engines=2, play_s=0.3, megabytes=16),
    "s2": Case(staleness=2, engines=3, play_s=0.3, megabytes=40),
    "s2_one_engine": Case(staleness=2, engines=1, play_s=2.2, megabytes=16),
}
STEPS, LAYERS = 10, 4  # of in_flight
QUICK = 4, 1  # the same


def pinned(folder: pathlib.Path, quick: bool) -> dict[str, object]:
    """All cases, one run after another."""
    found: dict[str, object] = {}
    for name, case in CASES.items():
        if quick and name != "s1":
            continue
        case = dataclasses.replace(case, steps=5) if quick else case
        runs = {"without": (case, None), "with": (case, LINK)}
        if case.engines < case.staleness:
            runs["with_late"] = (dataclasses.replace(case, ahead=False), LINK)
        for which, (each, link) in runs.items():
            waits = slow_link_pinned.run(folder / f"{name}-{which}", each, link).told()
            found[f"{name}_{which}"] = waits
            print(f"pinned     {name:14} {which:10} {told(waits)}", flush=True)
    return found


def told(figures: dict[str, float]) -> str:
    """A line."""
    return "  ".join(f"{name} {value:g}" for name, value in figures.items())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see above")
    parser.add_argument("--only", default="in_flight,pinned", help="parts, with commas")
    options = parser.parse_args()
    logging.getLogger("jaxagent").propagate = False  # what the coordinator tells is in its folder
    parts, begun = options.only.split(","), time.monotonic()
    found: dict[str, object] = {"link": dataclasses.asdict(LINK)}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if "in_flight" in parts:
            steps, layers = QUICK if options.quick else (STEPS, LAYERS)
            figures = slow_link_in_flight.run(folder / "in_flight", LINK, steps, layers)
            found["in_flight"] = figures
            print(f"in_flight  {told(figures)}", flush=True)
        if "pinned" in parts:
            found["pinned"] = pinned(folder, options.quick)
    print(json.dumps({**found, "seconds": round(time.monotonic() - begun)}))


if __name__ == "__main__":
    main()
