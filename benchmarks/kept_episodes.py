"""What a step costs more where every episode is kept: the laptop's RL stage with config.episodes.keep=all and none.

    python -m benchmarks.kept_episodes --policy=runs/search_r1/policy [--rounds=5] [--steps=12]

`--policy` is the model folder of a finished run, so that episodes are of real length. The two take turns in one
process, each from the same weights and seed, so that a step is the same work in all rounds: what counts is each step's
least time, `step_s` by the clock and `processor_s` of all threads. The first two steps and the last are left out. Then
the store alone takes 128 episodes, as they were played, and with `--tokens` tokens each, drawn from their own:
`append_s` is what the learner's thread spends, `thread_s` the processor time of the thread that packs, compresses and
writes; medians of nine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jaxagent import main as command
from jaxagent.config import EpisodesConfig
from jaxagent.observe.episode_store import EpisodeStore, Learnt, StoredEpisodes
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Episode, Trajectory

KEEP, LEFT_OUT = ("none", "all"), 2  # steps of a run that still warm up
FLAGS = ("--config.stages=rl", "--config.eval.every=0", "--config.eval.sampled=false", "--config.data.num_eval=2")


def step_seconds(workdir: Path, policy: str, keep: str, steps: int) -> np.ndarray:
    """f64[steps, 2] of one run: seconds of each step, by the clock and of processor time of all threads."""
    own = (f"--config.workdir={workdir}", f"--config.model.path={policy}", f"--config.rl.steps={steps}")
    flags = (*FLAGS, *own, "--config.checkpoint.every=0", f"--config.episodes.keep={keep}")
    times, record = [], Workdir.record

    def timed(*about: Any) -> None:
        record(*about)
        times.append((time.perf_counter(), time.process_time()))

    with mock.patch.object(Workdir, "record", timed):
        if code := command.main(["main", "--config=configs/search_r1.py", *flags]):
            sys.exit(code)
    # The last step evaluates, and is left out, too.
    return np.diff(times[LEFT_OUT:-1], axis=0)


def longer(trajectory: Trajectory, tokens: int, rng: np.random.Generator) -> Trajectory:
    """So many tokens, drawn from its own."""
    drawn = rng.integers(0, len(trajectory), tokens)
    columns = {field.name: getattr(trajectory, field.name) for field in dataclasses.fields(trajectory)}
    chosen: dict[str, Any] = {name: None if column is None else column[drawn] for name, column in columns.items()}
    return Trajectory(**chosen)


def store_seconds(folder: Path, episodes: Sequence[Episode], tokens: int, repetitions: int = 9) -> dict[str, float]:
    """Medians of what one step's episodes take; `tokens`: of each, 0 as they are."""
    rng = np.random.default_rng(0)
    if tokens:
        episodes = [dataclasses.replace(e, trajectories=(longer(e.trajectories[0], tokens, rng),)) for e in episodes]
    learnt = {
        id(t): Learnt(np.where(t.action_mask, 0.5, 0).astype(np.float32), t.logprobs, t.action_mask)
        for e in episodes
        for t in e.trajectories
    }
    store = EpisodeStore(folder, "rl", 0, EpisodesConfig(), False)
    append, thread = [], []

    def thread_time() -> float:
        return store._thread.submit(time.thread_time).result()

    for step in range(repetitions):
        before, started = thread_time(), time.perf_counter()
        store.append(step, episodes, learnt)
        append.append(time.perf_counter() - started)
        store.wait()
        thread.append(thread_time() - before)
    store.close()
    size = sum(path.stat().st_size for path in folder.iterdir()) / repetitions
    numbers = {"append_s": statistics.median(append), "thread_s": statistics.median(thread), "step_bytes": size}
    return numbers | {"tokens": sum(len(t) for e in episodes for t in e.trajectories) / len(episodes)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    runs: dict[str, list[np.ndarray]] = {keep: [] for keep in KEEP}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for keep in KEEP[:: -1 if number % 2 else 1]:
                runs[keep].append(step_seconds(Path(folder) / f"{keep}_{number}", args.policy, keep, args.steps))
        stored = StoredEpisodes(Path(folder) / "all_0/episodes", "rl")
        last = [episode for block in stored.blocks for episode in stored.of(block)][-128:]
        alone = {
            name: store_seconds(Path(folder) / name, last, tokens)
            for name, tokens in (("played", 0), ("long", args.tokens))
        }
    least = {keep: np.min(each, axis=0) for keep, each in runs.items()}  # of each step's rounds: the same work
    means = {keep: each.mean(axis=0).tolist() for keep, each in least.items()}
    ratios = [np.median(np.divide(a, b), axis=0).tolist() for a, b in zip(runs["all"], runs["none"], strict=True)]
    for name, numbers in alone.items():
        numbers |= {f"{key}_share": numbers[f"{key}_s"] / means["all"][1] for key in ("append", "thread")}
        print(f"128 episodes, {name}: " + "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    print("all over none, by round, [step_s, processor_s]: " + "  ".join(f"[{a:.3f}, {b:.3f}]" for a, b in ratios))
    names = ("step_s", "processor_s")
    seconds = {name: {keep: means[keep][place] for keep in KEEP} for place, name in enumerate(names)}
    seconds["ratio"] = {name: each["all"] / each["none"] for name, each in seconds.items()}
    print(json.dumps(seconds | {"store": alone}))


if __name__ == "__main__":
    main()
