"""One raw row of a data file -> one `types.Task`, or a `RowError` that names the column at fault.

Eight layouts are understood, recognised by their columns:
  ours:       id, prompt, answers [str], kind (optional), metadata (optional: a JSON object as text, or a mapping)
  Search-R1:  data_source, prompt [{role, content}], reward_model {ground_truth {target [str]}},
              extra_info {split, index}, often also `question`: the parquet that Search-R1's and verl's scripts write
  ToolRL:     as Search-R1, with data_source "rlla": see `toolcall_rows`
  FlashRAG:   id, question, golden_answers [str], optionally data_source: the raw question-answering sets
  long text:  MemAgent's and RULER-HQA's, whose column `context` is a text: see `long_rows`
  software:   SWE-bench, SWE-Gym, R2E, slime and Polar: see `coding_rows`
  tau-bench:  index, metadata {user_id, instruction, actions, outputs}: see `retail_rows`
  tau2:       tau2-bench's tasks, with `user_scenario`: see `tau2_rows`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxagent import config, types
from jaxagent.data import coding_rows, fields, long_rows, retail_rows, tau2_rows, toolcall_rows
from jaxagent.data.fields import RowError

TASK_COLUMNS = ("id", "prompt", "answers", "kind", "metadata")
_QUESTION_MARK = "Question:"  # what stands before the question in Search-R1's rendered prompt


def to_task(row: Mapping[str, Any], need_answers: bool) -> types.Task:
    """Converts and checks one row.

    Args:
      row: plain Python values, strings decoded.
      need_answers: refuse a row without a gold answer: its reward could only ever be 0.

    Raises:
      RowError: a column is missing, empty or of the wrong type.
    """
    if not isinstance(row, Mapping):
        raise RowError("*", f"a row must be an object with columns, got {fields.show(row)}")
    if long_rows.is_published(row):
        task = long_rows.to_task(row)
    elif toolcall_rows.is_published(row):
        task = toolcall_rows.to_task(row)
    elif "reward_model" in row:
        task = _search_r1(row)
    elif "golden_answers" in row:
        task = _flashrag(row)
    elif retail_rows.is_published(row):
        task = retail_rows.to_task(row)
    elif coding_rows.is_published(row):
        task = coding_rows.to_task(row)
    elif tau2_rows.is_published(row):
        task = tau2_rows.to_task(row)
    else:
        task = _ours(row)
    if need_answers and not task.answers:
        raise RowError(_answer_column(row), "no gold answer")
    return task


def to_row(task: types.Task) -> dict[str, Any]:
    """The inverse for our own layout: what `data_pipelines.write` stores. `metadata` becomes JSON text.

    Raises:
      RowError: the metadata hold what neither this text nor the log of an episode can hold: a date, bytes, NaN, half
        of a surrogate pair.
    """
    try:
        metadata = json.dumps(dict(task.metadata), ensure_ascii=False, sort_keys=True, allow_nan=False)
        metadata.encode()
    except UnicodeEncodeError:
        raise RowError("metadata", "half of a surrogate pair (\\ud800 to \\udfff) in it: it is no text") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError("metadata", f"cannot be written as JSON: {error}") from None
    return {
        "id": task.id,
        "prompt": task.prompt,
        "answers": list(task.answers),
        "kind": task.kind,
        "metadata": metadata,
    }


def _ours(row: Mapping[str, Any]) -> types.Task:
    metadata = fields.json_object(row.get("metadata"))
    if coding_rows.KEY in metadata:
        coding_rows.check(metadata[coding_rows.KEY], f"metadata.{coding_rows.KEY}")
    if tau2_rows.KEY in metadata:
        tau2_rows.parse(metadata[tau2_rows.KEY], f"metadata.{tau2_rows.KEY}.")
    return types.Task(
        id=fields.text(row, "id"),
        prompt=fields.text(row, "prompt"),
        answers=fields.texts(fields.get(row, "answers"), "answers"),
        kind=fields.text(row, "kind", empty=True) if row.get("kind") is not None else "",
        metadata=metadata,
    )


def _search_r1(row: Mapping[str, Any]) -> types.Task:
    source = fields.text(row, "data_source")
    extra = fields.mapping(fields.get(row, "extra_info"), "extra_info")
    for column in ("split", "index"):
        if extra.get(column) is None:
            raise RowError(f"extra_info.{column}", "missing; the task's id is made of it")
    truth = fields.get(fields.mapping(row["reward_model"], "reward_model"), "ground_truth", "reward_model.")
    if searched := isinstance(truth, Mapping):  # Search-R1's own; verl's others, such as its GSM8K, have a text
        column = "reward_model.ground_truth.target"
        truth = fields.get(truth, "target", "reward_model.ground_truth.")
    else:
        column = "reward_model.ground_truth"
    answers = (truth,) if isinstance(truth, str) and truth else fields.texts(truth, column)
    question = fields.text(row, "question") if row.get("question") else _question_of(fields.get(row, "prompt"))
    return types.Task(
        id=f"{source}/{extra['split']}/{extra['index']}",
        prompt=as_question(question) if searched else question.strip(),
        answers=answers,
        kind=source,
        metadata={k: v for k, v in extra.items() if v is not None},
    )


def _flashrag(row: Mapping[str, Any]) -> types.Task:
    source = fields.text(row, "data_source") if row.get("data_source") else ""
    name = fields.text(row, "id")
    return types.Task(
        id=f"{source}/{name}" if source else name,
        prompt=as_question(fields.text(row, "question")),
        answers=fields.texts(row["golden_answers"], "golden_answers"),
        kind=source,
        metadata={},
    )


def as_question(text: str) -> str:
    """Search-R1's clean-up: surrounding space off, and a question mark at the end."""
    text = text.strip()
    return text if text.endswith("?") else text + "?"


def _question_of(messages: Any) -> str:
    """The bare question inside a chat prompt: after the last "Question:" of the last user message, else all of it."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RowError("prompt", f"must be a list of {{role, content}} messages, got {fields.show(messages)}")
    users = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    if not users:
        raise RowError("prompt", "has no message with role 'user'")
    content = fields.text(users[-1], "content", prefix="prompt[user].")
    question = content.rpartition(_QUESTION_MARK)[2].strip()
    if not question:
        raise RowError("prompt[user].content", f"nothing after '{_QUESTION_MARK}'")
    return question


def _answer_column(row: Mapping[str, Any]) -> str:
    if long_rows.is_published(row):
        return long_rows.answer_column(row)
    return next((c for c in ("reward_model", "golden_answers") if c in row), "answers")


def check(row: Any, place: str, need_answers: bool) -> types.Task:
    """`to_task`, which turns a failure into one line for the user.

    Raises:
      config.ConfigError: naming `place` (file and row) and the column.
    """
    try:
        return to_task(row, need_answers)
    except RowError as error:
        raise config.ConfigError(f"{place}: {error}.") from None


def stored(task: types.Task, place: str) -> dict[str, Any]:
    """`to_row`, which turns a failure into one line for the user.

    Raises:
      config.ConfigError: naming `place` (file and row) and the column.
    """
    try:
        return to_row(task)
    except RowError as error:
        raise config.ConfigError(f"{place}: {error}.") from None
