"""Numbers as short text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float) -> str:
    """Four significant digits at most, short: 0.8125, 1.2e-06, 14210."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """1:05:09, 3:20, 0:07."""
    total = round(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def sparkline(values: list[float]) -> str:
    """One block character per value, scaled between the smallest and the largest; a space where not finite."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / span * top)] if math.isfinite(v) else " " for v in values)
