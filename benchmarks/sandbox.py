"""How fast do sandboxes start, and how many commands per second do they run?

    python -m benchmarks.sandbox [--backends=namespaces,bubblewrap] [--seconds=4] [--at=1,8,64]

For each back end that works here and each number of concurrent sandboxes:

  starts_per_s    whole lives: start (copy-on-write root where the back end has one), first command in its shell, end.
                  `start_ms` is the median time from the call to a sandbox that answers, without the first command;
                  `cpu_ms` the processor time of a whole life, ours and the sandbox's, which other work on the machine
                  disturbs least: processors / cpu_ms is what an idle machine could start.
  commands_per_s  `cd`, a builtin, in persistent shells that are already there; one at a time in each.
                  `programs_per_s` is the same with a program, `ls /`.

One trainer process does all of it, so at 64 the numbers hold for the client and the kernel together. The last line is
JSON: `backend` (the best one that works), `starts_per_s_64` and `commands_per_s_64` of it, and `all`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable

from jaxagent.sandbox import choose
from jaxagent.sandbox.base import Backend, Sandbox, SandboxError, Spec
from jaxagent.sandbox.owner import Owner

WIDTHS = (10, 10, 8, 12, 12)  # of the table's columns


async def measure_starts(backend: Backend, concurrency: int, seconds: float) -> tuple[float, float, float]:
    """(lives per second, median start in ms, processor ms of a life)."""
    times, end, lives = [], time.perf_counter() + seconds, 0
    begin, used = time.perf_counter(), sum(os.times()[:4])

    async def worker() -> None:
        nonlocal lives
        while time.perf_counter() < end:
            called = time.perf_counter()
            async with await backend.start(Spec()) as sandbox:
                times.append(time.perf_counter() - called)
                result = await sandbox.run("cd /", 60, 1000)
                assert result.exit_code == 0
            lives += 1

    await asyncio.gather(*[worker() for _ in range(concurrency)])
    return (
        lives / (time.perf_counter() - begin),
        1000 * statistics.median(times),
        1000 * (sum(os.times()[:4]) - used) / lives,
    )


async def measure_commands(sandboxes: list[Sandbox], command: str, seconds: float) -> float:
    """Commands per second over all the sandboxes."""
    end, done = time.perf_counter() + seconds, 0
    begin = time.perf_counter()

    async def worker(sandbox: Sandbox) -> None:
        nonlocal done
        while time.perf_counter() < end:
            result = await sandbox.run(command, 60, 10_000)
            assert result.exit_code == 0
            done += 1

    await asyncio.gather(*[worker(s) for s in sandboxes])
    return done / (time.perf_counter() - begin)


async def measure(backend: Backend, concurrency: int, seconds: float) -> dict[str, float]:
    """All numbers of one back end at one concurrency."""
    starts, start_ms, cpu_ms = await measure_starts(backend, concurrency, seconds)
    sandboxes = []
    try:
        for _ in range(concurrency):
            sandboxes.append(await backend.start(Spec()))
        warm: Callable[[Sandbox], Awaitable] = lambda s: s.run("cd /", 60, 1000)  # noqa: E731
        await asyncio.gather(*map(warm, sandboxes))
        commands = await measure_commands(sandboxes, "cd /", seconds)
        programs = await measure_commands(sandboxes, "ls /", seconds)
    finally:
        await asyncio.gather(*[s.close() for s in sandboxes])
    found = {
        "starts_per_s": starts,
        "start_ms": start_ms,
        "cpu_ms": cpu_ms,
        "commands_per_s": commands,
        "programs_per_s": programs,
    }
    return {name: round(value, 1) for name, value in found.items()}


async def main(names: list[str], at: list[int], seconds: float) -> None:
    """Measures and prints."""
    everything: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before")
    heads = ("starts/s", "start ms", "cpu ms", "commands/s", "programs/s")
    print(f"{'back end':20} {'at once':>7}" + "".join(f"{h:>{w}}" for h, w in zip(heads, WIDTHS, strict=True)))
    for name in names:
        owner = Owner()
        try:
            backend = await choose.probe({**choose.SAFE, **choose.UNSAFE}[name], owner)
        except SandboxError as failure:
            print(f"{name:20} does not work here: {failure}")
            owner.close()
            continue
        try:
            everything[name] = {}
            for concurrency in at:
                row = await measure(backend, concurrency, seconds)
                everything[name][str(concurrency)] = row
                print(
                    f"{name:20} {concurrency:7}"
                    + "".join(f"{v:{w}.1f}" for v, w in zip(row.values(), WIDTHS, strict=True)),
                    flush=True,
                )
        finally:
            await backend.close()
            owner.close()
    best = next((n for n in choose.SAFE if n in everything), next(iter(everything), None))
    last = everything.get(best, {}).get(str(max(at)), {})
    print(
        json.dumps(
            {
                "backend": best,
                "starts_per_s_64": last.get("starts_per_s"),
                "commands_per_s_64": last.get("commands_per_s"),
                "all": everything,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", default=",".join([*choose.SAFE, *choose.UNSAFE]))
    parser.add_argument("--at", default="1,8,64", help="concurrent sandboxes; the JSON's _64 is the largest")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each number")
    options = parser.parse_args()
    asyncio.run(main(options.backends.split(","), [int(n) for n in options.at.split(",")], options.seconds))
