"""Rewards from a test report. Running the tests is the sandbox's work; here a finished report becomes a number.

A test counts when its status is "passed": failed, skipped, errored and absent tests do not, so a policy gains nothing
by skipping or deleting one. A report that does not exist is an error, never 0: it says nothing about the policy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxagent.config import ConfigError
from jaxagent.rewards.view import View
from jaxagent.types import Task

FIELDS = ("fail_to_pass", "pass_to_pass")  # SWE-bench's, also spelled in capitals


def required_tests(task: Task) -> tuple[str, ...]:
    """The tests a task wants: the union of its metadata's fail_to_pass and pass_to_pass, in order.

    Each is a list of names or, as in raw SWE-bench rows, a list encoded as JSON text.

    Raises ConfigError: neither is there, both are empty, or one is not a list of names.
    """
    names: dict[str, None] = {}
    for field in (*FIELDS, *map(str.upper, FIELDS)):
        if field in task.metadata:
            names |= dict.fromkeys(_names(task, field))
    if not names:
        raise ConfigError(f"task '{task.id}' names no tests: its metadata needs fail_to_pass or pass_to_pass")
    return tuple(names)


def _names(task: Task, field: str) -> list[str]:
    value = task.metadata[field]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"task '{task.id}': metadata.{field} must be a list of test names")
    return list(value)


def passed_frac(view: View) -> float:
    """The fraction of the task's tests that passed: a reward with partial credit."""
    if view.tests is None:
        raise ValueError(f"task '{view.task.id}': there is no test report")
    required = required_tests(view.task)
    return sum(view.tests.get(name) == "passed" for name in required) / len(required)


def all_passed(view: View) -> float:
    """1 when every test of the task passed, else 0: SWE-bench's "resolved"."""
    return float(passed_frac(view) == 1.0)
