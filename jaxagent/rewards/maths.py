r"""Equality of final answers of mathematics: the last \boxed{...}, compared as exact numbers or as tidied text.

    equal(r"\dfrac{2}{4}", "0.5"), equal("1,000", "1000"), equal(r"50\%", "1/2"), equal("(1, 1/2)", r"(1,\frac12)")

Numbers are literals: integers, decimals, fractions, mixed numbers, powers of ten, percentages. Arithmetic is not
evaluated, for then "17*23" would be a right answer to "what is 17*23?". Values are exact rationals: 0.333 is not 1/3.
Nothing is executed, and work is linear in the text (numbers are at most `MAX_NUMBER_CHARS` long, and an answer longer
than `MAX_ANSWER_CHARS` equals only itself).
"""

from __future__ import annotations

import re
from fractions import Fraction

from jaxagent.rewards.view import View

MAX_NUMBER_CHARS = 200
MAX_ANSWER_CHARS = 10_000
MAX_EXPONENT = 200

_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_ARGUMENT = r"\s*(?:\{\s*([-+]?[0-9.,]+)\s*\}|([0-9]))"  # of \frac: in braces, or a single digit
_FRAC = rf"\\frac{_ARGUMENT}{_ARGUMENT}"
DECIMAL = re.compile(_DECIMAL)
SIGNED = re.compile(rf"[-+]?{_DECIMAL}")
RATIO = re.compile(rf"({_DECIMAL})\s*/\s*([-+]?{_DECIMAL})")
FRAC = re.compile(_FRAC)
MIXED = re.compile(r"([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
MIXED_FRAC = re.compile(rf"([0-9]+)\s*{_FRAC}")
POWER = re.compile(
    rf"({_DECIMAL})(?:[eE]([-+]?[0-9]+)|\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{{\s*([-+]?[0-9]+)\s*\}}|([-+]?[0-9]+)))"
)
DROPPED = re.compile(  # but not a part of two backslashes, which end a row of a matrix
    r"(\\\\)"
    r"|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\[!,;: ]|\\\$|\$|\\\(|\\\)|\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|°"
)
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# A unit at the end, which e and i are not; to a power only where it is no letter that may stand for a number.
UNIT = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{(?!\s*[ei]\s*\})[^{}]*\}$"
    r"|\\(?:(?:text|mbox)\s*\{\s+(?![ei]\s*\})[A-Za-z]|(?:text|mathrm|mbox)\s*\{\s*[A-Za-z]{2})[A-Za-z/ ]*\}"
    r"\s*\^\s*(?:-?[0-9]|\{\s*-?[0-9]\s*\})$"
)
PIECES = {  # a box may be written with two backslashes, in texts out of JSON
    name: re.compile(rf"(\\{{1,2}}){name}(?![A-Za-z])\s*(\{{)?|\\.|[{{}}]", re.DOTALL) for name in ("boxed", "fbox")
}
_PART = r"[^{}$\s\\]|\\\S|\{(?:[^{}$]|\{[^{}$]*\})*\}"
# What \boxed without braces holds: all up to the next $ of the line, else all up to white space. Words and signs with
# no number or command among them are none: they stand in sentences about boxes.
BARE = re.compile(rf"(?=[-+−.(0-9\\])(?:(?:{_PART}|[ \t])+(?=\$)|(?:{_PART})+)")
ANSWERS = re.compile(r"[0-9]|\\[A-Za-z]")
MAX_BARE_CHARS = 200
TOKEN = re.compile(r"\\sqrt(?![A-Za-z])(?:\s*\[[^][{}]*\])?|\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
VARIABLE = re.compile(r"[A-Za-z]{1,2}\s*=(?!=)\s*")


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds; None where there is none, or where it has no end, as in a text that was cut.

    "\boxed {7}" and "\boxed 7" are boxes too, and \fbox{7} where a text has no \boxed. With two backslashes before the
    name, those inside count as one each. One pass; \{ and \} are characters, not braces.
    """
    last, start, open_braces = None, -1, []  # the last box and where it begins; where each open brace is a box, else -1
    twice = False  # whether its name has two backslashes
    for piece in PIECES["boxed" if "\\boxed" in text else "fbox"].finditer(text):
        if piece[0] == "{":
            open_braces.append(-1)
        elif piece[0] == "}":
            if open_braces and open_braces.pop() == start >= 0:
                inside = text[start : piece.start()].strip()
                last = inside.replace("\\\\", "\\") if twice else inside
        elif piece[2]:
            last, start, twice = None, piece.end(), len(piece[1]) == 2
            open_braces.append(start)
        elif piece[1]:
            bare = BARE.match(text, piece.end(), piece.end() + MAX_BARE_CHARS)
            if bare and ANSWERS.search(bare[0]):
                last, start = bare[0].strip().rstrip(",;:!?"), -1
    return last


def tidy(text: str) -> str:
    r"""LaTeX without what does not change a value: $, spacing, \left, \text units, degrees, "x =", a final period."""
    text = text.strip().replace("−", "-").replace("{,}", ",").replace("~", " ")
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text)
    text = DROPPED.sub(r"\1", text).strip()
    text_match = TEXT.fullmatch(text)
    text = text_match[1].strip() if text_match else text
    unit = UNIT.search(text)
    if unit and unit.start() > 0:  # "12 \text{ cm}"
        text = text[: unit.start()].strip()
    text = text.removesuffix(".").rstrip()
    variable = VARIABLE.match(text)
    return with_braces(text[variable.end() :] if variable else text)


def with_braces(text: str) -> str:
    r"""Braces around the arguments of \frac and \sqrt that have none: "\sqrt3" is "\sqrt{3}", "\frac{\pi}4" has two. An
    argument is one character or command, as in TeX."""
    if "\\frac" not in text and "\\sqrt" not in text:
        return text
    parts, missing_arguments = [], [0]  # arguments that are still to come, at every depth of braces
    for match in TOKEN.finditer(text):
        token = match[0]
        arguments = 2 if token == "\\frac" else int(token.startswith("\\sqrt") and not token[5:6].isalpha())
        if arguments:
            missing_arguments[-1] = arguments
        elif token == "{":
            missing_arguments[-1] = max(0, missing_arguments[-1] - 1)
            missing_arguments.append(0)
        elif token == "}":
            if len(missing_arguments) > 1:
                missing_arguments.pop()
        elif missing_arguments[-1] and (token.isalnum() or re.fullmatch(r"\\[A-Za-z]+", token)):
            missing_arguments[-1] -= 1
            token = f"{{{token}}}"
        elif not token.isspace():
            missing_arguments[-1] = 0
        parts.append(token)
    return "".join(parts)


def parse_number(text: str) -> Fraction | None:
    r"""The number a tidied text is, or None: 12, -1,000.5, .5, 3/4, \frac34, 1 1/2, 1\frac{1}{2}, 3\times10^5, 50\%."""
    if not 0 < len(text) <= MAX_NUMBER_CHARS:
        return None
    body = text.strip()
    percent = body.endswith("%")
    if percent:
        body = body[:-1].rstrip().removesuffix("\\").rstrip()
    sign = -1 if body.startswith("-") else 1
    value = _unsigned(body[1:].lstrip() if body[:1] in "+-" else body) if body else None
    return None if value is None else sign * value / (100 if percent else 1)


def _unsigned(body: str) -> Fraction | None:
    if DECIMAL.fullmatch(body):
        return _decimal(body)
    if match := RATIO.fullmatch(body):
        return _ratio(match[1], match[2])
    if match := FRAC.fullmatch(body):
        return _ratio(match[1] or match[2], match[3] or match[4])
    if match := MIXED.fullmatch(body):
        part = _ratio(match[2], match[3])
        return None if part is None else int(match[1]) + part
    if match := MIXED_FRAC.fullmatch(body):
        part = _ratio(match[2] or match[3], match[4] or match[5])
        return None if part is None or part < 0 else int(match[1]) + part
    if match := POWER.fullmatch(body):
        exponent = int(match[2] or match[3] or match[4])
        return _decimal(match[1]) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _ratio(above: str, below: str) -> Fraction | None:
    if not SIGNED.fullmatch(above) or not SIGNED.fullmatch(below) or _decimal(below) == 0:
        return None
    return _decimal(above) / _decimal(below)


def equal(prediction: str, gold: str) -> bool:
    """True when both are the same number, the same tuple or interval of such, or the same text but for white space.

    A percentage equals its value and, when the other side is a bare number, also its count: 50% is 1/2 and 50. (The
    published checkers of MATH drop the sign and know only the second.) Two bare numbers are never scaled.
    """
    if max(len(prediction), len(gold)) > MAX_ANSWER_CHARS:
        return prediction.split() == gold.split()
    a, b = tidy(prediction), tidy(gold)
    inside_a, inside_b = _elements(a), _elements(b)
    if inside_a and inside_b:
        same_ends = a[0] == b[0] and a[-1] == b[-1]
        return same_ends and len(inside_a) == len(inside_b) and all(map(_same, inside_a, inside_b))
    return _same(a, b)


def _same(a: str, b: str) -> bool:
    x, y = parse_number(a), parse_number(b)
    if x is None or y is None:
        a, b = "".join(a.split()), "".join(b.split())
        return a == b != "" and x is None and y is None
    x_percent, y_percent = a.endswith("%"), b.endswith("%")
    return x == y or (x_percent != y_percent and (100 * x == y if x_percent else 100 * y == x))


def _elements(text: str) -> list[str] | None:
    """The parts of "(a, b, ...)" or "[a, b)" between commas outside of inner brackets; None when there are not two."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    parts, depth, start = [], 0, 1
    for at in range(1, len(text) - 1):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth < 0:  # "(1,2)(3,4)"
            return None
        if text[at] == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:-1].strip()] if parts else None


def boxed(view: View) -> float:
    r"""1 when the final answer equals a gold answer, else 0; no answer is 0.

    The final answer is the last \boxed{...} of `view.answer`, or all of it where it has none; without an answer found
    by the environment it is the last \boxed{...} the policy wrote. A gold answer may be boxed too.
    """
    answer = last_boxed(view.actions) if view.answer is None else last_boxed(view.answer) or view.answer
    return float(answer is not None and any(equal(answer, last_boxed(gold) or gold) for gold in view.task.answers))
