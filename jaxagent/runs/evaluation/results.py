"""Attempts -> what evaluation.json says and a person reads: pass@k over all tasks, per family of kinds and per kind."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent.observe.text import aligned, number
from jaxagent.rollout.pass_at_k import estimate
from jaxagent.runs.evaluation.attempts import Key, ScoredAttempt
from jaxagent.types import Task

ALL = "all"


def summarise(
    tasks: Sequence[Task], samples: int, ks: Sequence[int], min_score: float, attempts: Mapping[Key, ScoredAttempt]
) -> dict[str, Any]:
    """The numbers of an evaluation; they depend on nothing but the arguments.

    Args:
      tasks, samples: attempts 0 .. samples - 1 at every task are looked at, and all of them are there.
      ks: of pass@k.
      min_score: from which an attempt passes.
      attempts: by task id and sample.

    Returns:
      JSON values. "pass_at_k": {"all" or family or kind: {"1": {"mean", "low", "high", "interval", "tasks",
      "too_few"} or null, ...}}; a failed attempt is not among the n of its task. "failure" is the reason that most of
      them give, null where there are none. "cost_mean", of the attempts that did not fail, only where they have one.
    """
    groups: dict[str, list[tuple[int, int]]] = {ALL: []}
    per_task = []
    for task in tasks:
        scores = [attempts[task.id, sample].score for sample in range(samples)]
        valid = [score for score in scores if score is not None]
        n, c = len(valid), sum(score >= min_score for score in valid)
        per_task.append({"task": task.id, "kind": task.kind, "n": n, "passed": c, "failed": samples - n})
        for name in (ALL, *_names(task.kind)):
            groups.setdefault(name, []).append((n, c))
    task_attempts = [attempts[task.id, sample] for task in tasks for sample in range(samples)]
    reasons = collections.Counter(attempt.stop_reason for attempt in task_attempts)
    errors = collections.Counter(
        f"{attempt.stop_reason}: {attempt.error}" for attempt in task_attempts if attempt.score is None
    )
    tokens = sum(attempt.action_tokens for attempt in task_attempts)
    costs = [attempt.cost for attempt in task_attempts if attempt.cost is not None]
    return {
        "pass_at_k": {
            name: {str(k): estimate(counts, k) for k in ks}
            for name, counts in sorted(groups.items(), key=lambda item: (item[0] != ALL, item[0]))
        },
        "attempts": len(task_attempts),
        "failed": sum(attempt.score is None for attempt in task_attempts),
        "failure": next((error for error, _ in errors.most_common(1)), None),
        "stop_reasons": dict(sorted(reasons.items())),
        "action_tokens": tokens,
        "action_tokens_mean": tokens / len(task_attempts) if task_attempts else None,
        "turns_mean": sum(attempt.turns for attempt in task_attempts) / len(task_attempts) if task_attempts else None,
        **({"cost_mean": sum(costs) / len(costs)} if costs else {}),
        "per_task": per_task,
    }


def table(results: Mapping[str, Any]) -> str:
    """The results as text: one line per group of tasks, one column per k, and what has to be said beside them."""
    groups = results["pass_at_k"]
    ks = list(groups[ALL])
    rows = [["", "tasks", *(f"pass@{k}" for k in ks)]]
    of_kind = collections.Counter(name for task in results["per_task"] for name in (ALL, *_names(task["kind"])))
    for name, estimates in groups.items():
        family, _, kind = name.partition("/")
        rows.append([f"  {kind}" if kind else family, str(of_kind[name]), *(_cell(estimates[k]) for k in ks)])
    lines = aligned(rows)
    lines.append(
        "[95 % interval over tasks: bootstrap; w: Wilson, of few tasks, equal ones, or ones all right or all wrong]"
    )
    for k in ks:
        estimate = groups[ALL][k]
        left_out = of_kind[ALL] if estimate is None else estimate["too_few"]
        if left_out:
            lines.append(f"pass@{k}: {left_out} tasks have fewer than {k} attempts that count, and are not in it")
    reasons = ", ".join(f"{name} {count}" for name, count in results["stop_reasons"].items())
    lines.append(f"{results['attempts']} attempts, of which {results['failed']} failed and do not count: {reasons}")
    if results["failed"]:
        lines.append(
            f"{results['failed']} of {results['attempts']} attempts failed, most of them: {results['failure']}"
        )
    if results["attempts"]:
        lines.append(
            f"{results['action_tokens']} tokens sampled, {number(results['action_tokens_mean'])} in "
            f"{number(results['turns_mean'])} turns per attempt"
        )
    if "cost_mean" in results:
        lines.append(f"an attempt costs {number(results['cost_mean'])} on average, those that failed left out")
    return "\n".join(lines)


def curves(results: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """(k, pass@k) points of all tasks, with the bounds of their interval, and of every family of kinds."""
    means = {name: _points(estimates, "mean") for name, estimates in results["pass_at_k"].items() if "/" not in name}
    bounds = {f"{ALL}, {bound}": _points(results["pass_at_k"][ALL], bound) for bound in ("low", "high")}
    return {ALL: means.pop(ALL), **bounds, **means}


def _points(estimates: Mapping[str, Any], what: str) -> list[tuple[float, float]]:
    return [(float(k), estimate_of[what]) for k, estimate_of in estimates.items() if estimate_of is not None]


def _names(kind: str) -> tuple[str, ...]:
    """ "one_hop/capital" counts in its family "one_hop" and by itself."""
    family, _, rest = kind.partition("/")
    names = (family, kind) if rest else (family,)
    return tuple(name for name in names if name not in ("", ALL))


def _cell(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    mark = "w" if estimate["interval"] == "wilson" else ""
    return f"{estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]{mark}"
