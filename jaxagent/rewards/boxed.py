r"""The published check of short boxed answers: MATH's string equality, as MemAgent trains with it, and sub-EM.

`equality` is the reward of MemAgent (arXiv 2507.02259): of the last 300 characters, in lower case, the last \boxed{...}
equals a gold answer after a part of MATH's clean-up of strings (Hendrycks et al., arXiv 2103.03874). `sub_em` is the
metric of its RULER-HQA evaluation. Both are kept as published, with their quirks, so that numbers can be compared; what
is better as a reward of mathematics stands in `maths.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.rewards.text import normalize_answer

TAIL_CHARS = 300  # of a reply that are looked at
_REPLACED = (  # in this order
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
    ("\\%", ""),
    (" .", " 0."),
    ("{.", "{0."),
    (" ", ""),
)


def equality(reply: str, answers: Sequence[str]) -> bool:
    r"""Whether what the last \boxed of a reply's end holds is a gold answer."""
    boxed = last_boxed(reply[-TAIL_CHARS:].lower())
    return boxed is not None and any(same(boxed, answer.lower()) for answer in answers)


def sub_em(reply: str, answers: Sequence[str]) -> bool:
    r"""Whether the last \boxed holds a gold answer or is a part of one, both normalised as in SQuAD.

    Of a text of which normalising leaves nothing ("the") the published script says that it is a part of every other.
    Here such a prediction is wrong, and such a gold answer ("The The") is only found where it stands letter for letter.
    That script also looks at the first gold answer alone; RULER-HQA has no other.

    As a reward it pays for a single letter of an answer, and for lists of all answers.
    """
    boxed = last_boxed(reply) or ""
    prediction = normalize_answer(boxed)
    gold_answers = {answer.strip().lower() for answer in answers}
    golds = [gold for answer in answers if (gold := normalize_answer(answer))]
    return boxed.strip().lower() in gold_answers - {""} or (
        bool(prediction) and any(gold in prediction or prediction in gold for gold in golds)
    )


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed holds, as the published scripts take it; None where it has no end.

    "\boxed 7$" holds all up to the next "$", and wherever a text has "\boxed " the last of those counts and not a later
    "\boxed{". A text may open other braces inside.
    """
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].split("$")[0]
    at = text.rfind("\\boxed")
    depth = 0
    for end in range(max(at, 0), len(text) if at >= 0 else 0):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0 and text[end] == "}":
            inside = text[at + len("\\boxed") : end]
            return inside[1:] if inside.startswith("{") else None
    return None


def same(a: str, b: str) -> bool:
    """MATH's equality of two answers, of which MemAgent keeps the part without fractions, roots and units."""
    return cleaned(a) == cleaned(b)


def cleaned(text: str) -> str:
    r"""An answer without spaces, line breaks, \left, \right, degrees, escaped $ and %; \tfrac and \dfrac are \frac."""
    for before, after in _REPLACED:
        text = text.replace(before, after)
    return text
