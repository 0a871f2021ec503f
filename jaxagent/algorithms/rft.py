"""Rejection-sampling fine-tuning (Yuan et al., arXiv 2308.01825): imitate one's own distinct successes.

In: groups of logged episodes. Out: the episodes to imitate; `sft.sft` makes their streams (NLL of action tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.algorithms.dpo import distinct
from jaxagent.types import Episode, Group


def successes(groups: Sequence[Group], min_reward: float, per_task: int) -> list[Episode]:
    """At most `per_task` distinct attempts with a reward of `min_reward` or more, the first of each task."""
    good = ([e for e in distinct(group.episodes) if e.total_reward >= min_reward] for group in groups)
    return [episode for attempts in good for episode in attempts[:per_task]]
