"""ToolRL's reward: format in {0, 1} plus correctness of tool calls in [-3, 3] (https://arxiv.org/abs/2504.13958).

    ToolRL()(view)                  # -> {"reward": 4.0, "format": 1.0, "correctness": 3.0, "solved": 1.0}

One response against one ground truth of the same layout, e.g.

    <think> ... </think>
    <tool_call>
    {"name": "get_weather", "parameters": {"city": "Paris"}}
    </tool_call>

with one call per line, or a <response> in place of the calls or after them. The scores repeat the published code's
number for number, oddities included; where an oddity matters, the docstring says so. What the published code turns
on by environment variables is a field of `ToolRL`, but for scales that change with the training step (MAX1STEP30MAX3,
SCHEDULEREWARD, SCHEDULELENGTH): an environment does not know the step.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from jaxagent.config import ConfigError
from jaxagent.config.ranges import NonNegativeInt, PositiveFloat
from jaxagent.data.fields import RowError
from jaxagent.envs.toolcalls import rows
from jaxagent.rewards.view import View

THINK = r"<think>.*?</think>"
CALLS = r"<tool_call>\n.*?\n</tool_call>"
RESPONSE = r"<response>.*?</response>"
TAGS = ("tool_call", "response")
BOUND = 3.0
Detail = Literal["parts", "refined", "calls", "coarse"]  # how much of a wrong list of calls is still paid for


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


def correctness_score(
    response: str, truth_calls: Sequence[dict[str, Any]], bound: float = BOUND, detail: Detail = "parts"
) -> float:
    """How well the response's calls match, in [-bound, bound]: -bound for calls that cannot be parsed.

    An equal list gets `bound`. Otherwise score = J(tool names) + the sum over true calls of the best unused call of the
    same name, J(parameter names) + the number of equal values; the most possible is 1 + the sum of (1 + parameters);
    the result is 2 bound score / most - bound. J is the overlap of two multisets, intersection over union. As
    published, only an equal list is punished for nothing: calls too many cost by the names' J alone.

    That is `detail` "parts". "refined" (REFINEDREWARD): J is 1 for equal lists of names, in their order, else 0.
    "calls" (INTERMEDIATEREWARD): a true call is worth 1, and only whole. "coarse" (COARSEREWARD): all or nothing.
    """
    try:
        return _correctness(rows.parse_calls(response), list(truth_calls), bound, detail)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return -bound  # no calls, no JSON, or JSON of another form where the form was needed


def _correctness(calls: list[Any], truth_calls: list[dict[str, Any]], bound: float, detail: Detail) -> float:
    if calls == truth_calls:
        return bound
    if detail == "coarse":
        return -bound
    score = _agreement([call["name"] for call in truth_calls], [call["name"] for call in calls], detail)
    most, unused = 1.0, list(calls)
    for truth in truth_calls:
        most += 1.0 if detail == "calls" else 1.0 + len(truth["parameters"])
        # Parameters are read only of calls with the right name: elsewhere their form does not matter.
        scores = [_call_score(call, truth, detail) if call["name"] == truth["name"] else 0.0 for call in unused]
        best = max(scores, default=0.0)
        if best > 0.0:
            score += best
            del unused[scores.index(best)]
    return 2.0 * bound * score / most - bound


def _call_score(call: dict[str, Any], truth: dict[str, Any], detail: Detail) -> float:
    if detail == "calls":
        return float(call == truth)
    values, true_values = call["parameters"], truth["parameters"]
    names = _agreement(list(true_values.keys()), list(values.keys()), detail)
    return names + sum(1.0 for name, value in true_values.items() if name in values and values[name] == value)


def _agreement(true_names: list[str], names: list[str], detail: Detail) -> float:
    return float(true_names == names) if detail == "refined" else overlap(true_names, names)


def length_score(response: str, words: int) -> float:
    """Words of the last thought as a part of `words`, rounded to hundredths and at most 1; without a thought 0.

    WITHLENGTH of the published code, where `words` is 512.
    """
    if "<think>" not in response or "</think>" not in response:
        return 0.0
    thought = response.split("<think>")[-1].split("</think>")[0]
    return min(round(len(thought.split()) / words, 2), 1.0)


def overlap(a: Sequence[str], b: Sequence[str]) -> float:
    """Size of the multiset intersection over that of the union, in [0, 1]; two empty ones overlap fully."""
    if list(a) == list(b):
        return 1.0
    common = (Counter(a) & Counter(b)).total()
    return common / (len(a) + len(b) - common)


def truth_calls(task_id: str, truth: str) -> list[dict[str, Any]]:
    """The calls of a task's ground truth. Raises ConfigError, which names the task, where they cannot be read."""
    try:
        return rows.truth_calls(truth)
    except RowError as error:
        raise ConfigError(f"task '{task_id}': {error}.") from None


@dataclasses.dataclass(frozen=True)
class ToolRL:
    """What the policy wrote against the task's first gold answer: from -bound to 1 + bound, or 2 + bound with length.

    Also "solved": 1 where format and correctness both have the most that they can have.
    """

    bound: PositiveFloat = BOUND  # of correctness; 1 with the published CORRECTMAX1
    detail: Detail = "parts"  # see `correctness_score`
    length_words: NonNegativeInt = 0  # words of thought for which the most is paid; 0 = length is not paid for

    def __call__(self, view: View) -> dict[str, float]:
        """The reward and its parts. Raises ConfigError: the task has no ground truth, or a broken one."""
        if not view.task.answers:
            raise ConfigError(f"task '{view.task.id}' has no ground truth among its answers")
        return self.score(view.actions.strip(), view.task.answers[0], view.task.id)

    def score(self, response: str, truth: str, task_id: str = "") -> dict[str, float]:
        """The same of texts.

        Args:
          response: the policy's text without end-of-sequence marks and white space around it.
          truth: the ground truth in that layout. Without <tool_call> correctness is 0, whatever the response calls.
          task_id: for the error message of a broken ground truth.
        """
        calls = truth_calls(task_id, truth)
        form = format_score(response, truth)
        correctness = correctness_score(response, calls, self.bound, self.detail) if calls else 0.0
        parts = {"format": form, "correctness": correctness}
        if self.length_words:
            parts["length"] = length_score(response, self.length_words)
        solved = form == 1.0 and (not calls or correctness > self.bound - 1e-9)
        return {"reward": sum(parts.values()), **parts, "solved": float(solved)}
