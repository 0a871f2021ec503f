"""tau2's reward: each term and their product, by hand."""

import pytest

from jaxagent.envs.tau2 import rewards
from jaxagent.envs.tau2.rows import AGENT, USER, Criteria, ToolUse

PAY = ToolUse(AGENT, "pay", {"amount": 5, "to": "x"})


@pytest.mark.parametrize(
    ("expected", "use", "same"),
    [
        (PAY, ToolUse(AGENT, "pay", {"amount": 5, "to": "x"}), True),
        (PAY, ToolUse(AGENT, "pay", {"amount": 6, "to": "x"}), False),
        (PAY, ToolUse(AGENT, "send", {"amount": 5, "to": "x"}), False),
        (PAY, ToolUse(USER, "pay", {"amount": 5, "to": "x"}), False),
        (PAY, ToolUse(AGENT, "pay", {"amount": 5}), True),  # as published: what the call leaves out is not compared
        (PAY, ToolUse(AGENT, "pay", {}), True),
        (PAY, ToolUse(AGENT, "pay", {"amount": 5, "to": "x", "note": ""}), False),
        (ToolUse(AGENT, "pay", {"amount": 5, "to": "x"}, ("to",)), ToolUse(AGENT, "pay", {"to": "x"}), True),
        (ToolUse(AGENT, "pay", {"amount": 5, "to": "x"}, ("to",)), ToolUse(AGENT, "pay", {"to": "y"}), False),
        (ToolUse(AGENT, "pay", {"amount": 5, "to": "x"}, ("to",)), ToolUse(AGENT, "pay", {}), False),
        (ToolUse(AGENT, "pay", {"amount": 5, "to": "x"}, ()), ToolUse(AGENT, "pay", {"to": "y"}), True),
        (ToolUse(USER, "look", {}), ToolUse(USER, "look", {}), True),
    ],
)
def test_is_made(expected, use, same):
    assert rewards.is_made(expected, use) is same


def test_each_action_must_be_made_in_any_order():
    one, two = ToolUse(AGENT, "one", {}), ToolUse(USER, "two", {})
    made = [ToolUse(USER, "two", {}), ToolUse(AGENT, "three", {}), ToolUse(AGENT, "one", {})]
    assert rewards.actions_made((one, two), made)
    assert not rewards.actions_made((one, two), made[1:])
    assert rewards.actions_made((), [])


def test_communicated():
    said = ["It costs $1,234.50 today.", "Made of Cotton."]
    assert rewards.communicated(["1234.5", "cotton"], said)
    assert not rewards.communicated(["1,234.5"], said)  # commas are taken out of what the agent says alone
    assert not rewards.communicated(["today. made"], said)  # one message must hold it
    assert not rewards.communicated(["cotton", "wool"], said)  # every text must be said
    assert rewards.communicated([], [])


def judged(basis, **changes):
    """The terms of an episode in which all is well, but for the changes."""
    criteria = Criteria((PAY,), None, ("cotton",), ("The agent was kind.",), tuple(basis))
    facts = {"same_state": True, "assertions": [True], "calls": [ToolUse(AGENT, "pay", dict(PAY.arguments))]}
    facts |= {"agent_texts": ["cotton"], "judge_holds": True, **changes}
    return rewards.terms(changes.pop("criteria", criteria), **{k: v for k, v in facts.items() if k != "criteria"})


ALL = ("DB", "COMMUNICATE", "ACTION", "ENV_ASSERTION", "NL_ASSERTION")


def test_the_product_of_the_basis():
    assert judged(ALL) == dict.fromkeys(("db", "communicate", "action", "env_assertion", "nl_assertion"), 1.0)
    assert rewards.reward(judged(ALL)) == 1.0
    failures = {
        "DB": {"same_state": False},
        "COMMUNICATE": {"agent_texts": ["wool"]},
        "ACTION": {"calls": []},
        "ENV_ASSERTION": {"assertions": [True, False]},
        "NL_ASSERTION": {"judge_holds": False},
    }
    for name, change in failures.items():
        assert rewards.reward(judged(ALL, **change)) == 0.0
        assert judged(ALL, **change)[name.lower()] == 0.0
        others = [one for one in ALL if one != name]
        assert rewards.reward(judged(others, **change)) == 1.0  # what the basis does not name does not count
    assert rewards.reward(judged(())) == 1.0


def test_an_assertion_that_nobody_judged_is_left_out():
    assert judged(("DB", "NL_ASSERTION"), judge_holds=None) == {"db": 1.0}
    nothing = Criteria(actions=(), nl_assertions=(), reward_basis=("DB", "NL_ASSERTION"))
    assert judged((), judge_holds=None, criteria=nothing) == {"db": 1.0, "nl_assertion": 1.0}


def test_without_actions_and_assertions_no_state_is_compared():
    nothing = Criteria(reward_basis=("DB",))
    assert judged((), same_state=False, criteria=nothing) == {"db": 1.0}
    assert judged((), same_state=False, criteria=Criteria(actions=(), reward_basis=("DB",))) == {"db": 0.0}
    assert judged((), same_state=False, criteria=Criteria(env_assertions=(), reward_basis=("DB",))) == {"db": 0.0}
