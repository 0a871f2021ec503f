"""Rows of tau-bench's retail tasks as published: {"index", "metadata": {user_id, instruction, actions, outputs}}.

The task's prompt is the instruction, which only the customer is told; `actions` ({name, kwargs}) and `outputs` are what
the reward is made of. Stored as parquet, all `kwargs` are of one type, in which each action has the arguments of every
tool: those that are None were not given, and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxagent import types
from jaxagent.data import fields
from jaxagent.data.fields import RowError
from jaxagent.envs.forms import TEXT, shaped

_FORM = {"user_id": TEXT, "actions": [{"name": TEXT, "kwargs": dict}], "outputs": [TEXT]}
READING = ("get_", "find_", "list_", "calculate", "think", "transfer_")  # how tools begin that change nothing


def is_published(row: Mapping[str, Any]) -> bool:
    """Whether a row has the published layout."""
    return "index" in row and isinstance(row.get("metadata"), Mapping) and "actions" in row["metadata"]


def to_task(row: Mapping[str, Any]) -> types.Task:
    """Converts and checks a published row. Raises RowError: naming the column."""
    index = fields.get(row, "index")
    if isinstance(index, bool) or not isinstance(index, int):
        raise RowError("index", f"must be a whole number, got {fields.show(index)}")
    metadata = fields.mapping(fields.get(row, "metadata"), "metadata")
    check(metadata, "metadata")
    instruction = fields.text(metadata, "instruction", "metadata.")
    writes = sum(not action["name"].startswith(READING) for action in metadata["actions"])
    kind = f"retail/{('no_write', 'one_write')[writes] if writes < 2 else 'writes'}"
    actions = [{**action, "kwargs": passed_arguments(action)} for action in metadata["actions"]]
    return types.Task(f"retail/{metadata['user_id']}/{index}", instruction, (), kind, {**metadata, "actions": actions})


def passed_arguments(action: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an action. No tool takes None: it stands where Arrow has no value of the argument."""
    return {name: value for name, value in action["kwargs"].items() if value is not None}


def check(metadata: Mapping[str, Any], column: str) -> None:
    """Raises RowError, which names the column, unless the metadata have what the reward is made of."""
    shaped(metadata, _FORM, column, strict=False)
