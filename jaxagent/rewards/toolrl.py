"""ToolRL's reward: format in {0, 1} plus correctness of tool calls in [-3, 3] (https://arxiv.org/abs/2504.13958).

One response against one ground truth of the same layout, e.g.

    <think> ... </think>
    <tool_call>
    {"name": "get_weather", "parameters": {"city": "Paris"}}
    </tool_call>

with one call per line, or a <response> in place of the calls or after them. The scores repeat the published code's
number for number, oddities included; where an oddity matters, the docstring says so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.rewards.view import View
from jaxagent.types import Task

THINK = r"<think>.*?</think>"
CALLS = r"<tool_call>\n.*?\n</tool_call>"
RESPONSE = r"<response>.*?</response>"
TAGS = ("tool_call", "response")
BOUND = 3.0  # published; 1.0 with CORRECTMAX1


def format_score(response: str, truth: str) -> float:
    """1 when the response has the layout of the ground truth, else 0.

    Parts stand in the order think, tool_call, response with one line break between them; those that the truth has
    must be there exactly once. As published, the rest is loose: a further <think> inside the first part passes, and so
    does a tag that the truth lacks, inside a part.
    """
    present = [tag for tag in TAGS if f"<{tag}>" in truth]
    # Counted first: with each tag once the pattern below cannot backtrack over many candidates.
    if any(response.count(f"<{tag}>") != 1 or response.count(f"</{tag}>") != 1 for tag in present):
        return 0.0
    layout = "\n".join([THINK, *({"tool_call": CALLS, "response": RESPONSE}[tag] for tag in present)])
    return float(re.fullmatch(layout, response, re.DOTALL) is not None)


def correctness_score(response: str, truth_calls: Sequence[dict[str, Any]], bound: float = BOUND) -> float:
    """How well the response's calls match, in [-bound, bound]: -bound for calls that cannot be parsed.

    An equal list gets `bound`. Otherwise score = J(tool names) + the sum over true calls of the best unused call of the
    same name, J(parameter names) + the number of equal values; the most possible is 1 + the sum of (1 + parameters);
    the result is 2 bound score / most - bound. J is the overlap of two multisets, intersection over union. As
    published, only an equal list is punished for nothing: calls too many cost by the names' J alone.
    """
    try:
        return _correctness(parse_calls(response), truth_calls, bound)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return -bound  # no calls, no JSON, or JSON of another form where the form was needed


def _correctness(calls: list[Any], truth_calls: Sequence[dict[str, Any]], bound: float) -> float:
    if calls == list(truth_calls):
        return bound
    score = overlap([call["name"] for call in truth_calls], [call["name"] for call in calls])
    most, unused = 1.0, list(calls)
    for truth in truth_calls:
        most += 1.0 + len(truth["parameters"])
        # Parameters are read only of calls with the right name: elsewhere their form does not matter.
        scores = [_call_score(call, truth) if call["name"] == truth["name"] else 0.0 for call in unused]
        best = max(scores, default=0.0)
        if best > 0.0:
            score += best
            del unused[scores.index(best)]
    return 2.0 * bound * score / most - bound


def _call_score(call: dict[str, Any], truth: dict[str, Any]) -> float:
    found, wanted = call["parameters"], truth["parameters"]
    names = overlap(list(wanted.keys()), list(found.keys()))
    return names + sum(1.0 for name, value in wanted.items() if name in found and found[name] == value)


def overlap(a: Sequence[str], b: Sequence[str]) -> float:
    """Size of the multiset intersection over that of the union, in [0, 1]; two empty ones overlap fully."""
    if list(a) == list(b):
        return 1.0
    common = (Counter(a) & Counter(b)).total()
    return common / (len(a) + len(b) - common)


def parse_calls(text: str) -> list[Any]:
    """The JSON values, one per line, of the first <tool_call>. Nothing is promised about their form.

    Raises:
      ValueError: a tag is missing or a line is not JSON.
      RecursionError: a line nests too deeply.
    """
    if "<tool_call>" not in text or "</tool_call>" not in text:
        raise ValueError("no tool call")
    block = text.split("<tool_call>")[1].split("</tool_call>")[0]
    return [json.loads(line) for line in block.strip().split("\n")]


def truth_calls(task_id: str, truth: str) -> list[dict[str, Any]]:
    """The calls of a ground truth; none when it has no <tool_call>.

    Raises:
      ConfigError: they are not JSON objects with a name and parameters.
    """
    if "<tool_call>" not in truth:
        return []
    try:
        calls = parse_calls(truth)
    except (ValueError, RecursionError) as failure:
        raise ConfigError(f"task '{task_id}': the ground truth's tool calls are not JSON ({failure})") from failure
    for call in calls:
        form = isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("parameters"), dict)
        if not form:
            raise ConfigError(f"task '{task_id}': the ground truth's tool calls need a name and parameters, not {call}")
    return calls


def score(response: str, truth: str, task_id: str = "", bound: float = BOUND) -> dict[str, float]:
    """Total, format and correctness.

    Args:
      response: the policy's text without end-of-sequence marks and white space around it.
      truth: the ground truth in the same layout. Without <tool_call> correctness is 0, whatever the response calls.
      task_id: for the error message of a broken ground truth.
      bound: of correctness.
    """
    calls = truth_calls(task_id, truth)
    parts = {
        "format": format_score(response, truth),
        "correctness": correctness_score(response, calls, bound) if calls else 0.0,
    }
    return {"reward": parts["format"] + parts["correctness"], **parts}


def toolrl(view: View, bound: float = BOUND) -> dict[str, float]:
    """`score` of the last action against the task's first gold answer, in [-bound, 1 + bound]."""
    return score(view.final_action.strip(), _truth(view.task), view.task.id, bound)


def _truth(task: Task) -> str:
    if not task.answers:
        raise ConfigError(f"task '{task.id}' has no ground truth among its answers")
    return task.answers[0]
