"""What a coordinator tells people: GET /v1/status, and the line of each step in its log."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxagent.fleet import wire
from jaxagent.fleet.admission import Answer, Batch, Outcome
from jaxagent.fleet.book import Book
from jaxagent.fleet.episodes import name_of
from jaxagent.fleet.members import ROLES, Members
from jaxagent.fleet.plan import EpisodeId

logger = logging.getLogger("jaxagent.fleet.coordinator")
MEASURE_S = 0.1
ALARM_S = 1.0  # of the event loop's lag
LAGS = 600  # measurements: those of the last minute
STEPS = 20  # lines
DAMAGED_FILE = "damaged.jsonl"  # in the fleet's folder: a line for every stored episode that was found damaged
PLAYED_AGAIN = "it is played again"


class Watch:
    """Measures the loop, counts calls, and keeps the last steps."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.began = clock()
        self.counts: collections.Counter[str] = collections.Counter()  # since the start
        self.lags: collections.deque[float] = collections.deque(maxlen=LAGS)
        self.steps: collections.deque[dict[str, Any]] = collections.deque(maxlen=STEPS)
        self._batch: Batch | None = None
        self._before: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._last = self.began

    async def measure(self) -> None:
        """How late the loop is, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            await asyncio.sleep(MEASURE_S)
            lag = max(0.0, loop.time() - began_s - MEASURE_S)
            self.lags.append(lag)
            if lag > ALARM_S:
                logger.warning("the coordinator's event loop was held up for %.1f s: calls waited for so long", lag)

    def formed(self, batch: Batch, waited: float) -> None:
        """A batch left."""
        if self._batch is None or batch.step > self._batch.step:
            logger.info(
                "step %d: batch of %d groups, %d left out, ages %s; the trainer's last call waited %.2f s",
                batch.step, len(batch.groups), len(batch.left_out), batch.ages, waited,
            )  # fmt: skip
        self._batch = batch

    def published(self, version: int, members: Members) -> str:
        """A version was published. Returns its line."""
        now, waited = self._clock(), dict(members.waited_s)
        seconds = now - self._last
        row = {
            "version": version,
            "seconds": round(seconds, 2),
            "waited_s": {role: round(waited[role] - self._before[role], 2) for role in ROLES},
            "engines": len(members.of("engine")),
            "ages": {} if self._batch is None else self._batch.ages,
        }
        self._last, self._before = now, waited
        self.steps.append(row)
        waits = ", ".join(f"{role}s waited {row['waited_s'][role]:.2f} s" for role in ROLES)
        return f"version {version} after {seconds:.2f} s with {row['engines']} engines: {waits}"


def status(book: Book, members: Members, watch: Watch, now: float, why_over: str) -> dict[str, Any]:
    """Everything that a person asks first, as JSON."""
    rules, plan = book.rules, book.plan
    record, leases = rules.record, rules.holding()
    groups = {group: entry for group, entry in record.groups.items() if record.is_needed(group)}
    unfinished = sorted(group for group, entry in groups.items() if entry.usable is None)
    damaged = len(record.damaged())
    stored_count = sum(len(entry.results) for entry in record.groups.values()) - damaged
    to_play = sum(plan.attempts - len(entry.results) + len(entry.damaged) for entry in groups.values())
    playing = sum(map(len, leases.values()))
    return {
        "run": book.run,
        "epoch": book.epoch,
        "up_s": round(now - watch.began, 1),
        "ended": why_over,
        "rule": f"{plan.rule}, staleness {plan.staleness}, window {plan.window}",
        "steps": {
            "of": plan.steps,
            "newest_version": record.published,
            "batches_formed": record.formed,
            "admitted_below": plan.admitted(record.published) if record.versions else 0,
            "kept_from": record.kept,
        },
        "episodes": {
            "playing": playing,
            "stored": stored_count,
            "waiting": to_play - playing,
            "damaged": damaged,
            "found_damaged": record.found_damaged,
        },
        "oldest_unfinished_group": list(unfinished[0]) if unfinished else None,
        "unfinished_groups": len(unfinished),
        "conflicts": rules.conflicts[-5:],
        "waited_s": {role: round(seconds, 2) for role, seconds in members.waited_s.items()},
        "members": {
            role: {
                member.name: {
                    "host": member.facts.get("host", ""),
                    "process": member.facts.get("process", ""),
                    "heard_s_ago": round(now - member.heard_at, 1),
                    "phase": member.phase,
                    "phase_s": round(member.phase_s + now - member.heard_at, 1),
                    "playing": len(leases.get(member.name, ())),
                    "waited_s": round(member.waited_s, 2),
                    "drain": member.drain,
                    "differs": member.differs,
                    "numbers": member.numbers,
                }
                for member in members.of(role)
            }
            for role in ROLES
        },
        "last_steps": list(watch.steps),
        "loop_lag_s": {
            "last_minute_most": round(max(watch.lags, default=0.0), 4),
            "newest": round(watch.lags[-1], 4) if watch.lags else 0.0,
        },
        "calls": dict(sorted(watch.counts.items())),
        "wire": wire.WIRE,
    }


def metrics(row: Mapping[str, Any]) -> str:
    """The numbers of a status, in Prometheus' text form: no name, host or secret of a process."""
    rows: dict[str, Mapping[str, Any]] = {
        'steps{of="%s"}': row["steps"],
        'processes{role="%s"}': {role: len(row["members"][role]) for role in ROLES},
        'episodes{state="%s"}': row["episodes"],
        'waited_seconds_total{role="%s"}': row["waited_s"],
        'calls_total{call="%s"}': row["calls"],
        'loop_lag_seconds{over="%s"}': row["loop_lag_s"],
        "%s": {name: row[name] for name in ("up_s", "unfinished_groups", "disk_free_mib", "epoch")}
        | {"conflicts": len(row["conflicts"]), "ended": int(bool(row["ended"]))},
    }
    lines = (
        f"jaxagent_fleet_{form % name} {float(value)}\n"
        for form, values in rows.items()
        for name, value in values.items()
    )
    return "".join(lines)


def note_damaged(folder: pathlib.Path, which: EpisodeId, damage: str, answer: Answer) -> None:
    """Tells people that a stored episode is damaged, in the log and in a file that stays, and what follows."""
    if answer.outcome not in (Outcome.STORED, Outcome.REFUSED):
        return
    follows = answer.reason or PLAYED_AGAIN
    logger.error("%s is damaged: %s %s", name_of(which), damage, follows)
    row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "episode": wire.flat(which), "why": damage, "then": follows}
    with contextlib.suppress(OSError), open(folder / DAMAGED_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def played_again(folder: pathlib.Path) -> int | None:
    """How many stored episodes of a run were damaged and given out again, each counted once; None: none was damaged."""
    try:
        lines = (folder / DAMAGED_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    episodes = set[tuple[int, ...]]()
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill or a full disk cut off
            row = json.loads(line)
            if row["then"] == PLAYED_AGAIN:
                episodes.add(tuple(row["episode"]))
    return len(episodes)
