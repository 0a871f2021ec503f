"""How an episode of tau2-bench is judged: one term for each entry of the task's reward basis, and their product.

  DB             both stores are as the task's actions leave them
  COMMUNICATE    every wanted text stands in something that the agent said
  ACTION         every one of the task's actions was made
  ENV_ASSERTION  every assertion about the world holds
  NL_ASSERTION   a judge finds every statement about the conversation true

Only an episode that the user ends is judged; any other that is no failure has a reward of 0. A task without criteria
is solved by whoever gets so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from jaxagent.envs.cast import Talk
from jaxagent.envs.judging import ask_judge
from jaxagent.envs.tau2.rows import Criteria, ToolUse
from jaxagent.rewards.judge import Item, Rubric

JUDGED_CHARS = 60_000  # of the conversation: what is longer is cut in its middle


def is_made(expected: ToolUse, use: ToolUse) -> bool:
    """Whether a call is the expected one.

    As published, the arguments that count are, unless the task names them, those of the *call*: so one without
    arguments is every call of its tool. The published rule does not ask who called; here both must be of one side,
    which differs only where the agent calls a tool of the user's, or the user one of the agent's.
    """
    if (expected.requestor, expected.name) != (use.requestor, use.name):
        return False
    compared = use.arguments if expected.compare_args is None else expected.compare_args
    return _only(expected.arguments, compared) == _only(use.arguments, compared)


def actions_made(expected: Iterable[ToolUse], calls: Sequence[ToolUse]) -> bool:
    """ACTION: whether each expected call is among those that were made, whatever came of it and in any order."""
    return all(any(is_made(action, use) for use in calls) for action in expected)


def communicated(texts: Iterable[str], agent_texts: Sequence[str]) -> bool:
    """COMMUNICATE: whether each text stands in one message of the agent's; case does not count, and neither do commas
    in what the agent says."""
    plain = [message.lower().replace(",", "") for message in agent_texts]
    return all(any(text.lower() in message for message in plain) for text in texts)


def terms(
    criteria: Criteria,
    *,
    same_state: bool,
    assertions: Iterable[bool],
    calls: Sequence[ToolUse],
    agent_texts: Sequence[str],
    judge_holds: bool | None,
) -> dict[str, float]:
    """The terms of the reward.

    Args:
      criteria: of the task.
      same_state: whether both stores are as the task's actions leave them.
      assertions: for each assertion whether it holds.
      calls: all calls, of the agent and of the user, those of the history too.
      agent_texts: what the agent said to the user, in the history too.
      judge_holds: what the judge says; None = nobody was asked, and the term is left out.

    Returns:
      "db", "communicate", ...: 0.0 or 1.0 for each entry of the basis.
    """
    unjudged = criteria.actions is None and criteria.env_assertions is None  # then no state is compared, as published
    holds: dict[str, bool | None] = {
        "DB": unjudged or same_state,
        "COMMUNICATE": communicated(criteria.communicate_info, agent_texts),
        "ACTION": actions_made(criteria.actions or (), calls),
        "ENV_ASSERTION": all(assertions),
        "NL_ASSERTION": True if not criteria.nl_assertions else judge_holds,
    }
    values = {name.lower(): holds[name] for name in criteria.reward_basis}
    return {name: float(value) for name, value in values.items() if value is not None}


def reward(parts: Mapping[str, float]) -> float:
    """The product."""
    return math.prod(parts.values())


def _only(arguments: Mapping[str, object], names: Iterable[str]) -> dict[str, object]:
    return {name: arguments[name] for name in names if name in arguments}


async def holds_by_judge(talk: Talk, assertions: Sequence[str], conversation: str) -> bool:
    """NL_ASSERTION: whether all statements are true of the conversation, says the judge. Raises as `ask_judge`."""
    questions = (f"1 if this is true of the conversation, 0 if it is not: {statement}" for statement in assertions)
    rubric = Rubric(tuple(Item(f"statement_{i}", statement) for i, statement in enumerate(questions, 1)), low=0, high=1)
    return all((await ask_judge(talk, rubric, {"conversation": conversation}, JUDGED_CHARS)).values())
