"""How old the tokens are that a step trains on, in versions: a version is the policy after so many published steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxagent.algorithms.streams import sampled_trajectories
from jaxagent.types import Group


class BoundError(RuntimeError):
    """A token is older than the run allows, or of a version that comes later: a defect of what gave it."""


def ages(groups: Sequence[Group], step: int, bound: int) -> dict[str, float | None]:
    """The ages of a step's sampled tokens as metrics; none where nothing may be older than the step's own version.

    Args:
      groups: that the step trains on.
      step: trains version `step` into the next one.
      bound: the largest age allowed.

    Returns:
      "staleness/mean" and "staleness/max" in versions (None without tokens), and for every age 0..bound
      "staleness/frac_<age>", its part of the tokens.

    Raises:
      BoundError: a token's age is not from 0 to `bound`; names its task.
    """
    counts = np.zeros(bound + 1, np.int64)
    for trajectory, task in ((t, g.task.id) for g in groups for t in sampled_trajectories([g])):
        of_tokens = step - trajectory.policy_versions[trajectory.action_mask].astype(np.int64)
        if of_tokens.min() < 0 or of_tokens.max() > bound:
            wrong = of_tokens[(of_tokens < 0) | (of_tokens > bound)][0]
            raise BoundError(
                f"RL step {step} would train on a token of task '{task}' that version {step - wrong} sampled: versions "
                f"{max(0, step - bound)} to {step} are allowed (rl.staleness). Please report this."
            )
        counts += np.bincount(of_tokens, minlength=bound + 1)
    if not bound:
        return {}
    total, age = counts.sum(), np.arange(bound + 1)
    there = age[counts > 0]
    metrics: dict[str, float | None] = {
        "staleness/mean": float(counts @ age / total) if total else None,
        "staleness/max": float(there.max()) if total else None,
    }
    return metrics | {f"staleness/frac_{n}": float(counts[n] / total) if total else None for n in age.tolist()}
