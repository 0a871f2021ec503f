"""What a change is worth: whether it resolves the task, or how near it comes to the oracle's (SWE-RL).

SWE-RL (arXiv 2502.18449) compares texts and runs no tests: -1 for an answer of a wrong format, else the mean over files
of difflib's ratio between the predicted and the oracle's change of the file, where a file that only one of them changes
counts 0. Its policy writes search/replace blocks (`of_search_replace`); an agent leaves a patch (`of_patches`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from jaxagent.envs.coding import patches

WRONG_FORMAT = -1.0
MAX_CHARS = 20_000  # of one file's change: difflib takes quadratic time; what is longer counts as unlike
_TAGS = ("<think>", "</think>", "<solution>", "</solution>")
_BLOCK = re.compile(r"```.*?\n### (.*)\n<<<<<<< SEARCH\n([\s\S]*?)\n=======\n([\s\S]*?)\n>>>>>>> REPLACE\n```")


def of_patches(predicted: str, oracle: str) -> float:
    """Likeness of two patches in [0, 1], file by file; 1 for two empty ones, as SWE-RL's own function has it."""
    return _likeness(*({c.path: c.hunks for c in patches.split(p) if not c.is_binary} for p in (predicted, oracle)))


def of_search_replace(before: Mapping[str, str], after: Mapping[str, str], answer: str) -> float:
    """SWE-RL's reward of an answer with search/replace blocks.

    Args:
      before: the files that the policy was shown, by path.
      after: those that the oracle changes, as it leaves them.
      answer: <think>...</think><solution>blocks</solution>.

    Returns:
      -1 for a wrong format, which includes blocks that change nothing or whose search text is not there; else the
      likeness to the oracle's change, in [0, 1].
    """
    if any(answer.count(tag) != 1 for tag in _TAGS):
        return WRONG_FORMAT
    thought = answer.split("<think>")[1].split("</think>")[0]
    blocks = _BLOCK.findall(answer.split("<solution>")[1].split("</solution>")[0].strip())
    if not thought.strip() or not blocks:
        return WRONG_FORMAT
    changed: dict[str, str] = {}
    for path, search, replace in blocks:
        content = changed.get(path, "\n" + before.get(path, ""))  # the line end: a search begins where a line does
        if search == replace or "\n" + search not in content:
            return WRONG_FORMAT
        changed[path] = content.replace("\n" + search, "\n" + replace)
    return _likeness(_diffs(before, {path: content[1:] for path, content in changed.items()}), _diffs(before, after))


def _diffs(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The hunks of every file that is not the same."""
    found = {}
    for path, content in after.items():
        lines = before.get(path, "").splitlines(), content.splitlines()
        diff = "\n".join(list(difflib.unified_diff(*lines, lineterm="", n=3))[2:])
        if diff:
            found[path] = diff
    return found


def _likeness(predicted: Mapping[str, str], oracle: Mapping[str, str]) -> float:
    paths = sorted({*predicted, *oracle})
    if not paths:
        return 1.0
    return sum(_ratio(predicted.get(path, ""), oracle.get(path, "")) for path in paths) / len(paths)


def _ratio(predicted: str, oracle: str) -> float:
    if not predicted or not oracle or max(len(predicted), len(oracle)) > MAX_CHARS:
        return 0.0
    return difflib.SequenceMatcher(None, predicted, oracle, autojunk=False).ratio()
