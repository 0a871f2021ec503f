"""Boxed answers: extraction and equality, by hand, by random rationals, and on hostile text."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.rewards.maths import boxed, equal, last_boxed, parse_number, tidy
from jaxagent.rewards.view import View
from jaxagent.types import Task

SHARED = Path(__file__).resolve().parents[2].parent / "shared/data"


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2", None),  # the text was cut
        (r"\boxed{1} and \boxed{2 \boxed{3}", "3"),
        (r"\boxed{a \boxed{3} b}", "3"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{\{}", r"\{"),
        ("} {{ \\boxed{4} }", "4"),
        (r"\boxed{}", ""),
        (r"so \boxed 7", "7"), (r"\boxed {7}.", "7"), ("\\boxed\n{7}", "7"), (r"\boxed7", "7"),
        (r"\boxed{1}, \boxed 2", "2"),
        (r"$\boxed 7$ is it", "7"), (r"\boxed -1,234.5, or", "-1,234.5"),
        (r"\boxed \frac{\sqrt{2}}{2} is", r"\frac{\sqrt{2}}{2}"),
        (r"$x = \boxed 5\sqrt 2$ and $3$", r"5\sqrt 2"), (r"{\boxed 5}", "5"), (r"\boxed (1,2)", "(1,2)"),
        (r"\boxed \{1,2\}", r"\{1,2\}"), (r"it goes into \boxed form", None), (r"\boxedanswer{5}", None),
        (r"\boxed{6}. The \boxed. is one", "6"), (r"\boxed{6}, \boxed (as above) or \boxed -like", "6"),
        (r"\boxed{6} with \boxed \{ and \}", "6"),
        (r"\boxed{6}, which is a \boxed answer", "6"), (r"\boxed", None), (r"\boxed{5} in \boxed{", None),
        # Two backslashes, as in a text out of JSON; three are a line break and a box.
        (r"\\boxed{7}", "7"), (r"so \\boxed{\\frac{1}{2}}", r"\frac{1}{2}"), (r"\\boxed 7", "7"), (r"\\boxed{7", None),
        (r"\\boxed{1} \boxed{a\\b}", r"a\\b"), (r"1 \\\boxed{7}", "7"), (r"\\boxed{a \\\\ b}", r"a \\ b"),
        # \fbox where there is no \boxed, as verl has it.
        (r"\fbox{5}", "5"), (r"\boxed{6}, not \fbox{5}", "6"), (r"\fbox{5} and \boxed{6", None), (r"\fboxes{5}", None),
        ("7", None),
    ],
)  # fmt: skip
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    "text, value",
    [
        ("12", 12), ("-3", -3), ("+3", 3), ("- 3", -3), ("1,234,567.50", Fraction("1234567.5")), (".5", Fraction(1, 2)),
        ("5.", 5), ("3/4", Fraction(3, 4)), ("-3 / 4", Fraction(-3, 4)), ("3/-4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)), (r"-\frac34", Fraction(-3, 4)), (r"\frac{-3}4", Fraction(-3, 4)),
        (r"\frac3{40}", Fraction(3, 40)), ("1 1/2", Fraction(3, 2)), (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"3 \times 10^{5}", 300000), (r"3\cdot10^-2", Fraction(3, 100)), ("1.5e3", 1500), ("50%", Fraction(1, 2)),
        (r"12.5\%", Fraction(1, 8)),
    ],
)  # fmt: skip
def test_numbers_are_exact(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "1/0", r"\frac{1}{0}", "1,23", "1 2", "1e999", "1e-999", "--1", "17*23", "2+2", "2^3", "1_000", "٣",
     "inf", "nan", "0x10", "9" * 201, r"\frac123", "1/2/3", "%", "-", r"\frac{1,2}{3}", r"1\frac{-1}{2}"],
)  # fmt: skip
def test_what_is_no_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    "a, b",
    [
        (r"\dfrac{2}{4}", "0.5"), (r"\tfrac{1}{2}", r"\frac12"), ("$1{,}000$", "1000"), (r"\$18.00", "18"),
        (r"x = 5", "5"), ("5.", "5"), (r"12\text{ cm}", "12"), (r"90^\circ", "90"), (r"90^{\circ}", "90°"),
        (r"\text{Evelyn}", "Evelyn"), (r"\left( 1, \frac{1}{2} \right)", "(1,0.5)"), ("[0, 1)", "[0,1.0)"),
        (r"2\sqrt{3}", r"2 \sqrt{3}"), ("−4", "-4"), ("50%", "1/2"), (r"50\%", "50"), ("0.5", "50%"), ("50%", "50.0%"),
        (r"(\sqrt{2}, f(1,2))", r"(\sqrt 2, f(1, 2))"), (r"\sqrt3", r"\sqrt{3}"), (r"2\sqrt 3", r"2\sqrt{3}"),
        (r"\frac{\pi}4", r"\frac{\pi}{4}"), (r"\frac\pi4", r"\dfrac{\pi}{4}"), (r"\frac\pi{4}", r"\frac{\pi}{4}"),
        (r"\frac{\sqrt3}2", r"\frac{\sqrt{3}}{2}"), (r"\sqrt[3]2", r"\sqrt[3]{2}"), (r"\frac{x}y z", r"\frac{x}{y}z"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"5 \text{ cm}^2", "5"),
        (r"\begin{pmatrix} 1 & 2 \\ \, 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"5\text{ m}^{2}", "5"), (r"5\,\mathrm{cm}^{3}", "5"), (r"9.8 \text{ m/s}^2", "9.8"), (r"\frac 1 2", "0.5"),
    ],
)  # fmt: skip
def test_equal(a, b):
    assert equal(a, b) and equal(b, a)


@pytest.mark.parametrize(
    "a, b",
    [
        ("0.333", "1/3"), ("50", "0.5"), ("17*23", "391"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(1,2)", "(1,2,3)"),
        ("", ""), ("5", ""), ("x", "X"), ("1/0", "2/0"), ("12", "1 2"), ("(1,2)(3,4)", "(1,2)"), (r"50\%", "5000"),
        (r"\sqrt{2}", r"\sqrt{3}"), ("3", "three"), (r"\sqrt12", r"\sqrt{12}"), (r"5\mathrm{e}^2", "5"),
        (r"\frac{\pi}42", r"\frac{\pi}{42}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}12\end{pmatrix}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \ 2 \end{pmatrix}"), (r"5\text{x}^2", "5"),
        (r"2\mathrm{i}", "2"), (r"3\text{ e}", "3"), (r"3\text{ e}^2", "3"),
    ],
)  # fmt: skip
def test_not_equal(a, b):
    assert not equal(a, b) and not equal(b, a)


def test_tidy_keeps_what_has_a_meaning():
    assert tidy(r"\leftarrow") == r"\leftarrow" and tidy("x == 2") == "x == 2"
    assert tidy(r"\fractal12 \sqrtx \frac{1}{2}") == r"\fractal12 \sqrtx \frac{1}{2}"


RATIONAL = st.fractions(max_denominator=999).map(lambda f: f.limit_denominator(999))


@settings(max_examples=60, deadline=None)
@given(RATIONAL, RATIONAL)
def test_writings_of_the_same_rational_are_equal_and_of_others_not(x, y):
    def writings(f):
        sign = "-" if f < 0 else ""
        whole, rest = divmod(abs(f.numerator), f.denominator)
        yield f"{f.numerator}/{f.denominator}"
        yield rf"\frac{{{f.numerator}}}{{{f.denominator}}}"
        yield rf"{sign}\dfrac{{{abs(f.numerator) * 3}}}{{{f.denominator * 3}}}"
        yield f"{sign}{whole} {rest}/{f.denominator}"
        yield (
            rf"{sign}{whole:,}\frac{{{rest}}}{{{f.denominator}}}" if whole < 1000 else f"{f.numerator}/{f.denominator}"
        )

    for a in writings(x):
        for b in writings(y):
            assert equal(a, b) == (x == y), (a, b)


def test_a_view_is_judged_by_its_last_box_or_by_the_answer_that_was_found():
    task = Task("t", "q", ("3/4", "none"))
    wrote = ((r"first \boxed{1}", r"\boxed{3/4} says the tool"), (r"so \boxed{0.75}", ""))
    assert boxed(View(task, wrote)) == 1.0
    assert boxed(View(task, wrote[:1])) == 0.0  # what was read does not count
    assert boxed(View(task, wrote, answer=r"thus \boxed{2}")) == 0.0
    assert boxed(View(task, wrote, answer=".75")) == 1.0
    assert boxed(View(task, (("0.75", ""),))) == 0.0
    assert boxed(View(Task("t", "q", (r"\boxed{7}",)), ((r"\boxed{7.0}", ""),))) == 1.0


def test_hostile_text_costs_little():
    size = 100_000  # quadratic work would not end
    cases = ["\\" * size + "boxed", "\\boxed{" * (size // 7), "{" * size, "\\boxed{" + "1," * size,
             "\\boxed{" + "9" * size + "}",
             "\\boxed{" + " " * size + "}", "\\boxed{" + "\\text{" * (size // 6) + "}", "\\boxed{1" + "^ " * size + "}",
             "\\boxed{(" + "(1," * size + ")}", "\\boxed{" + "1 " * size + "}"]  # fmt: skip
    task = Task("t", "q", ("1",))
    assert [boxed(View(task, ((text, ""),))) for text in cases] == [0.0] * len(cases)


def test_gold_answers_of_real_benchmarks_equal_themselves_and_their_box():
    found = [p for p in (SHARED / "qa-bench" / name for name in ("aime24.json", "amc23.json")) if p.is_file()]
    if not found:
        pytest.skip("qa-bench is not beside this checkout")
    rows = [row for path in found for row in json.loads(path.read_text())]
    golds = [str(row["answer"]) for row in rows if "answer" in row]
    assert len(golds) == len(rows) > 50
    for gold in golds:
        number = parse_number(tidy(gold))
        assert number == Fraction(gold)
        assert boxed(View(Task("t", "q", (gold,)), ((rf"\boxed{{{gold}}}", ""),))) == 1.0
        assert not equal(str(number + 1), gold)
