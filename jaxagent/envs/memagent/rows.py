"""Rows of questions about a long text, in the two published layouts -> `types.Task` with the text as its context.

MemAgent:   data_source, prompt [{role, content}], context, ability, reward_model {style, ground_truth [str]},
            extra_info {index, question, num_docs}: the parquet that its scripts write
RULER-HQA:  context, input, answers [str], often also num_docs and index: eval_50.json, eval_100.json, ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from jaxagent import types
from jaxagent.data import fields
from jaxagent.data.fields import RowError

MEMAGENT, RULER = "reward_model", "input"  # what tells them apart, beside `context`
COLUMNS = (*fields.VERL_COLUMNS, "context", "input", "answers", "num_docs", "index")
ABILITY = "memory"  # of MemAgent's rows, and of no others
_RULER_NAME = "ruler_hqa"


def is_published(row: Mapping[str, Any]) -> bool:
    """Whether a row has one of the two layouts: with a text in a column `context`, or meant to have one."""
    if MEMAGENT in row and row.get("ability") == ABILITY:
        return True
    return isinstance(row.get("context"), str) and (MEMAGENT in row or RULER in row)


def to_task(row: Mapping[str, Any]) -> types.Task:
    """Converts and checks one row. Raises RowError: a column is missing, empty or of the wrong type."""
    return _memagent(row) if MEMAGENT in row else _ruler(row)


def _memagent(row: Mapping[str, Any]) -> types.Task:
    source = fields.text(row, "data_source")
    extra = fields.mapping(fields.get(row, "extra_info"), "extra_info")
    index = fields.label(extra, "index", "extra_info.")
    truth = fields.get(fields.mapping(row[MEMAGENT], MEMAGENT), "ground_truth", f"{MEMAGENT}.")
    question = (
        fields.text(extra, "question", "extra_info.")
        if extra.get("question")
        else fields.conversation(fields.get(row, "prompt"))[0]
    )
    return _task(f"{source}/{index}", question, fields.answers(truth, f"{MEMAGENT}.ground_truth"), source, row, extra)


def _ruler(row: Mapping[str, Any]) -> types.Task:
    question = fields.text(row, RULER)
    answers = fields.answers(fields.get(row, "answers"), "answers")
    digest = hashlib.blake2b(f"{question}\n{fields.get(row, 'context')}".encode(), digest_size=8).hexdigest()
    name = digest if row.get("index") is None else fields.label(row, "index")
    return _task(f"{_RULER_NAME}/{name}", question, answers, _RULER_NAME, row, row)


def _task(
    id: str, question: str, answers: tuple[str, ...], kind: str, row: Mapping[str, Any], numbers: Mapping[str, Any]
) -> types.Task:
    count = numbers.get("num_docs")
    if count is not None and type(count) is not int:
        raise RowError(
            "num_docs" if numbers is row else "extra_info.num_docs", f"must be an integer, got {fields.show(count)}"
        )
    metadata = {"context": fields.text(row, "context")}
    return types.Task(id, question.strip(), answers, kind, metadata | ({} if count is None else {"num_docs": count}))
