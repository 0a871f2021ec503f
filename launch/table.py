"""Summaries of many runs -> one table (Markdown, CSV) and one plot (SVG) with means and 95 % intervals."""

from __future__ import annotations

import csv
import html
import math
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from jaxagent.io import files
from jaxagent.launch.grid import Run
from jaxagent.observe import headline

# Student's t, 97.5 %, by degrees of freedom 1..10; beyond, the normal's 1.96 is within 12 %.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of the 95 % interval of the mean); the half width is NaN for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))


def columns_of(summaries: Iterable[Mapping[str, object]]) -> list[str]:
    """The columns of runs with these summaries: the environment's score greedy, sampled, and by family of kinds.

    "before" is before the first stage that evaluates, "after" after the last one: a summary has
    "eval/em_before_<stage>" of each. A gain is a run's own after - before.
    """
    names = [named[1] for s in summaries for name in s if (named := re.match("(.*)_(before|after)_", name))]
    score = headline.score_of(names)
    columns = []
    for metric in headline.held_out(names, score):
        whole = metric in (f"eval/{score}", f"eval/{score}_sampled")
        columns += [f"{metric}_{when}" for when in (("before", "after", "gain") if whole else ("after",))]
    return columns


def collect(runs: Sequence[Run]) -> dict[str, dict[str, list[float | None]]]:
    """name of grid point -> column -> values over its finished seeds; None where nothing was measured.

    A null in a summary is a measurement of which every episode failed: its column's mean is without it, and says of how
    many runs it is.
    """
    finished = [(run.name, run.summary) for run in runs if run.summary is not None]
    columns = columns_of(summary for _, summary in finished)
    table: dict[str, dict[str, list[float | None]]] = {}
    for name, summary in finished:
        row = table.setdefault(name, {column: [] for column in columns})
        for column in columns:
            row[column].append(_value(summary, column))
    return table


def _value(summary: Mapping[str, object], column: str) -> float | None:
    if column.endswith("_gain"):
        ends = [_value(summary, column.removesuffix("gain") + when) for when in ("before", "after")]
        return None if None in ends else ends[1] - ends[0]
    values = [value for name, value in summary.items() if name.startswith(f"{column}_")]
    value = (values[0] if column.endswith("_before") else values[-1]) if values else None
    return None if value is None else float(value)


def _measured(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def write(runs: Sequence[Run], workdir: pathlib.Path) -> str:
    """Writes sweep.csv, sweep.md and sweep.svg; returns the Markdown table."""
    table = collect(runs)
    with open(workdir / "sweep.csv", "w", encoding="utf-8", newline="") as file:
        out = csv.writer(file)
        out.writerow(["run", "column", "seeds", "mean", "half_width_95"])
        for name, row in table.items():
            for column, values in row.items():
                if measured := _measured(values):
                    out.writerow([name, column, len(measured), *interval(measured)])
    every = next(iter(table.values()), {})
    columns = [column for column in every if any(_measured(row[column]) for row in table.values())]
    lines = ["| run | seeds | " + " | ".join(column.removeprefix("eval/") for column in columns) + " |"]
    lines.append("| --- " * (len(columns) + 2) + "|")
    for name, row in table.items():
        seeds = max((len(values) for values in row.values()), default=0)
        lines.append(f"| {name} | {seeds} | " + " | ".join(_cell(row[column]) for column in columns) + " |")
    text = "\n".join(lines) + "\n"
    files.replace(workdir / "sweep.md", text)
    files.replace(workdir / "sweep.svg", plot(table))
    return text


def plot(table: Mapping[str, Mapping[str, Sequence[float | None]]]) -> str:
    """Before -> after arrows of the held-out score per grid point, a dot per seed, the interval as a bar."""
    measured = {name: {column: _measured(values) for column, values in row.items()} for name, row in table.items()}
    before, after = [*next(iter(measured.values()), {}), "", ""][:2]  # of the greedy score
    rows = [(name, row) for name, row in measured.items() if row.get(after)]
    left, width, line = 190, 640, 46
    height = 56 + line * len(rows)

    def x(value: float) -> float:
        return left + value * (width - left - 30)

    marks = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        marks.append(f'<path d="M{x(tick):.1f},20V{height - 30}" stroke="#ddd"/>')
        marks.append(f'<text x="{x(tick):.1f}" y="{height - 12}" text-anchor="middle" fill="#777">{tick:g}</text>')
    for index, (name, row) in enumerate(rows):
        y = 44 + line * index
        marks.append(f'<text x="{left - 14}" y="{y + 4}" text-anchor="end" fill="#222">{html.escape(name)}</text>')
        for column, colour in ((before, "#9aa0aa"), (after, "#2563c9")):
            if not row[column]:
                continue
            mean, half = interval(row[column])
            if not math.isnan(half):
                low, high = x(max(0.0, mean - half)), x(min(1.0, mean + half))
                marks.append(f'<path d="M{low:.1f},{y}H{high:.1f}" stroke="{colour}" stroke-width="3" opacity=".4"/>')
            marks += [f'<circle cx="{x(v):.1f}" cy="{y}" r="3" fill="{colour}" opacity=".6"/>' for v in row[column]]
            marks.append(f'<circle cx="{x(mean):.1f}" cy="{y}" r="6" fill="{colour}"/>')
    marks.append(
        f'<text x="{left}" y="14" fill="#777">held-out score, greedy: before training (grey), after (blue)</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(marks)}</svg>\n"
    )


def _cell(values: Sequence[float | None]) -> str:
    measured = _measured(values)
    if not measured:
        return "–"
    mean, half = interval(measured)
    shown = f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} ± {half:.3f}"
    return shown if len(measured) == len(values) else f"{shown} ({len(measured)} of {len(values)})"
