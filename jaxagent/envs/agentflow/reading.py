r"""What is read out of the texts of a planner, an executor, a verifier, a coder and a judge. Pure functions.

    planner, next step    ... Context: ... Sub-Goal: ... Tool Name: ...     the last such block counts
    executor              execution = tool.execute(query="...")               the last call counts, in any quotes
    verifier              ... Conclusion: STOP, or CONTINUE                 the last word counts, none is CONTINUE
    coder                 a ```python block, the first one; else all of it
    judge                 ... VERDICT: True, or False                       the last word counts
    planner, final output \boxed{...}, or <answer>...</answer>              the last one counts

The published codes read with regular expressions that look through the rest of a text once for every word "Context:" in
it. Of texts of the published form these functions find what those find, in time that grows with the text and no faster:
a planner that has come to repeat one word must not stop the loop that all episodes share.
"""

from __future__ import annotations

import re
from typing import Literal

from jaxagent.envs import tags
from jaxagent.envs.python import formats
from jaxagent.rewards import maths

PYTHON = "Python_Code_Generator_Tool"
GENERATOR = "Generalist_Solution_Generator_Tool"
NAMES = {  # every published name of a tool, in lower case with "_"
    "python_code_generator_tool": PYTHON,
    "python_coder_tool": PYTHON,
    "python_coder": PYTHON,
    "generalist_solution_generator_tool": GENERATOR,
    "base_generator_tool": GENERATOR,
    "base_generator": GENERATOR,
}
Answer = Literal["boxed", "tags"]
_FIELDS = ("Context:", "Sub-Goal:", "Tool Name:")
_SPACE = re.compile(r"\s*")
_CALL = re.compile(r"tool\.execute\(\s{0,20}query\s{0,20}=\s{0,20}(\"\"\"|'''|\"|')")
_ESCAPE = re.compile(r"\\([\"'\\nt])")
_UNESCAPED = {"n": "\n", "t": "\t"}
_CONCLUSION = re.compile(r"conclusion[\s*:]{0,20}(STOP|CONTINUE)\b", re.IGNORECASE)
_VERDICT = re.compile(r"VERDICT[\s*:]{1,20}(True|False)\b", re.IGNORECASE)
_CODE = (re.compile(r"```(?:python|py)?[ \t]*\n"), re.compile("```"))
_ANSWER = tags.pair("answer")


NOTHING = ("", "", "")


def step(text: str) -> tuple[str, str, str]:
    """What the planner wants next: (context, sub-goal, tool's name as written); NOTHING where none can be read.

    It is the last block of Context, Sub-Goal and Tool Name behind the thoughts; ** is read over.
    A block goes from the first field to an empty line behind the tool's name, or to the end.
    """
    text, last_step, at = formats.spoken(text).replace("**", ""), NOTHING, 0
    while True:
        places = []
        for field in _FIELDS:
            start = text.find(field, at)
            if start < 0:
                return last_step
            places.append(start)
            at = start + len(field)
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches
        end = text.find("\n\n", at)
        end = len(text) if end < 0 else end
        name = text[at:end].strip().removesuffix("```").strip()
        context, sub_goal = (text[places[i] + len(_FIELDS[i]) : places[i + 1]].strip() for i in range(len(_FIELDS) - 1))
        last_step, at = (context, sub_goal, name), end


def tool(name: str) -> str | None:
    """The tool that a name stands for, however its words are separated; None for a name of none."""
    return NAMES.get("_".join(re.split("[ _]+", name.strip().strip("`").strip().lower()[:100])))


def query(text: str) -> str | None:
    """The query of the last `tool.execute(query="...")` in a command; None where there is none.

    Nothing is executed: the text between the quotes is taken, with escapes as Python has them.
    """
    calls = list(_CALL.finditer(text[: tags.MAX_CHARS]))
    if not calls:
        return None
    quote, start = calls[-1][1], calls[-1].end()
    end = text.rfind(quote, start)
    if end < start or not text[end + len(quote) :].lstrip(" \t\n,").startswith(")"):
        return None
    return _ESCAPE.sub(lambda match: _UNESCAPED.get(match[1], match[1]), text[start:end])


def conclusion(text: str) -> str | None:
    """ "STOP" or "CONTINUE", the last that a verifier concludes; None where it concludes nothing."""
    conclusions = _CONCLUSION.findall(text[-tags.MAX_CHARS :])
    return conclusions[-1].upper() if conclusions else None


def program(text: str) -> str:
    """The program that a coder wrote: its first code block, or else all that it wrote."""
    blocks = tags.inside(*_CODE, formats.spoken(text))
    return (blocks[0] if blocks else formats.spoken(text)).strip("\n").replace("\0", "")


def verdict(text: str) -> bool | None:
    """A judge's last verdict; None where it gives none."""
    verdicts = _VERDICT.findall(text[-tags.MAX_CHARS :])
    return verdicts[-1].lower() == "true" if verdicts else None


def answer(text: str, style: Answer) -> str | None:
    r"""The final answer behind the thoughts: of the last \boxed{...}, or of the last <answer>...</answer>."""
    text = formats.spoken(text)
    if style == "boxed":
        return maths.last_boxed(text)
    answers = tags.inside(*_ANSWER, text)
    return answers[-1].strip() if answers else None
