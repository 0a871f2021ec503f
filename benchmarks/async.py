"""What does an asynchronous run gain, what do processes cost, and how long does one stand still after a kill?

    python -m benchmarks.async [--steps=12] [--only=speed,protocol,recovery,tiny] [--quick]

**Speed-up.** The real coordinator, engine loops, client and supervisor (`async_processes.py`), as processes that speak
HTTP, around work that only waits: an episode is three turns whose environment takes 1 s in the median (lognormal, sigma
1), an update takes 2 s. Six engines with room for a whole step each, equal groups in every run, staleness 0 against
1, 2 and 4, rule `pinned`; wall-clock of all steps without the start of processes. So this is the gain of overlap alone:
engines do not slow down with what they hold. Beside it stands what the model in virtual time
(`async_simulation.py`) says, for three more runs, too, with fewer engines and other waits.

**Processes.** A tiny real run (one layer, 8 episodes a step) with staleness 0, by one process and by coordinator,
trainer and one engine: the median step of the second over the first, where every episode waits 3 s and where none does.
Needs jax, and takes some minutes. And a run of the same size whose episodes and updates take no time: what calls, files
and ledger cost a step, without weights.

**Recovery.** kill -9 of each role in a waiting run and in the tiny one: seconds until it does useful work again.

`--quick`: 6 steps, waits and updates a tenth as long, no tiny run. The last line is JSON:

  speedup_s1, _s2, _s4   of the synchronous wall-clock (goals: 1.4, 1.7, 2.0)
  s0_over_http           step time over that of one process, with slow environments (goal: 1.05 at most);
                         `s0_over_http_at_once` with environments that answer at once, `s0_step_s` both in seconds
  protocol_ms            of a step of 8 episodes that take no time: median and least
  recovery_s             by role; `recovery_tiny_s` of the tiny run
  model_off              of each run: the model's step time, episodes' staleness and the trainer's waiting off the
                         measured ones (`async_figures.off`)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
import time
from typing import Any

from benchmarks import async_figures as figures
from benchmarks import async_processes as processes
from benchmarks import async_tiny as tiny
from benchmarks.async_processes import Setup

STALENESS = (0, 1, 2, 4)
SHORT = 0.1  # of the waits and updates, with --quick
LIMIT_S = 3600.0
RECOVERY_S = 300.0  # for one role
# Beside those of the speed-up: other numbers of engines, and waits that are nearly equal or of a heavier tail.
VARIED: dict[str, dict[str, Any]] = {
    "s1_two_engines": {"staleness": 1, "engines": 2},
    "s2_three_engines_even_waits": {"staleness": 2, "engines": 3, "wait_sigma": 0.3},
    "s1_in_flight_three_engines_heavy_waits": {"staleness": 1, "engines": 3, "wait_sigma": 1.3, "rule": "in_flight"},
}
KILLED = Setup(steps=1000, staleness=1, engines=3, wait_s=0.2)  # is ended after the kills

NOTHING = Setup(steps=60, groups=2, attempts=4, engines=1, wait_s=1e-6, train_s=0.0)


def speedups(folder: pathlib.Path, base: Setup) -> dict[str, object]:
    """All runs, one after another."""
    setups = {f"s{s}": dataclasses.replace(base, staleness=s) for s in STALENESS}
    setups["s2_in_flight"] = dataclasses.replace(base, staleness=2, rule="in_flight")
    compared = tuple(setups)  # with the synchronous run
    setups |= {name: dataclasses.replace(base, **changes) for name, changes in VARIED.items()}
    runs = dict[str, figures.Run]()
    found: dict[str, object] = {}
    off = {}
    for name, setup in setups.items():
        real, model = figures.run(folder / name, setup, LIMIT_S), figures.modelled(setup)
        runs[name], off[name] = real, figures.off(model, real)
        gain = runs["s0"].wall_s / real.wall_s
        print(
            f"{name}: {real.wall_s:.1f} s{f', {gain:.2f}x' if name in compared else ''}; "
            f"step {real.step_s:.2f} s, the model says {model.step_s:.2f} s ({off[name]['step_percent']:+.1f} %); "
            f"the trainer waits {real.trainer_waits:.0%}, the model's {model.trainer_waits:.0%}; "
            f"ages {real.ages}, the model's {model.ages}",
            flush=True,
        )
        if name in compared[1:]:
            found[f"speedup_{name}"] = round(gain, 3)
    return {**found, "wall_s": {name: round(run.wall_s, 1) for name, run in runs.items()}, "model_off": off}


def protocol(folder: pathlib.Path) -> dict[str, float]:
    """Milliseconds of a step without work."""
    with figures.sleeping(folder, NOTHING) as fleet:
        figures.ended(fleet, folder / "console.log", RECOVERY_S)
    return figures.between(processes.marks(folder))


def recovery(folder: pathlib.Path) -> dict[str, float]:
    """In a waiting run that would last for long."""
    with figures.sleeping(folder, KILLED) as fleet:
        newest = lambda: max((row["number"] for row in processes.marks(folder)), default=-1)  # noqa: E731
        figures.wait_for(lambda: newest() >= 2, fleet, folder / "console.log", RECOVERY_S)
        return figures.recovery(folder, "engine-0", RECOVERY_S)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each waiting run; at least 6; default: 12, with --quick 6")
    parser.add_argument("--quick", action="store_true", help="see above")
    parser.add_argument("--only", default="speed,protocol,recovery,tiny", help="parts, with commas")
    options = parser.parse_args()
    parts = set(options.only.split(",")) - ({"tiny"} if options.quick else set())
    base = Setup(steps=options.steps or (6 if options.quick else 12))
    if options.quick:
        base = dataclasses.replace(base, wait_s=SHORT * base.wait_s, train_s=SHORT * base.train_s)
    found: dict[str, object] = {"setup": dataclasses.asdict(base)}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if "speed" in parts:
            found |= speedups(folder, base)
        if "protocol" in parts:
            found["protocol_ms"] = protocol(folder / "nothing")
        if "recovery" in parts:
            found["recovery_s"] = recovery(folder / "killed")
        if "tiny" in parts:
            slow, at_once = tiny.compare(folder, "slow"), tiny.compare(folder)
            found |= {"s0_over_http": slow["ratio"], "s0_over_http_at_once": at_once["ratio"]}
            found["s0_step_s"] = {"slow": slow["step_s"], "at_once": at_once["step_s"]}
            found["recovery_tiny_s"] = tiny.recovery(folder / "tiny-killed")
    print(json.dumps({**found, "seconds": round(time.monotonic() - begun)}))


if __name__ == "__main__":
    main()
