"""Which numbers of an evaluation a person looks at first: its score, whatever the environment calls it.

An evaluation's record begins with the environment's score, "eval/em" or "eval/solved"; "eval/em_sampled" is the same
with sampling, "eval/em_two_hop" that of a family of kinds of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable

EVAL = "eval/"


def score_of(names: Iterable[str]) -> str:
    """The environment's score, of an evaluation's metrics in their order; "" where nothing was evaluated."""
    return next((name.removeprefix(EVAL) for name in names if name.startswith(EVAL)), "")


def is_summarised(name: str) -> bool:
    """Whether a metric is a number of an evaluation that its summary has: not of a single kind, and no count."""
    score = name.removeprefix(EVAL)
    return score != name and "/" not in score and score not in ("n", "failed", "failed_sampled")


def held_out(names: Iterable[str], score: str) -> list[str]:
    """The score's metrics among `names`: greedy, sampled, then greedy by family of kinds."""
    if not score:
        return []
    metric_names, greedy, sampled = set(names), f"{EVAL}{score}", f"{EVAL}{score}_sampled"
    families = {name for name in metric_names if name.startswith(f"{greedy}_") and not name.startswith(sampled)}
    return [*(name for name in (greedy, sampled) if name in metric_names), *sorted(families)]
