"""Any number of engines, any staleness: are the weights and metrics of a fleet those of one process?

    python -m benchmarks.fleet_matrix                                # 1 to 4 engines, staleness 0 to 2: 15 runs
    python -m benchmarks.fleet_matrix --engines=2 --staleness=1,2    # a part

The real command on the tests' tiny run: search over several turns, whose every turn takes a time that no seed decides,
so that engines and episodes overtake each other differently each time. Compared with the run of one process at the same
`rl.staleness`: the digest of every published version, and every number of `metrics.jsonl` but times and what engines
count. The last line is JSON. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

from jaxagent.observe import jsonl
from tests.fleet import tiny_fleet

SLOW = (
    "--config.env=tests.fleet.slow_search:SlowSearch",
    "--config.env.prompt=plain",
    "--config.env.episode_timeout_s=60",
    "--config.env.wait_s=0",
    "--config.env.turn_s=0.2",
)


def run(folder: pathlib.Path, engines: Sequence[int], staleness: Sequence[int]) -> dict[str, object]:
    """Every combination once. Returns what the last line says.

    Raises:
      AssertionError: a run ended badly.
    """
    rows = []
    orders = set()
    for lag in staleness:
        expected = folder / f"one-process-{lag}"
        tiny_fleet.oracle_run(expected, lag)
        for count in engines:
            workdir, began = folder / f"engines-{count}-staleness-{lag}", time.monotonic()
            tiny_fleet.ended(tiny_fleet.fleet(workdir, count, f"--config.rl.staleness={lag}", *SLOW), workdir)
            seconds = time.monotonic() - began
            orders.add(tuple(tiny_fleet.arrivals(workdir)))
            played = [row["fleet/engines"] for row in jsonl.read(workdir / "metrics.jsonl") if "fleet/engines" in row]
            row = {
                "staleness": lag,
                "engines": count,
                "that_played_at_most": max(played),
                "same": same(workdir, expected),
            }
            rows.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items()) + f"  {seconds:.0f} s", flush=True)
    equal = sum(row["same"] for row in rows)
    return {"runs": len(rows), "as_one_process": equal, "orders_of_arrival": len(orders), "rows": rows}


def same(workdir: pathlib.Path, expected: pathlib.Path) -> bool:
    """Whether a fleet came to what one process came to; prints the first difference."""
    try:
        tiny_fleet.compare(workdir, expected)
    except AssertionError as error:
        print(f"{workdir.name}: {error}", flush=True)
        return False
    return True


def main(argv: Sequence[str]) -> int:
    """Runs all, and prints the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="1,2,3,4", help="numbers of engine processes")
    parser.add_argument("--staleness", default="0,1,2", help="values of rl.staleness")
    options = parser.parse_args(argv)
    engines, staleness = ([int(part) for part in text.split(",")] for text in (options.engines, options.staleness))
    with tempfile.TemporaryDirectory() as folder:
        told = run(pathlib.Path(folder), engines, staleness)
    print(json.dumps(told))
    return 0 if told["runs"] == told["as_one_process"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
