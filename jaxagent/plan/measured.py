"""How fast a fleet's parts are: from what a run has left in its workdir, whether it was one process or a fleet."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import Config, ConfigError, modern, to_dict
from jaxagent.fleet.simulate import Turns
from jaxagent.observe import jsonl
from jaxagent.observe.files import CONFIG_FILE, METRICS_FILE, RECORD_FOLDER, RUN_FILE
from jaxagent.plan.pace import Pace
from jaxagent.runs import record
from jaxagent.runs.again.sample import turns
from jaxagent.runs.checks import RL
from jaxagent.types import Episode

NEWEST = 20  # steps whose median is taken
EPISODES = 1000  # of the newest recorded step, at most, from which lengths and waits are drawn
# What decides how long a token takes and how long an episode waits: other settings have other times.
DECIDING = ("numerics", "mesh", "model", "engine", "env")
COUNTS = ("steps", "tasks_per_step", "group_size", "staleness")  # of `rl`, what changes no time per token


class NotMeasuredError(Exception):
    """The workdir cannot say; the message tells why."""


def measured(cfg: Config, by_formula: Pace) -> Pace:
    """The pace of the run in `config.workdir`.

    How a decode step's time divides into what it costs anyway and what each sequence adds is not measured. Both are
    those of `by_formula`, times the factor by which the engine took longer than they say.

    Raises:
      NotMeasuredError: the workdir holds no run of this config that has trained two steps.
    """
    workdir = Path(cfg.workdir)
    try:
        rows = [row for row in jsonl.read(workdir / METRICS_FILE) if row["stage"] == RL]
        rows = [row for row in rows if row.get("time/learn_s") and row.get("episode/action_tokens")]
        rows = rows[1:][-NEWEST:]  # the first step compiles
        if not rows:
            raise NotMeasuredError(f"{workdir} has no metrics of two trained steps of the stage '{RL}'.")
        was = modern(json.loads((workdir / CONFIG_FILE).read_text(encoding="utf-8")))
        on = json.loads((workdir / RUN_FILE).read_text(encoding="utf-8"))["starts"][-1]["devices"]
        episodes, said = _episodes(workdir, rows)
        factor = statistics.median(slower(row, cfg.engine.steps_per_dispatch, by_formula) for row in rows)
    except (ConfigError, OSError, ValueError, TypeError, LookupError) as error:
        raise NotMeasuredError(f"what lies in {workdir} cannot be read ({type(error).__name__}: {error})") from error
    now = json.loads(json.dumps(to_dict(cfg)))
    if other := [name for name in DECIDING if was.get(name) != now[name]]:
        raise NotMeasuredError(f"the run in {workdir} has another config.{', config.'.join(other)}.")
    unlike = [f"rl.{name}" for name in now["rl"] if name not in COUNTS and was["rl"].get(name) != now["rl"][name]]
    return Pace(
        decode_s=by_formula.decode_s * factor,
        sequence_s=by_formula.sequence_s * factor,
        prefill_s=by_formula.prefill_s * factor,
        update_s=statistics.median(row["time/learn_s"] / _sampled(row) for row in rows),
        episodes=episodes,
        waits_known=True,
        sources=(
            f"seconds per token: measured in {len(rows)} steps in {workdir}, on {', '.join(on)}",
            said,
            *([f"that run differs in {', '.join(unlike)}, which may change what an update costs"] if unlike else []),
        ),
    )


def slower(row: Mapping[str, Any], steps_per_dispatch: int, by_formula: Pace) -> float:
    """By which factor the engines of a step took longer than the formula says.

    One process has its engine's own counters. A fleet's step knows how long its episodes were being decoded, so how
    many were at once in each engine.
    """
    if row.get("engine/dispatches"):
        took_s = row["engine/decode_s"] + row["engine/prefill_s"]
        steps, sequences = row["engine/dispatches"] * steps_per_dispatch, row["engine/sampled_tokens"]
    else:
        took_s, steps = row["episode/decode_s"], row["episode/action_tokens"]
        step_s = row["time/rollout_s"] + row["time/learn_s"]
        at_once = row["episode/count"] * took_s / (step_s * max(1.0, row.get("fleet/engines", 1.0)))
        sequences = steps * max(1.0, at_once)
    return took_s / (steps * by_formula.decode_s + sequences * by_formula.sequence_s)


def _sampled(row: Mapping[str, Any]) -> float:
    """Tokens that the policy has sampled for a step."""
    return row["episode/count"] * row["episode/action_tokens"]


def _episodes(workdir: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[Turns, ...], str]:
    """Episodes to draw from, and what to say of them."""
    folder = workdir / RECORD_FOLDER / RL
    if numbers := record.steps(folder):
        played = [one for one in map(as_turns, record.some(folder, numbers[-1], EPISODES)) if one]
        if played:
            return tuple(played), f"lengths and waits: drawn from {len(played)} episodes of step {numbers[-1]}"
    middle = {name: statistics.median(row[f"episode/{name}"] for row in rows) for name in ("action_tokens", "turns")}
    wait_s = statistics.median(waited_s({name.removeprefix("episode/"): row[name] for name in row}) for row in rows)
    count = max(1, round(middle["turns"]))
    return (((middle["action_tokens"] / count, wait_s / count),) * count,), (
        "lengths and waits: the run's mean of each step, since no step is recorded; where lengths differ, a "
        "synchronous step waits for the longest, and a fleet gains more than is said here"
    )


def as_turns(episode: Episode) -> Turns:
    """What an episode sampled turn by turn, and what it waited for others than the policy's engine, spread evenly."""
    counts = [end - begin for one in episode.trajectories for begin, end in turns(one)]
    wait_s = waited_s(episode.metrics) / max(1, len(counts))
    return tuple((float(count), wait_s) for count in counts)


def waited_s(times: Mapping[str, Any]) -> float:
    """Seconds of an episode in which it did not ask the policy's engine.

    Programs behind the gateway have no `engine_s`, but the phases of their requests in the engine.
    """
    phases = ("engine_s",) if "engine_s" in times else ("queue_s", "prefill_s", "decode_s")
    return max(0.0, times["total_s"] - sum(times[name] for name in phases))
