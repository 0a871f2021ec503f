"""Evaluations at several lengths of documents -> the points of a curve, a table, and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.observe import charts, jsonl
from jaxagent.observe.text import aligned
from jaxagent.runs.evaluation import run
from jaxagent.runs.evaluation.attempts import ATTEMPTS_FILE
from jaxagent.runs.evaluation.results import ALL
from jaxagent.types import StopReason

TITLE = "accuracy over the length of the document, with the 95 % interval over tasks"
COUNTERS = ("document_tokens", "chunks", "dropped_tokens", "replies_cut")  # of an attempt, as MemAgent has them


def point(name: str, folder: Path) -> dict[str, Any]:
    """One finished evaluation as JSON values: "accuracy" with its interval, and means of the attempts' counters.

    Raises:
      ConfigError: no attempt has counted the tokens of its document.
    """
    evaluation = json.loads((folder / run.EVALUATION_FILE).read_text(encoding="utf-8"))
    results = evaluation["results"]
    estimate = results["pass_at_k"][ALL]["1"]
    task_ids = {task["task"] for task in results["per_task"]}
    latest = {
        (record["task"]["id"], record["sample"]): record
        for record in jsonl.read(folder / ATTEMPTS_FILE)
        if record["task"]["id"] in task_ids
    }
    counters = [r["metrics"] for r in latest.values() if not StopReason(r["stop_reason"]).is_failure]
    if any(COUNTERS[0] not in metrics for metrics in counters):
        raise ConfigError(f"'{folder}' holds attempts that count no {COUNTERS[0]}: config.env reads no documents.")
    means = {
        counter: sum(metrics[counter] for metrics in counters) / len(counters) if counters else None
        for counter in COUNTERS
    }
    return {
        "name": name,
        **means,
        "accuracy": estimate and estimate["mean"],
        "low": estimate and estimate["low"],
        "high": estimate and estimate["high"],
        "tasks": len(task_ids),
        "attempts": results["attempts"],
        "failed": results["failed"],
    }


def ordered(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shortest documents first; those of which no attempt is known last."""
    return sorted(points, key=lambda p: math.inf if p["document_tokens"] is None else p["document_tokens"])


def page(title: str, points: Sequence[dict[str, Any]], text: str, score: str) -> str:
    """The curve over the tokens of the document, lengths without a number left out, and the points as text."""
    bounds = {"accuracy": "accuracy", "low": "lower bound", "high": "upper bound"}
    with_accuracy = [p for p in points if p["accuracy"] is not None]
    series = {label: [(p["document_tokens"], p[name]) for p in with_accuracy] for name, label in bounds.items()}
    chart = charts.line_chart(TITLE, series, x="tokens of the document", y=score, log_x=True)
    return run.page(title, chart, text)


def table(points: Sequence[dict[str, Any]]) -> str:
    """The points as text."""
    rows = [["", "tokens", "chunks", "accuracy", "95 % interval", "tasks", "attempts", "failed", "replies cut"]]
    for p in points:
        if p["accuracy"] is None:
            rows.append([p["name"], "-", "-", "-", "-", str(p["tasks"]), str(p["attempts"]), str(p["failed"]), "-"])
            continue
        numbers = [f"{p['document_tokens']:.0f}", f"{p['chunks']:.1f}", f"{p['accuracy']:.3f}"]
        interval = f"{p['low']:.3f} to {p['high']:.3f}"
        counts = [str(p["tasks"]), str(p["attempts"]), str(p["failed"]), f"{p['replies_cut']:.2f}"]
        rows.append([p["name"], *numbers, interval, *counts])
    lines = aligned(rows)
    if dropped := [p["name"] for p in points if p["dropped_tokens"]]:
        lines.append(f"tokens were left out of the middle of documents at {', '.join(dropped)}: raise env.max_turns")
    return "\n".join(lines)
