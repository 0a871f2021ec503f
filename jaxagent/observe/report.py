"""`report.html` of a run: one self-contained page with curves, tables and episodes.

    python -m jaxagent.observe.report WORKDIR

Reads metrics.jsonl, episodes.jsonl, summary.json and config.json of the workdir (whichever exist) and writes
report.html beside them. Works on a running or killed run as well as on a finished one.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxagent.observe import charts, jsonl, report_episodes
from jaxagent.observe.files import CONFIG_FILE, EPISODES_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE
from jaxagent.observe.text import duration, number

_EPISODES = 12  # tasks shown
_STAGE_TITLES = {
    "warm_start": "Warm start",
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "rft": "Rejection-sampling fine-tuning",
    "dpo": "Direct preference optimisation",
}

# What a person looks at first: (title, metric names, y axis). Everything else follows, grouped by topic.
_FIRST: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Held-out exact match", ("eval/em", "eval/em_sampled", "eval/em_two_hop", "eval/em_one_hop"), "unit"),
    (
        "Held-out tasks solved",
        ("eval/solved", "eval/solved_sampled", "eval/solved_level2", "eval/solved_level1"),
        "unit",
    ),
    ("Training reward", ("reward/em", "reward/solved", "reward/mean"), "zero"),
    ("Loss", ("loss", "loss/action", "loss/observation"), "zero"),
    ("Gate: score on training tasks", ("gate/worst_accuracy", "gate/mean_accuracy"), "unit"),
    ("Entropy of the policy (nats per token)", ("policy/entropy",), "zero"),
    ("Clipped tokens (fraction)", ("policy/clip_frac",), "zero"),
    ("Importance ratio, 99th percentile", ("policy/ratio_p99",), ""),
    ("Engine vs trainer log-prob gap", ("logprob_gap/max", "logprob_gap/mean"), "zero"),
    ("Groups without signal (fraction)", ("groups/zero_signal_frac",), "unit"),
    ("Tokens per second", ("tokens_per_s",), "zero"),
)
_STACKED = {"stop": "Why episodes stopped", "time": "Seconds per phase of a step"}
_TOTALS = {"time/step_s", "time/total_s"}  # sums of the phases: not stacked on top of them


def write_report(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Builds the page from what the workdir holds and returns its path."""
    workdir = pathlib.Path(workdir)
    records = list(jsonl.read(workdir / METRICS_FILE))
    episodes = [record for record in jsonl.read(workdir / EPISODES_FILE) if record["split"] == "eval"]
    summary, config = _load(workdir / SUMMARY_FILE), _load(workdir / CONFIG_FILE)
    path = workdir / REPORT_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page(workdir.name, records, episodes, summary, config), encoding="utf-8")
    temporary.replace(path)
    return path


def page(
    name: str,
    records: Sequence[Mapping[str, Any]],
    episodes: Sequence[Mapping[str, Any]],
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
    if episodes:
        parts.append("<h2>Episodes</h2>")
        parts.append(
            '<p class="note">The same held-out question, first and last time it was tried. The darker a sampled '
            "token, the less sure the policy was of it; point at a token for its log-prob.</p>"
        )
        parts.append(report_episodes.section(report_episodes.choose(episodes, _EPISODES)))
    if summary:
        parts.append("<h2>Summary</h2>" + _summary_table(summary))
    if config:
        text = html.escape(json.dumps(config, indent=2))
        parts.append(f'<details><summary>Config</summary><pre class="config">{text}</pre></details>')
    return document(name, "".join(parts))


def document(title: str, body: str) -> str:
    """A self-contained page around HTML with charts, tables and episodes."""
    here = pathlib.Path(__file__).parent
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{(here / 'report.css').read_text()}</style><main>{body}</main>"
        f'<div id="tip"></div><script>{(here / "report.js").read_text()}</script></html>'
    )


def _subtitle(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    words = []
    if config:
        mesh, model = config["mesh"], config["model"]
        rl = config["rl"]
        echo = " + ECHO" if rl["echo"]["coefficient"] else ""
        words.append(f"{rl['advantage']}, {rl['objective']}{echo}")
        words.append(model["path"] or f"{model['family']}, {model['num_layers']} layers, width {model['embed_dim']}")
        words.append(f"mesh {mesh['data']}x{mesh['fsdp']}x{mesh['tensor']} (data, fsdp, tensor)")
    if "seed" in summary:
        words.append(f"seed {summary['seed']}")
    if isinstance(summary.get("stage_seconds"), Mapping):
        words.append(f"{duration(sum(summary['stage_seconds'].values()))} in all")
    return " · ".join(words)


def _tiles(summary: Mapping[str, Any]) -> str:
    tiles = []
    for title, before, after in (
        ("held-out EM, greedy", "eval/em_before_", "eval/em_after_"),
        ("held-out EM, sampled", "eval/em_sampled_before_", "eval/em_sampled_after_"),
        ("held-out EM, two-hop", "eval/em_two_hop_before_", "eval/em_two_hop_after_"),
        ("held-out solved, greedy", "eval/solved_before_", "eval/solved_after_"),
        ("held-out solved, sampled", "eval/solved_sampled_before_", "eval/solved_sampled_after_"),
    ):
        # Before the first stage that evaluates, after the last one.
        values = [v for name, v in summary.items() if name.startswith(after) and v is not None]
        if not values:
            continue
        value, old = values[-1], next((v for name, v in summary.items() if name.startswith(before)), None)
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
    if not tiles:
        return ""
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{b}</b><span>{t}</span></div>' for b, t in tiles)
        + "</div>"
    )


def _stage(stage: str, records: Sequence[Mapping[str, Any]]) -> str:
    series = _series(records)
    figures, used = [], set(_TOTALS)
    for title, names, axis in _FIRST:
        lines = {name: series[name] for name in names if name in series}
        used.update(lines)
        figures.append(charts.line_chart(title, lines, zero=axis == "zero", unit=axis == "unit"))
    rest: dict[str, dict[str, charts.Points]] = {}
    for name, points in series.items():
        if name not in used:
            topic, _, leaf = name.rpartition("/")
            rest.setdefault(topic, {})[leaf or name] = points
    for topic, title in _STACKED.items():
        if topic in rest:
            figures.append(charts.area_chart(title, _largest(rest.pop(topic))))
    more = [charts.line_chart(name, {name: pts}) for name, pts in sorted(_flat(rest).items())]
    title = _STAGE_TITLES.get(stage, stage.replace("_", " ").capitalize())
    out = f'<h2>{html.escape(title)}</h2><div class="charts">{"".join(figures)}</div>'
    if any(more):
        out += (
            f'<details><summary>{len(more)} more metrics</summary><div class="charts">{"".join(more)}</div></details>'
        )
    return out


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
            shown = number(item) if isinstance(item, (int, float)) and not isinstance(item, bool) else str(item)
            name = f"{key}.{inner}" if inner else key
            rows.append(f"<tr><td>{html.escape(name)}</td><td>{html.escape(shown)}</td></tr>")
    return f'<div class="table"><table>{"".join(rows)}</table></div>'


def _load(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m jaxagent.observe.report WORKDIR")
    print(write_report(sys.argv[1]))
