"""Mixing weights -> a fixed order of domains that keeps to them as closely as whole groups can."""

from __future__ import annotations

import math
from collections.abc import Sequence


def shares_in_turn(shares: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """One period of the order: as many entries as the shares' sum, over their greatest common divisor.

    After any number of entries, every domain has its exact share to less than one: each of its turns has a window, the
    j-th from j * total / share to (j + 1) * total / share, and of the turns whose window has begun the one whose window
    ends first goes first, which is known to fit (Pfair scheduling of one processor).
    """
    divisor = math.gcd(*(share for _, share in shares))
    weights = [(name, share // divisor) for name, share in shares]
    total = sum(share for _, share in weights)
    had = dict.fromkeys((name for name, _ in weights), 0)
    order = []
    for at in range(total):
        begun = [(name, share) for name, share in weights if had[name] * total // share <= at]
        name = min(begun, key=lambda entry: -(-(had[entry[0]] + 1) * total // entry[1]))[0]
        had[name] += 1
        order.append(name)
    return tuple(order)
