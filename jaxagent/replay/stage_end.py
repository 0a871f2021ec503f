"""How far a stage came, by what stands beside its record: bundles, metrics.jsonl, and what an ended run leaves.

A run that was killed is no fault. The step's line in metrics.jsonl is on disk before the step's file is, so that the
record may be one step behind; and a process that goes on from a bundle removes the record from there on before it cuts
metrics.jsonl, so that the record may end with the newest bundle whatever metrics.jsonl says. A bundle is written after
the files of all its steps. What has ended has all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxagent.config import Config
from jaxagent.observe import jsonl
from jaxagent.observe.files import METRICS_FILE, OUTDATED_FILE, POLICY_FOLDER, SUMMARY_FILE
from jaxagent.replay.record_diff import Difference
from jaxagent.runs.checks import OPD

Headers = Mapping[int, Mapping[str, Any]]
Hosts = Mapping[int, Mapping[str, Any]]  # by step: the host's side of the stage's bundles
_PLACE = "where the stage ends"


@dataclasses.dataclass(frozen=True)
class StageEnd:
    """How many steps a stage has made, by each trace that it left."""

    logged: int  # in metrics.jsonl
    bundled: int  # in the newest bundle
    over: bool  # nothing of the stage was left to be done
    steps: int  # the stage has them all, or has them so far and keeps no later weights


def read(workdir: Path, cfg: Config, stage: str, bundles: Mapping[int, Any]) -> StageEnd:
    """How far a stage of a run came; `bundles`: its, by step.

    Call it before the record is read, if a process may still train there.
    """
    logged, later = 0, False
    for line in jsonl.read(workdir / METRICS_FILE):
        if line["stage"] == stage:
            logged = max(logged, line["step"])
        later |= line["stage"] in cfg.stages[cfg.stages.index(stage) + 1 :]
    bundled, has_ended = max(bundles, default=0), _run_has_ended(workdir, cfg)
    total = cfg.opd.steps if stage == OPD and cfg.opd else cfg.rl.steps
    over = later or has_ended
    steps = max(logged, bundled, total if has_ended else 0) if over else bundled
    return StageEnd(logged, bundled, over, steps)


def _run_has_ended(workdir: Path, cfg: Config) -> bool:
    """Whether the run has come to its end, and has not gone on since."""
    policy, summary = workdir / POLICY_FOLDER, workdir / SUMMARY_FILE
    if (policy / OUTDATED_FILE).exists():
        return False
    if (policy / "config.json").exists():
        return True
    # Somebody may have moved the policy away, and a run that went on without it has an old summary.
    with contextlib.suppress(ValueError, AttributeError):
        return summary.exists() and json.loads(summary.read_text(encoding="utf-8")).get("steps") == cfg.rl.steps
    return False


def cut_off(reach: StageEnd, headers: Headers, hosts: Hosts) -> Difference | str | None:
    """What is missing at the end of a record, or, where that is no damage, what is to be told of it."""
    recorded = max(headers) + 1
    if hosts and _replay(hosts[max(hosts)]) == "none":
        most = max(reach.logged, reach.bundled)
        off = f"recording was off at the end: the record has {recorded} steps, and the stage {most}"
        return off if most > recorded else None
    if reach.bundled > recorded:
        return Difference(_PLACE, "steps", str(recorded), f"{reach.bundled} in its newest bundle")
    if reach.over and reach.steps > recorded:
        return Difference(_PLACE, "steps", str(recorded), f"{reach.steps} by {METRICS_FILE} and config")
    if reach.logged <= recorded:
        return None
    if reach.logged == recorded + 1 or recorded == reach.bundled:
        return f"the record has {recorded} steps and {METRICS_FILE} {reach.logged}, as where a run was killed"
    return Difference(_PLACE, "steps", str(recorded), f"{reach.logged} by {METRICS_FILE}")


def begins_late(cfg: Config, headers: Headers, hosts: Hosts, numbers: Mapping[int, int]) -> Difference | str | None:
    """What is missing at the beginning of a record, or, where that is no damage, what is to be told of it."""
    if not (first := min(headers)):
        return None
    # Every bundle says "all", and that the stage began so: its first bundle is pinned then.
    pinned = (numbers[step] - step in host.get("pinned", ()) for step, host in hosts.items())
    if cfg.checkpoint.replay == "all" and hosts and all(pinned) and {*map(_replay, hosts.values())} == {"all"}:
        before = headers[first]["previous"][:16] or "there"
        return Difference(f"step {first - 1}", "the record's file", before, "not there")
    return f"the record begins with step {first}: the steps before it were forgotten, or not recorded"


def _replay(host: Mapping[str, Any]) -> str:
    return host["config"].get("checkpoint", {}).get("replay", "")


def begun_alone(starts: list[Mapping[str, Any]], cfg: Config, stage: str, without: Mapping[int, bool]) -> Iterator[int]:
    """Steps at which one process went on from a bundle of a fleet's, without the versions before the bundle's.

    Its engine sampled the steps that follow with the bundle's own weights, so that from an older bundle, where there
    are older versions too, they come out differently.

    `starts`: of run.json; `without`: by step, of the bundles that are left: whether it is a fleet's, and holds no
    earlier versions.
    """
    alone: set[int] = set()
    by_fleet = False  # what made the bundle that a start goes on from, where it is gone
    for start in starts:
        at = start.get("resumed_at") or {"stage": cfg.stages[0], "step": 0}
        fleet = "--role=trainer" in start.get("command", "")
        order = cfg.stages.index(at["stage"]) - cfg.stages.index(stage) if at["stage"] in cfg.stages else -1
        lacks = without.get(at["step"], by_fleet or at["step"] in alone)  # the second may go on from the same bundle
        if order <= 0:  # it made what follows once more
            alone = {step for step in alone if order == 0 and step < at["step"]}
        if order == 0 and at["step"] and not fleet and lacks:
            alone.add(at["step"])
        by_fleet = fleet
    yield from sorted(alone)
