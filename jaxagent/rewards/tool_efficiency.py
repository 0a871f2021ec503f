"""How well tools were used: calls that repeat an earlier one, calls of tools that do not exist, calls over a budget.

Shaping only: it says nothing about success, so it belongs under a cap (`composite`). A repeated call is one with the
same tool and the same arguments as JSON (key order is nothing, 1 and 1.0 and true differ). Where asking twice is
sensible because the world changes between the calls, name the tool in `repeatable`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from jaxagent.rewards.view import ToolCall, View


def duplicate_calls(calls: Sequence[ToolCall], repeatable: Collection[str] = ()) -> int:
    """Calls that repeat an earlier one; three identical calls are two duplicates."""
    calls_to_count = [(c.name, json.dumps(c.arguments, sort_keys=True)) for c in calls if c.name not in repeatable]
    return len(calls_to_count) - len(set(calls_to_count))


def unknown_calls(calls: Sequence[ToolCall], tools: Collection[str]) -> int:
    """Calls of tools that are not in `tools`."""
    return sum(call.name not in tools for call in calls)


def calls_over(calls: Sequence[ToolCall], budget: int) -> int:
    """Calls beyond the budget."""
    return max(0, len(calls) - budget)


def tool_efficiency(
    view: View, *, tools: Collection[str], budget: int, penalty: float, repeatable: Collection[str] = ()
) -> dict[str, float]:
    """-penalty for each fault, at least -1; a call may be several faults at once.

    Returns:
      "reward" = -min(1, penalty * (duplicates + unknown + over)), and the three counts.
    """
    if not 0.0 <= penalty <= 1.0:
        raise ValueError(f"penalty {penalty} is not in [0, 1]")
    counts = {
        "duplicates": float(duplicate_calls(view.tool_calls, repeatable)),
        "unknown": float(unknown_calls(view.tool_calls, tools)),
        "over": float(calls_over(view.tool_calls, budget)),
    }
    return {"reward": -min(1.0, penalty * sum(counts.values())), **counts}
