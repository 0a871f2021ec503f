"""Curves as inline SVG: series of (x, y) in -> an HTML `<figure>` that needs no script to be read.

Colours are CSS variables of charts.css (`--c0` ...), so that one figure is right on light and dark pages. The raw
points travel in a `data-series` attribute, from which charts.js shows values under the pointer.
"""

from __future__ import annotations

import html
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 420, 232
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 10, 38  # margins around the plot
_COLOURS = 8


def line_chart(title: str, series: Mapping[str, Points], *, x: str, y: str, log_x: bool = False) -> str:
    """One line per series, of shares: the y axis goes from 0 to 1. `x` and `y` name the axes.

    `log_x`: equal factors of x, all above 0, are equally far apart, and the ticks are the points' own.
    """
    series = _finite(series)
    if not series:
        return ""
    scale = _Scale(series, log_x)
    marks = []
    for index, points in enumerate(series.values()):
        marks.append(_path(points, scale, index))
        dot = f'r="3" class="dot" style="--c:var(--c{index % _COLOURS})"'
        shown = points if len(points) <= 12 else ()
        marks += [f'<circle cx="{scale.x(at_x):.1f}" cy="{scale.y(at_y):.1f}" {dot}/>' for at_x, at_y in shown]
    return _figure(title, series, scale, marks, x, y)


def document(title: str, body: str) -> str:
    """A self-contained page around HTML with charts and tables."""
    folder = pathlib.Path(__file__).parent
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{(folder / 'charts.css').read_text(encoding='utf-8')}</style><main>{body}</main>"
        f'<div id="tip"></div><script>{(folder / "charts.js").read_text(encoding="utf-8")}</script></html>'
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers within [low, high]."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= min((1, 2, 5, 10), key=lambda factor: abs(span / (step * factor) - count))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def label(value: float) -> str:
    """A tick's text: 0.25, 2k, 1.5e-06."""
    if value == 0:
        return "0"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}".replace(".0e", "e")


class _Scale:
    """Data coordinates to pixels."""

    def __init__(self, series: Mapping[str, Points], log_x: bool):
        xs = [x for points in series.values() for x, _ in points]
        self.log_x = log_x
        self.x_ticks = sorted(set(xs)) if log_x else ticks(min(xs), max(xs), 5)
        self.x_low, self.x_high = min(xs), max(xs)

    def x(self, value: float) -> float:
        low, high, value = (
            map(math.log, (self.x_low, self.x_high, value)) if self.log_x else (self.x_low, self.x_high, value)
        )
        return _LEFT + (value - low) / (high - low or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - value * (HEIGHT - _TOP - _BOTTOM)


def _figure(
    title: str, series: Mapping[str, Points], scale: _Scale, marks: Sequence[str], x_name: str, y_name: str
) -> str:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    axes = [
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT}" class="axis" text-anchor="end">{html.escape(x_name)}</text>',
        f'<text transform="translate(9,{middle:g}) rotate(-90)" class="axis" text-anchor="middle">'
        f"{html.escape(y_name)}</text>",
    ]
    for value in ticks(0.0, 1.0):
        y = scale.y(value)
        axes.append(f'<path d="M{_LEFT},{y:.1f}H{WIDTH - _RIGHT}" class="grid"/>')
        axes.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" class="tick" text-anchor="end">{label(value)}</text>')
    for value in scale.x_ticks:
        x, y = scale.x(value), HEIGHT - _BOTTOM + 16
        axes.append(f'<text x="{x:.1f}" y="{y}" class="tick" text-anchor="middle">{label(value)}</text>')
    legend = ""
    if len(series) > 1:
        legend = "".join(
            f'<span class="key" style="--c:var(--c{i % _COLOURS})">{html.escape(name)}</span>'
            for i, name in enumerate(series)
        )
    data = {
        "x": [scale.x_low, scale.x_high],
        "log": scale.log_x,
        "name": x_name,
        "frame": [_LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM],
        "series": [[name, [[x, float(f"{y:.5g}")] for x, y in points]] for name, points in series.items()],
    }
    return (
        f'<figure class="chart" data-series="{html.escape(json.dumps(data, separators=(",", ":")))}">'
        f"<figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f'{"".join(axes)}{"".join(marks)}<path class="cursor" d=""/></svg><div class="legend">{legend}</div></figure>'
    )


def _path(points: Points, scale: _Scale, index: int) -> str:
    line = "L".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
    return f'<path d="M{line}" class="line" style="--c:var(--c{index % _COLOURS})"/>'


def _finite(series: Mapping[str, Points]) -> dict[str, list[tuple[float, float]]]:
    finite = {name: [(float(x), float(y)) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    return {name: points for name, points in finite.items() if points}
