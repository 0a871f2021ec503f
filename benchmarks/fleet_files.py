"""How fast an asynchronous run's files are: the ledger's lines, stored episodes, and versions of the weights.

    python -m benchmarks.fleet_files [--folder=DIR] [--seconds=2] [--weights_mib=256]

`episodes_per_s`: episodes of 48 KiB (as sent), checked, each on disk before the next of its thread, 16 threads.
`stored_per_s`: the same with the ledger's line behind each, as a coordinator acknowledges them. `lines_per_s`: appends
that are asked for together and share an fsync; `append_ms`: one that waits alone. `pack_ms`, `unpack_ms`: one such
episode. Weights are in leaves of 32 MiB; writing ends on disk, reading compares every byte. A folder in memory
(--folder=/dev/shm) leaves the disk out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

from jaxagent.data import codec
from jaxagent.fleet import manifest, weight_reader, weights
from jaxagent.fleet.episodes import EpisodeFiles
from jaxagent.fleet.ledger import Ledger
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory

THREADS = 16
EPISODE_BYTES = 48 << 10
LEAF_MIB = 32


def episode(tokens: int) -> Episode:
    """Random tokens, the half of them sampled."""
    random = np.random.default_rng(0)
    kinds = np.where(np.arange(tokens) % 200 < 100, TokenKind.ACTION, TokenKind.OBSERVATION).astype(np.uint8)
    action = kinds == TokenKind.ACTION
    return Episode(
        task=Task("task", "prompt", ("answer",)),
        sample=0,
        trajectories=(
            Trajectory(
                tokens=random.zipf(1.3, tokens).clip(0, 150_000).astype(np.int32),
                kinds=kinds,
                logprobs=np.where(action, -random.exponential(0.5, tokens), 0).astype(np.float32),
                policy_versions=np.where(action, 7, -1).astype(np.int32),
                turns=(np.arange(tokens) // 200).astype(np.int32),
            ),
        ),
        reward=1.0,
        rewards={"em": 1.0},
        stop_reason=StopReason.ANSWER,
        turns=tokens // 200,
    )


def sized(target: int) -> Episode:
    """An episode of about so many packed bytes."""
    return episode(int(4000 * target / len(codec.pack(episode(4000)).body)))


def rate(threads: int, seconds: float, action: Callable[[int], object]) -> float:
    """Actions per second, by so many threads."""
    numbers, begin = itertools.count(), time.monotonic()
    end = begin + seconds

    def work(_: int) -> int:
        done = 0
        while time.monotonic() < end:
            action(next(numbers))
            done += 1
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, range(threads)))
    return done / (time.monotonic() - begin)


def milliseconds(action: Callable[[], object], times: int = 20) -> float:
    """Median."""
    taken = []
    for _ in range(times):
        begin = time.monotonic()
        action()
        taken.append(time.monotonic() - begin)
    return statistics.median(taken) * 1e3


def measure_ledger(folder: pathlib.Path, seconds: float) -> dict[str, float]:
    """Lines and episodes."""
    played = sized(EPISODE_BYTES)
    packed = codec.pack(played)
    line = {"kind": "stored", "group": [12, 0, 3], "sample": 1, "digest": packed.digest, "version": 11, "lease": "1-1"}
    with Ledger(folder) as log:
        store = EpisodeFiles(folder, {})

        def put(number: int) -> None:
            store.put(((0, 0, number), 0), packed)

        def put_and_say(number: int) -> None:
            store.put(((1, 0, number), 0), packed)
            log.append([line]).result(60)

        return {
            "pack_ms": milliseconds(lambda: codec.pack(played)),
            "unpack_ms": milliseconds(lambda: codec.unpack(packed, "here")),
            "append_ms": milliseconds(lambda: log.append([line]).result(60)),
            "lines_per_s": rate(1, seconds, lambda _: [f.result(60) for f in [log.append([line]) for _ in range(100)]])
            * 100,
            "episodes_per_s": rate(THREADS, seconds, put),
            "stored_per_s": rate(THREADS, seconds, put_and_say),
            "episode_bytes": len(packed.body),
        }


def measure_weights(folder: pathlib.Path, mib: int) -> dict[str, float]:
    """MiB per second."""
    count = max(1, mib // LEAF_MIB)
    shape = (LEAF_MIB << 20 >> 1) // 1024, 1024
    random = np.random.default_rng(0)
    tree = {("w", i): random.integers(0, 2**16, shape, np.uint16).view(ml_dtypes.bfloat16) for i in range(count)}

    def mib_per_s(action: Callable[[], object]) -> float:
        begin = time.monotonic()
        action()
        return count * LEAF_MIB / (time.monotonic() - begin)

    def read() -> None:
        with weight_reader.hold(folder / "a", 1, "run", like=tree) as held:
            held.read()

    return {
        "publish_mib_per_s": mib_per_s(lambda: weights.publish(folder / "a", manifest.shares(tree), "run", 1)),
        "read_mib_per_s": mib_per_s(read),
    }


@dataclasses.dataclass(frozen=True)
class Options:
    """Flags."""

    folder: str | None
    seconds: float
    weights_mib: int


def main(options: Options) -> None:
    """Measures and prints."""
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        found = measure_ledger(folder / "run", options.seconds) | measure_weights(folder, options.weights_mib)
    found = {key: round(value, 2) for key, value in found.items()}
    for key, value in found.items():
        print(f"{key:20} {value:12,.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", help="where the files are written; a temporary one of the system's unless said")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each rate")
    parser.add_argument("--weights_mib", type=int, default=256, help="of weights")
    main(Options(**vars(parser.parse_args())))
