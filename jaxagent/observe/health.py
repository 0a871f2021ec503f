"""Numbers of a step that a person must see at once: those that are not finite, and updates that were left out.

metrics.jsonl shows null for such a number, since JSON has no NaN; these messages say what it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_NEARLY_ALL = 0.95
_UPDATES = {"policy/grad_norm": "policy/update_applied", "critic/grad_norm": "critic/update_applied"}


def complaints(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Name of a metric -> one line about it; {} for a healthy step."""
    lines = {}
    for name, value in metrics.items():
        if isinstance(value, (int, float)) and not math.isfinite(value):
            lines[name] = f"{name} is {value}"
            if name in _UPDATES:
                lines[name] += ": an update with such a gradient is left out, the weights stay as they were"
    cut, turns = metrics.get("stop/token_limit"), metrics.get("episode/turns")
    if cut is not None and turns is not None and cut >= _NEARLY_ALL and turns <= 2 - _NEARLY_ALL:
        lines["stop/token_limit"] = (
            f"{cut:.0%} of episodes ended in their first turn because its tokens ran out (env.turn_tokens, "
            "env.context_tokens), so that the environment's step was hardly ever called"
        )
    for norm, applied in _UPDATES.items():
        share = metrics.get(applied)
        if norm not in lines and share is not None and share < 1.0:
            lines[applied] = f"{applied} is {share:g}: an update found no token to learn from"
    return lines
