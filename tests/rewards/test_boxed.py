r"""The published check of boxed answers, against what the published function gives for the same texts.

The scores of `PUBLISHED` are those of verl/utils/reward_score/hotpotqa.py of BytedTsinghua-SIA/MemAgent at 76b7a65.
"""

import pytest

from jaxagent.rewards import boxed

PUBLISHED = [
    (r"The answer is \boxed{Chief of Protocol}.", "Chief of Protocol", 1),
    (r"\boxed{chief  of protocol}", "Chief of Protocol", 1),  # spaces do not count
    (r"\boxed{Chief of Protocol.}", "Chief of Protocol", 0),
    (r"\boxed{yes} no, \boxed{no}", "no", 1),  # the last one
    (r"\boxed{yes} no, \boxed{no}", "yes", 0),
    ("Chief of Protocol", "Chief of Protocol", 0),
    (r"\boxed{Chief of Protocol", "Chief of Protocol", 0),  # no end
    (r"\boxed 7$ and so on", "7", 1),
    (r"\boxed{1} or \boxed 2$", "2", 1),
    (r"\boxed 2$ or \boxed{1}", "1", 0),  # wherever "\boxed " stands, it is what counts
    (r"\boxed{{a}b}", "{a}b", 1),
    (r"\boxed{\boxed{a}}", "a", 1),
    (r"\fbox{a}", "a", 0),
    (r"\boxed{\left(1, 2\right)}", "(1,2)", 1),
    (r"\boxed{\dfrac12}", r"\tfrac12", 1),
    (r"\boxed{\frac12}", r"\frac{1}{2}", 0),  # MATH's own check makes these equal
    (r"\boxed{0.5}", "1/2", 0),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{5\text{ cm}}", "5", 0),
    (r"\boxed{ .gh}", ".gh", 0),  # " ." becomes " 0." inside a text, and not at its beginning
    (r"\boxed{.gh}", ".gh", 1),
    (r"\boxed{a" + "\n" + "b}", "ab", 1),
    (r"\boxed{}", "", 1),
    (r"\boxed{Yes}" + "x" * 289, "yes", 1),  # 300 characters
    (r"\boxed{Yes}" + "x" * 290, "yes", 0),
]


@pytest.mark.parametrize(("reply", "gold", "score"), PUBLISHED)
def test_equality_is_the_published_one(reply, gold, score):
    assert boxed.equality(reply, [gold]) == bool(score)


def test_any_gold_answer_will_do():
    assert boxed.equality(r"\boxed{b}", ["a", "B"])
    assert not boxed.equality(r"\boxed{c}", ["a", "B"])
    assert not boxed.equality(r"\boxed{c}", [])


@pytest.mark.parametrize(
    ("reply", "golds", "right"),
    [
        (r"\boxed{the Chief of Protocol}", ["Chief of Protocol"], True),
        (r"\boxed{Protocol}", ["Chief of Protocol"], True),  # a part is enough, in both directions
        (r"\boxed{US Chief of Protocol, 1969}", ["Chief of Protocol"], True),
        (r"\boxed{Chief}", ["Protocol"], False),
        ("Chief of Protocol", ["Chief of Protocol"], False),  # no box
        (r"\boxed{}", ["a b"], False),
        (r"\boxed{The}", ["a b"], False),  # nothing is left of it; the published script says True
        (r"\boxed{x}" + "y" * 1000, ["x"], True),  # all of the reply is read
        (r"\boxed{b}", ["a1", "b"], True),
        (r"\boxed{anything}", ["The The"], False),  # nothing is left of the gold answer; the published one says True
        (r"\boxed{Anything}", ["A"], False),
        (r"\boxed{the the}", ["The The"], True),
        (r"\boxed{}", ["The The"], False),
    ],
)
def test_sub_em(reply, golds, right):
    assert boxed.sub_em(reply, golds) == right
