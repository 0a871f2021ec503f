r"""ReSearch: its prompts, its tags and its reward (Chen et al., https://arxiv.org/abs/2503.19470).

    <think> ... </think> <search> query </search> <result>
    ...
    </result> <think> ... </think> <answer> The final answer is \[ \boxed{Accra} \] </answer>

A generation ends with </search> or where the policy ends its message; whatever is no search is the final answer. The
functions repeat the published scores number for number, oddities included. One difference: a search without a query
gets "invalid query", as the published code means it, and no call of the search engine.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jaxagent.config.ranges import ZeroToOne
from jaxagent.envs import tags
from jaxagent.rewards.boxed import last_boxed
from jaxagent.rewards.text import exact_match, normalize_answer, sub_exact_match
from jaxagent.rewards.view import View
from jaxagent.types import StopReason

TAGS = ("<think>", "</think>", "<search>", "</search>", "<result>", "</result>", "<answer>", "</answer>", "\\boxed{")
_HOW = (
    "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags respectively, "
    "and the search query and result are enclosed within <search> </search> and <result> </result> tags respectively. "
    "For example, <think> This is the reasoning process. </think> <search> search query here </search> <result> search "
    "result here </result> <think> This is the reasoning process. </think> <answer> The final answer is \\[ "
    "\\boxed{answer here} \\] </answer>. In the last part of the answer, the final exact answer is enclosed within "
    "\\boxed{} with latex format."
)
SYSTEM = (  # for chat models: the system message, before the question alone
    "You are a helpful assistant that can solve the given question step by step with the help of the wikipedia search "
    "tool. Given a question, you need to first think about the reasoning process in the mind and then provide the "
    "answer. During thinking, you can invoke the wikipedia search tool to search for fact information about specific "
    f"topics if needed. {_HOW}"
)
BASE = (  # for base models: all of the prompt; {question} is replaced
    "A conversation between User and Assistant. The user asks a question, and the assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. During thinking, "
    "the assistant can invoke the wikipedia search tool to search for fact information about specific topics if "
    f"needed. {_HOW} User: {{question}}. Assistant:"
)
_ANSWER, _RESULT = tags.pair("answer"), tags.pair("result")
_CLOSED = ("yes", "no", "noanswer")  # answers that share no words with others
_BOXED = "\\boxed"

Document = tuple[str, str]  # title, text


@dataclasses.dataclass(frozen=True)
class SearchProtocol:
    """How a policy and a search engine speak: which text ends a turn, what is an action, and how results are shown."""

    stop_strings: tuple[str, ...]
    tool_prefixes: tuple[str, ...]  # how each action begins
    tags: tuple[str, ...]  # that a tokenizer trained for a run keeps whole
    parse: Callable[[str], tuple[str, str] | None]  # a turn's text -> ("search" | "answer", content); None = neither
    render: Callable[[Iterable[Document]], str]  # documents, best first -> what follows a search
    write_search: Callable[[str], str]  # for demonstrations: a query -> a turn
    write_answer: Callable[[str], str]  # likewise an answer -> the last turn
    invalid_query: str = ""  # what follows a search for nothing, without asking the engine; "" = it is asked


def parse_action(text: str) -> tuple[str, str]:
    """A search, where the text ends with one, its query the last that was opened; else the final answer."""
    if not text.endswith("</search>"):
        return "answer", text
    before = text[: -len("</search>")]
    at = before.rfind("<search>")
    return "search", before[at + len("<search>") :].strip() if at >= 0 else ""


def render_result(documents: Iterable[Document]) -> str:
    """The <result> block of documents, best first."""
    result = "".join(f"{title}\n{text}\n\n" for title, text in documents).strip()
    return f" <result>\n{result}\n</result>"


PROTOCOL = SearchProtocol(
    stop_strings=("</search>",),
    tool_prefixes=("<search>", "<answer>"),
    tags=TAGS,
    parse=parse_action,
    render=render_result,
    write_search=lambda query: f"<think></think> <search> {query}</search>",
    # A blank before the answer, as before every name in a passage: so it is the same tokens, and can be copied.
    write_answer=lambda answer: f"<think></think> <answer> \\boxed{{ {answer}}}</answer>",
    invalid_query=" <result>\ninvalid query\n</result>",
)


def well_formed(text: str) -> bool:
    r"""Whether the tags are as they should be: <think> in pairs, one <answer> with a \boxed{, results behind searches.

    As published, the order of <think> is free, as is text outside of all tags.
    """
    thoughts = text.count("<think>")
    if thoughts == 0 or thoughts != text.count("</think>"):
        return False
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return False
    at = 0
    while (search := text.find("<search>", at)) >= 0:
        result, search_end = text.find("<result>", search), text.find("</search>", search)
        result_end = text.find("</result>", result)
        if not -1 < search_end < result < result_end:
            return False
        at = result_end
    answer = text[text.find("<answer>") : text.find("</answer>")]  # empty where they stand the wrong way round
    return f"{_BOXED}{{" in answer and "}" in answer


def boxed_answer(text: str) -> str | None:
    r"""What the last \boxed{} of the <answer> holds, as `rewards.boxed` reads it; None where there is none."""
    answers = tags.inside(*_ANSWER, text)
    if not answers:
        return None
    return last_boxed(answers[0])


def f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 of words over the gold answers; "yes", "no" and "noanswer" match nothing but themselves."""
    best = 0.0
    for answer in answers:
        predicted, gold = normalize_answer(prediction), normalize_answer(answer)
        if predicted != gold and (predicted in _CLOSED or gold in _CLOSED):
            continue
        common = (Counter(predicted.split()) & Counter(gold.split())).total()
        if common:
            best = max(best, 2 * common / (len(predicted.split()) + len(gold.split())))
    return best


@dataclasses.dataclass(frozen=True)
class ReSearch:
    """F1 of the boxed answer; `wrong_score` for a wrong answer in the right format; 0 for a wrong format, or no end."""

    wrong_score: ZeroToOne = 0.1

    def __call__(self, view: View) -> dict[str, float]:
        """The trained reward and its components: "em", "f1", "answered", "well_formed", "retrieval_hit"."""
        answers = view.task.answers
        has_end = view.ended is StopReason.ANSWER  # the policy ended its message: the published code wants its EOS
        valid = well_formed(view.response)
        answer = boxed_answer(view.response) if valid and has_end else None
        score = 0.0 if answer is None else f1(answer, answers)
        hit = any(sub_exact_match(block, answers) for block in tags.inside(*_RESULT, view.response))
        return {
            "reward": 0.0 if answer is None else score or self.wrong_score,
            "em": float(answer is not None and exact_match(answer, answers)),
            "f1": score,
            "answered": float(answer is not None),
            "well_formed": float(valid),
            "retrieval_hit": float(hit),
        }
