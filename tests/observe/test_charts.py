"""Curves as SVG: points where they belong, round ticks, gaps where nothing is finite."""

import html
import json
import re
import xml.etree.ElementTree

import pytest

from jaxagent.observe import charts

AXES = {"x": "k", "y": "share"}


def _points(svg: str, css: str) -> list[tuple[float, float]]:
    path = re.search(rf'<path d="M([^"]*?)Z?" class="{css}"', svg)[1]
    return [tuple(map(float, pair.split(","))) for pair in path.split("L")]


def test_a_line_goes_through_its_points():
    svg = charts.line_chart("t <x>", {"a": [(0, 0.0), (10, 1.0), (20, 0.5)]}, **AXES)
    (x0, y0), (x1, y1), (x2, y2) = _points(svg, "line")
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 > y2 > y1, "y grows downwards in SVG"
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.2)
    xml.etree.ElementTree.fromstring(svg)


def test_a_logarithmic_axis_puts_equal_factors_equally_far_apart():
    points = [(512, 0.9), (1024, 0.8), (4096, 0.7)]
    svg = charts.line_chart("t", {"a": points}, **AXES, log_x=True)
    xs = [float(x) for x in re.findall(r'<circle cx="([0-9.]+)"', svg)]
    assert (xs[2] - xs[1]) == pytest.approx(2 * (xs[1] - xs[0]), abs=0.2)
    data = json.loads(html.unescape(re.search(r'data-series="([^"]*)"', svg)[1]))
    assert data["log"] and data["x"] == [512, 4096]
    assert [label in svg for label in (">512<", ">1.024k<", ">4.096k<")] == [True] * 3  # the points' own
    assert "&quot;log&quot;:false" in charts.line_chart("t", {"a": points}, **AXES)


def test_values_that_are_not_finite_leave_a_gap_and_empty_series_no_chart():
    nan = float("nan")
    assert charts.line_chart("t", {"a": [(0, nan)]}, **AXES) == ""
    assert "nan" not in charts.line_chart("t", {"a": [(0, 1.0), (1, nan), (2, 0.5)]}, **AXES)
    assert charts.line_chart("constant", {"a": [(0, 0.0), (1, 0.0)]}, **AXES)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 100, [0, 20, 40, 60, 80, 100]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_labels():
    assert [charts.label(v) for v in (0, 0.25, 2000, 1.5e-6, 3e-6, 2.5e6)] == [
        "0",
        "0.25",
        "2k",
        "1.5e-06",
        "3e-06",
        "2.5M",
    ]


def test_axes_have_names():
    svg = charts.line_chart("t", {"a": [(0, 1.0), (1, 0.5)]}, x="k", y="score <1>")
    xml.etree.ElementTree.fromstring(svg)
    assert ">k</text>" in svg and ">score &lt;1&gt;</text>" in svg
