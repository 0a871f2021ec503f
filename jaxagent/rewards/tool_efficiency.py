"""How well tools were used: calls that repeat an earlier one, calls of tools that do not exist, calls over a budget.

Shaping only: it says nothing about success, so it belongs under a cap (`composite`). A repeated call is one with the
same tool and the same arguments as JSON (key order is nothing, 1 and 1.0 and true differ). Where asking twice is
sensible because the world changes between the calls, name the tool in `repeatable`.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from jaxagent.rewards.view import View


def tool_efficiency(
    view: View, *, tools: Collection[str], budget: int, penalty: float, repeatable: Collection[str] = ()
) -> dict[str, float]:
    """-penalty for each fault, at least -1; a call may be several faults at once.

    Returns:
      "reward" = -min(1, penalty * (duplicates + unknown + over)), and the three counts.
    """
    if not 0.0 <= penalty <= 1.0:
        raise ValueError(f"penalty {penalty} is not in [0, 1]")
    calls = view.tool_calls
    once = [(call.name, json.dumps(call.arguments, sort_keys=True)) for call in calls if call.name not in repeatable]
    counts = {
        "duplicates": float(len(once) - len(set(once))),  # three identical calls are two
        "unknown": float(sum(call.name not in tools for call in calls)),
        "over": float(max(0, len(calls) - budget)),
    }
    return {"reward": -min(1.0, penalty * sum(counts.values())), **counts}
