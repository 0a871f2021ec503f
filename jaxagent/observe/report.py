"""`report.html` of a run: the page (page.py) with one run's curves, tables and episodes inside, in one file.

    python -m jaxagent.observe.report WORKDIR

Reads what the workdir holds and writes report.html there, and the card of an exported policy (model_card.py). Works on
a running or killed run as well as on a finished one; a run writes it itself after every evaluation and at its end. Of
the episodes it has as many as fit. `python -m jaxagent.view` shows all.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code
from jaxagent.data.episode_log import EVALUATION
from jaxagent.io import files
from jaxagent.observe import alarms, headline, jsonl, model_card, page, shown_episodes
from jaxagent.observe.earlier_episodes import episodes_folder
from jaxagent.observe.episode_store import INDEX, StoredEpisodes
from jaxagent.observe.files import (
    CONFIG_FILE,
    EPISODES_FOLDER,
    METRICS_FILE,
    RECORD_FOLDER,
    REPORT_FILE,
    SUMMARY_FILE,
)
from jaxagent.observe.text import duration, number

# What a page cannot be made of raises: a file that is not there, is no JSON, or holds something else.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
EMBEDDED_BYTES = 6_000_000  # of episodes in one file, each log an equal share of what is left
INDEX_BYTES = 4_000_000  # of a log's index in one file: the newest lines
_FAILED = ("stop/env_error", "stop/timeout", "stop/engine_error")  # parts of the episodes of a step


def write_report(workdir: str | os.PathLike[str], results: Mapping[str, Any] | None = None) -> pathlib.Path:
    """Builds the page from what the workdir holds, and what the run's summary will say so far; returns its path."""
    workdir = pathlib.Path(workdir)
    table = shown_episodes.token_table(workdir, files.json_of(workdir / CONFIG_FILE))
    with tempfile.TemporaryDirectory() as spare:
        # A run that goes on does not wait for logs of earlier versions to be read.
        own = workdir / EPISODES_FOLDER
        is_quick = results is not None and any(own.glob(f"*{INDEX}"))
        folder = own if is_quick else episodes_folder(workdir, pathlib.Path(spare))
        data = {
            "run": workdir.resolve().name,
            "facts": facts(workdir, folder, results),
            "metrics": files.text_of(workdir / METRICS_FILE),
            "logs": _embedded_logs(folder, table),
            "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
    path = workdir / REPORT_FILE
    files.replace(path, page.whole(workdir.resolve().name, data))
    return path


def _embedded_logs(folder: pathlib.Path, table: shown_episodes.Table) -> dict[str, Any]:
    """Of each log the newest lines of its index, and as many of its newest episodes as fit in its share of the file."""
    names, logs, left = shown_episodes.logs(folder), dict[str, Any](), EMBEDDED_BYTES
    for place, name in enumerate(names):
        log = StoredEpisodes(folder, name)
        episodes, used = _embedded_episodes(log, left // (len(names) - place), table)
        index = (folder / f"{name}{INDEX}").read_bytes()
        index = index[: index.rfind(b"\n") + 1]  # without a line that is being written
        start = index.find(b"\n", len(index) - INDEX_BYTES) + 1 if len(index) > INDEX_BYTES else 0
        skipped = index.count(b"\n", 0, start)
        first = log.blocks[skipped]["first"] if skipped < len(log.blocks) else log.rows
        logs[name] = {"index": index[start:].decode(), "first": first, "rows": log.rows, "episodes": episodes}
        left -= used
    return logs


def _embedded_episodes(log: StoredEpisodes, most: int, table: shown_episodes.Table) -> tuple[dict[int, Any], int]:
    """Episodes by row, the newest first, and the bytes that they take.

    Of held-out tasks the first evaluation stands before them: what was learnt shows where the two differ.
    """
    blocks = log.blocks[::-1]
    if log.name.endswith(EVALUATION):
        blocks = [block for block in log.blocks if block["step"] == log.blocks[0]["step"]] + blocks
    episodes, used = dict[int, Any](), 0
    for block in blocks:
        for row, pair in enumerate(log.with_learnt(block) or (), block["first"]):
            if row in episodes:
                continue
            value = {"step": block["step"], **shown_episodes.episode_values(*pair, table)}
            value["preview"] = shown_episodes.preview(pair[0].text, pair[0].task.prompt)
            used += len(json.dumps(value, separators=(",", ":")))
            if used > most:
                return episodes, used
            episodes[row] = value
    return episodes, used


def facts(workdir: pathlib.Path, episodes: pathlib.Path, results: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the page says of a run beside its curves and episodes: config, summary, the numbers to look at first.

    `episodes` is the folder of its logs.
    """
    records = list(jsonl.read(workdir / METRICS_FILE))
    config = files.json_of(workdir / CONFIG_FILE)
    measured = so_far(records)
    # A summary may be older than the records: it is of the time before the run was continued.
    stored_summary = files.json_of(workdir / SUMMARY_FILE)
    summary = measured | stored_summary | measured | dict(results or {})
    counts = [each["failed_episodes"] for each in (stored_summary, measured) if "failed_episodes" in each]
    if results is None and counts:  # records lack some failures (a gate's, dropped attempts), an older summary others
        summary["failed_episodes"] = {where: max(c.get(where, 0) for c in counts) for where in counts[0] | counts[-1]}
    return {
        "about": _about(config, summary),
        "tiles": _tiles(summary),
        "alarms": [alarm.entry() for alarm in alarms.Watch(config, records).alarms],
        "summary": jsonl.plain(summary),
        "config": config,
        "logs": shown_episodes.logs(episodes),
        "folder": str(workdir),
        "score": headline.score_of(name for record in records for name in record),
        "recorded": recorded_steps(workdir),
    }


def recorded_steps(workdir: pathlib.Path) -> dict[str, list[int]]:
    """The steps of each stage that replay can make again (runs/record.py)."""
    folders = [folder for folder in (workdir / RECORD_FOLDER).glob("*") if folder.is_dir()]
    return {each.name: sorted(int(f.stem) for f in each.glob("*.step") if f.stem.isdigit()) for each in folders}


def so_far(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of a summary about evaluations and failed episodes, from the records of an unfinished run."""
    results: dict[str, Any] = {}
    failed: dict[str, int] = {}
    for record in records:
        stage, when = record["stage"], "before" if record["step"] == 0 else "after"
        for name, value in record.items():
            if headline.is_summarised(name):
                results[f"{name}_{when}_{stage}"] = value
        counts = {
            stage: sum(record.get(name) or 0.0 for name in _FAILED) * (record.get("episode/count") or 0.0),
            f"{stage}.eval": (record.get("eval/failed") or 0.0) + (record.get("eval/failed_sampled") or 0.0),
        }
        for where, count in counts.items():
            if round(count):
                failed[where] = failed.get(where, 0) + round(count)
        if record.get("eval/n"):
            results["eval/n"] = record["eval/n"]
    return results | ({"failed_episodes": failed} if failed else {})


def _about(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    words = []
    if config:
        mesh, model = config["mesh"], config["model"]
        rl = config["rl"]
        echo = " + ECHO" if rl.get("echo") else ""
        words.append(f"{config['env']['name']}: {rl['advantage']['name']}, {rl['objective']['name']}{echo}")
        words.append(model["path"] or f"{model['family']}, {model['num_layers']} layers, width {model['embed_dim']}")
        words.append(f"mesh {'x'.join(map(str, mesh.values()))} ({', '.join(mesh)})")
    if "seed" in summary:
        words.append(f"seed {summary['seed']}")
    if isinstance(summary.get("stage_seconds"), Mapping):
        words.append(f"{duration(sum(summary['stage_seconds'].values()))} in all")
    return " · ".join(words)


def _tiles(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{"title", "value", "from" (what it was), "bad" (whether something is wrong), "more"} of each number."""
    tiles: list[dict[str, Any]] = []
    measured = [named[1] for name in summary if (named := re.match("(.*)_(before|after)_", name))]
    score = headline.score_of(measured)
    for metric in headline.held_out(measured, score):
        kind = metric.removeprefix(f"eval/{score}").strip("_") or "greedy"
        title = f"held-out {score}, {kind.replace('_', ' ')}"
        before, after = f"{metric}_before_", f"{metric}_after_"
        # Before the first stage that evaluates, after the last one.
        values = [v for name, v in summary.items() if name.startswith(after)]
        if values:
            old = next((v for name, v in summary.items() if name.startswith(before)), None)
            tiles.append({"title": title, "value": values[-1], "from": old})
    for title, key in (
        ("questions evaluated", "eval/n"),
        ("RL steps", "steps"),
        ("largest log-prob gap", "logprob_gap_max"),
        ("compilations after warm-up", "compiles_after_warmup"),
    ):
        if summary.get(key) is not None:
            tiles.append({"title": title, "value": summary[key]})
    if failed := summary.get("failed_episodes"):
        where = ", ".join(f"{where} {number(of_it)}" for where, of_it in failed.items())
        more = str(summary.get("first_failure", ""))
        tiles.append({"title": f"episodes failed ({where})", "value": sum(failed.values()), "bad": True, "more": more})
    return tiles


def main(argv: Sequence[str]) -> None:
    """Writes the report of the run in `argv[1]`. Raises ConfigError where there is none."""
    if argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if len(argv) != 2:
        raise ConfigError("Say which run: python -m jaxagent.observe.report WORKDIR")
    workdir = pathlib.Path(argv[1])
    if not any((workdir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)):
        why = f"it has neither {CONFIG_FILE} nor {METRICS_FILE}" if workdir.is_dir() else "no such folder"
        raise ConfigError(f"There is no run in '{workdir}': {why}.")
    try:
        print(write_report(workdir))
        model_card.write(workdir)
    except DAMAGED as error:
        sys.exit(f"error: {workdir}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv)))
