"""`report.html` of a run: one self-contained page with curves, tables and episodes.

    python -m jaxagent.observe.report WORKDIR

Reads metrics.jsonl, episodes.jsonl, episodes/, summary.json and config.json of the workdir (whichever exist) and writes
report.html beside them. Works on a running or killed run as well as on a finished one; a run writes it itself after
every evaluation and at its end. What long logs hold is shown up to a size (report_episodes.py), which the page says.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code
from jaxagent.io import files
from jaxagent.observe import charts, headline, jsonl, report_episodes
from jaxagent.observe.files import CONFIG_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE
from jaxagent.observe.text import duration, number

# What a page cannot be made of raises: a file that is not there, is no JSON, or holds something else.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError)
_EPISODES = 12  # tasks shown
_STAGE_TITLES = {
    "warm_start": "Warm start",
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "rft": "Rejection-sampling fine-tuning",
    "dpo": "Direct preference optimisation",
}

Figure = tuple[str, tuple[str, ...], str]  # title, metric names, y axis
# What a person looks at first, after the environment's score. Everything else follows, grouped by topic.
_FIRST: tuple[Figure, ...] = (
    ("Loss", ("loss", "loss/action", "loss/observation"), "zero"),
    ("Gate: score on training tasks", ("gate/worst_accuracy", "gate/mean_accuracy"), "unit"),
    ("Entropy of the policy (nats per token)", ("policy/entropy",), "zero"),
    ("Clipped tokens (fraction)", ("policy/clip_frac",), "zero"),
    ("Importance ratio, 99th percentile", ("policy/ratio_p99",), ""),
    ("Engine vs trainer log-prob gap", ("logprob_gap/max", "logprob_gap/mean"), "zero"),
    ("Policy vs itself when it sampled, log-probs", ("policy/drift_max", "policy/drift_mean"), "zero"),
    ("Groups without signal (fraction)", ("groups/zero_signal_frac",), "unit"),
    ("Tokens per second", ("tokens_per_s",), "zero"),
)
_STACKED = {"stop": ("Why episodes stopped", "fraction"), "time": ("Phases of a step", "seconds")}
# What a metric's name says of its unit.
_UNITS = {
    "_s": "seconds",
    "_tokens": "tokens",
    "_frac": "fraction",
    "_per_s": "per second",
    "accuracy": "score",
    "entropy": "nats per token",
}
_FAILED = ("stop/env_error", "stop/timeout", "stop/engine_error")  # parts of the episodes of a step
_TOTALS = {"time/step_s", "time/total_s"}  # sums of the phases: not stacked on top of them


def write_report(workdir: str | os.PathLike[str], results: Mapping[str, Any] | None = None) -> pathlib.Path:
    """Builds the page from what the workdir holds, and what the run's summary will say so far; returns its path."""
    workdir = pathlib.Path(workdir)
    records = list(jsonl.read(workdir / METRICS_FILE))
    config = _load(workdir / CONFIG_FILE)
    measured = so_far(records)
    # A summary may be older than the records: it is of the time before the run was continued.
    stored_summary = _load(workdir / SUMMARY_FILE)
    summary = measured | stored_summary | measured | (results or {})
    counts = [each["failed_episodes"] for each in (stored_summary, measured) if "failed_episodes" in each]
    if results is None and counts:  # records lack some failures (a gate's, dropped attempts), an older summary others
        summary["failed_episodes"] = {where: max(c.get(where, 0) for c in counts) for where in counts[0] | counts[-1]}
    table = report_episodes.token_table(workdir, config)
    pairs = report_episodes.choose(report_episodes.evaluations(workdir, table), _EPISODES)
    episodes = report_episodes.markup(pairs, *report_episodes.browsed(workdir, table))
    path = workdir / REPORT_FILE
    files.replace(path, page(workdir.name, records, episodes, summary, config))
    return path


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


def page(
    name: str,
    records: Sequence[Mapping[str, Any]],
    episodes: str,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
) -> str:
    """The whole HTML document. Empty inputs leave their section out."""
    stages = list(dict.fromkeys(record["stage"] for record in records))
    stages.sort(key=lambda stage: stage != "rl")  # what the run is about comes first
    parts = [f"<h1>{html.escape(name)}</h1>", f'<p class="sub">{html.escape(_subtitle(config, summary))}</p>']
    parts.append(_tiles(summary))
    for stage in stages:
        parts.append(_stage(stage, [record for record in records if record["stage"] == stage]))
    parts.append(episodes)
    if summary:
        parts.append("<h2>Summary</h2>" + _summary_table(summary))
    if config:
        text = html.escape(json.dumps(config, indent=2))
        parts.append(f'<details><summary>Config</summary><pre class="config">{text}</pre></details>')
    return document(name, "".join(parts))


def document(title: str, body: str) -> str:
    """A self-contained page around HTML with charts, tables and episodes."""
    folder = pathlib.Path(__file__).parent
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{(folder / 'report.css').read_text(encoding='utf-8')}</style><main>{body}</main>"
        f'<div id="tip"></div><script>{(folder / "report.js").read_text(encoding="utf-8")}</script></html>'
    )


def _subtitle(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    words = []
    if config:
        mesh, model = config["mesh"], config["model"]
        rl = config["rl"]
        echo = " + ECHO" if rl["echo"] else ""
        words.append(f"{config['env']['name']}: {rl['advantage']['name']}, {rl['objective']['name']}{echo}")
        words.append(model["path"] or f"{model['family']}, {model['num_layers']} layers, width {model['embed_dim']}")
        words.append(f"mesh {'x'.join(map(str, mesh.values()))} ({', '.join(mesh)})")
    if "seed" in summary:
        words.append(f"seed {summary['seed']}")
    if isinstance(summary.get("stage_seconds"), Mapping):
        words.append(f"{duration(sum(summary['stage_seconds'].values()))} in all")
    words.append(time.strftime("written %Y-%m-%d %H:%M:%S"))
    return " · ".join(words)


def _tiles(summary: Mapping[str, Any]) -> str:
    tiles = []
    measured = [named[1] for name in summary if (named := re.match("(.*)_(before|after)_", name))]
    score = headline.score_of(measured)
    for metric in headline.held_out(measured, score):
        kind = metric.removeprefix(f"eval/{score}").strip("_") or "greedy"
        title = html.escape(f"held-out {score}, {kind.replace('_', ' ')}")
        before, after = f"{metric}_before_", f"{metric}_after_"
        # Before the first stage that evaluates, after the last one.
        values = [v for name, v in summary.items() if name.startswith(after)]
        if not values:
            continue
        value, old = values[-1], next((v for name, v in summary.items() if name.startswith(before)), None)
        if value is None:
            tiles.append(("–", f'{title} <span class="down">nothing was measured</span>'))
            continue
        if old is None:
            tiles.append((f"{value:.3f}", title))
            continue
        css = "up" if value >= old else "down"
        tiles.append(
            (
                f'<span class="from">{old:.3f} →</span> {value:.3f}',
                f'{title} <span class="{css}">{value - old:+.3f}</span>',
            )
        )
    for title, key in (
        ("questions evaluated", "eval/n"),
        ("RL steps", "steps"),
        ("largest log-prob gap", "logprob_gap_max"),
        ("compilations after warm-up", "compiles_after_warmup"),
    ):
        if summary.get(key) is not None:
            tiles.append((number(summary[key]), title))
    if failed := summary.get("failed_episodes"):
        count = number(sum(failed.values()))
        where = ", ".join(f"{where} {number(of_it)}" for where, of_it in failed.items())
        reason = html.escape(str(summary.get("first_failure", "")))
        tiles.append((f'<span class="down">{count}</span>', f"episodes failed ({html.escape(where)}) {reason}"))
    if not tiles:
        return ""
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{b}</b><span>{t}</span></div>' for b, t in tiles)
        + "</div>"
    )


def _stage(stage: str, records: Sequence[Mapping[str, Any]]) -> str:
    series = _series(records)
    figures, charted = [], set(_TOTALS)
    score = headline.score_of(name for record in records for name in record)
    figures.append(_against_cost(records, score))
    scores: tuple[Figure, ...] = (
        (f"Held-out score: {score}", tuple(headline.held_out(series, score)), "unit"),
        ("Training reward", (f"reward/{score}", "reward/mean"), "zero"),
    )
    for title, names, axis in (*scores, *_FIRST):
        lines = {name: series[name] for name in names if name in series}
        charted.update(lines)
        y = _unit(next(iter(lines), ""))
        figures.append(charts.line_chart(title, lines, zero=axis == "zero", unit=axis == "unit", y=y))
    rest: dict[str, dict[str, charts.Points]] = {}
    for name, points in series.items():
        if name not in charted:
            topic, _, leaf = name.rpartition("/")
            rest.setdefault(topic, {})[leaf or name] = points
    for topic, (title, unit) in _STACKED.items():
        if topic in rest:
            figures.append(charts.area_chart(title, _largest(rest.pop(topic)), y=unit))
    more = [charts.line_chart(name, {name: pts}, y=_unit(name)) for name, pts in sorted(_flat(rest).items())]
    title = _STAGE_TITLES.get(stage, stage.replace("_", " ").capitalize())
    out = f'<h2>{html.escape(title)}</h2><div class="charts">{"".join(figures)}</div>'
    if any(more):
        out += (
            f'<details><summary>{len(more)} more metrics</summary><div class="charts">{"".join(more)}</div></details>'
        )
    return out


def _against_cost(records: Sequence[Mapping[str, Any]], score: str) -> str:
    """The score of each evaluation over what a task cost in it; "" where nothing had a price."""
    names = ("eval/cost", f"eval/{score}")
    points = [tuple(r[name] for name in names) for r in records if all(r.get(name) is not None for name in names)]
    ends = {"first": points[:1], "last": points[-1:]} if len(points) > 1 else {}
    lines = {"evaluations": points} | ends
    return charts.line_chart(f"Held-out {score} against cost", lines, unit=True, x="cost of a task", y="score")


def _unit(name: str) -> str:
    """Of a metric, as its name tells it; else the name's last part."""
    units = [unit for ending, unit in _UNITS.items() if name.endswith(ending)]
    topic, _, leaf = name.rpartition("/")
    if units:
        return units[-1]
    return {"eval": "score", "reward": "reward", "stop": "fraction"}.get(
        topic.partition("/")[0], leaf.replace("_", " ")
    )


def _series(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Every numeric metric as (step, value) points; records that lack it or hold null leave no point."""
    series: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("stage", "step") and isinstance(value, (int, float)):
                series.setdefault(name, []).append((record["step"], value))
    return series


def _largest(series: Mapping[str, charts.Points]) -> dict[str, charts.Points]:
    """Biggest parts first, so that the stack reads from the bottom; parts that are always 0 are left out."""
    totals = {name: sum(y for _, y in points) for name, points in series.items()}
    return {name: series[name] for name in sorted(totals, key=lambda n: -totals[n]) if totals[name] > 0}


def _flat(rest: Mapping[str, Mapping[str, charts.Points]]) -> dict[str, charts.Points]:
    return {f"{topic}/{leaf}".lstrip("/"): pts for topic, leaves in rest.items() for leaf, pts in leaves.items()}


def _summary_table(summary: Mapping[str, Any]) -> str:
    rows = []
    for key, value in summary.items():
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        for inner, item in items:
            cell = number(item) if isinstance(item, (int, float)) and not isinstance(item, bool) else str(item)
            cell = "–" if item is None else cell
            name = f"{key}.{inner}" if inner else key
            rows.append(f"<tr><td>{html.escape(name)}</td><td>{html.escape(cell)}</td></tr>")
    return f'<div class="table"><table>{"".join(rows)}</table></div>'


def _load(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def main(argv: Sequence[str]) -> None:
    """Writes the report of the run in `argv[1]`. Raises ConfigError where there is none."""
    if len(argv) != 2 or argv[1] in ("-h", "--help"):
        raise ConfigError("Say which run: python -m jaxagent.observe.report WORKDIR")
    workdir = pathlib.Path(argv[1])
    if not any((workdir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)):
        why = f"it has neither {CONFIG_FILE} nor {METRICS_FILE}" if workdir.is_dir() else "no such folder"
        raise ConfigError(f"There is no run in '{workdir}': {why}.")
    try:
        print(write_report(workdir))
    except DAMAGED as error:
        sys.exit(f"error: {workdir}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv)))
