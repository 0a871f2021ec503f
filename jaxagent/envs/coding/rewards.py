"""What a change is worth: whether it resolves the task, or how near it comes to the oracle's (SWE-RL).

SWE-RL (arXiv 2502.18449) compares texts and runs no tests: -1 for an answer of a wrong format, else the mean over files
of difflib's ratio between the predicted and the oracle's change of the file, where a file that only one of them changes
counts 0. Its policy writes search/replace blocks; an agent here leaves a patch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from jaxagent.envs.coding import patches

WRONG_FORMAT = -1.0
MAX_CHARS = 20_000  # of one file's change: difflib takes quadratic time; what is longer counts as unlike


def of_patches(predicted: str, oracle: str) -> float:
    """Likeness of two patches in [0, 1], file by file; 1 for two empty ones, as SWE-RL's own function has it."""
    return _likeness(*({c.path: c.hunks for c in patches.split(p) if not c.is_binary} for p in (predicted, oracle)))


def _likeness(predicted: Mapping[str, str], oracle: Mapping[str, str]) -> float:
    paths = sorted({*predicted, *oracle})
    if not paths:
        return 1.0
    return sum(_ratio(predicted.get(path, ""), oracle.get(path, "")) for path in paths) / len(paths)


def _ratio(predicted: str, oracle: str) -> float:
    if not predicted or not oracle or max(len(predicted), len(oracle)) > MAX_CHARS:
        return 0.0
    return difflib.SequenceMatcher(None, predicted, oracle, autojunk=False).ratio()
