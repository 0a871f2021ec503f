"""One raw row of a data file -> one `types.Task`, or a `RowError` that names the column at fault.

The layouts, by the names that `data.layout` gives them, and the columns that they are known by:
  ours:       prompt, answers [str], id and kind (optional), metadata (optional: an object, or the JSON text of one)
  verl:       data_source, prompt [{role, content}], reward_model {ground_truth}, extra_info {split, index}: what
              Search-R1's and verl's scripts write; Search-R1's has ground_truth {target [str]}
  toolrl:     as verl's, with data_source "rlla": `envs.toolcalls.rows`
  flashrag:   id, question, golden_answers [str], optionally data_source: the raw question-answering sets
  long_text:  MemAgent's and RULER-HQA's, whose column `context` is a text: `envs.memagent.rows`
  software:   SWE-bench, SWE-Gym, R2E, slime and Polar: `envs.coding.rows`
  tau_bench:  index, metadata {user_id, instruction, actions, outputs}: `envs.tau.rows`
  tau2:       tau2-bench's tasks, with `user_scenario`: `envs.tau2.rows`
  nemo_gym:   NeMo-Gym's, with `responses_create_params`: `envs.nemo_gym.rows`
  kernelbench: level, name, code with `class Model`: `envs.speedup.rows`

A row with an id of its own, prompt and answers is ours, whatever else it has. Columns that a layout does not know go
to the task's metadata under their own names, where a reward finds them. What stands before the last user message of a
prompt goes to `metadata["earlier_messages"]`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxagent import config, types
from jaxagent.config import Columns, nearest
from jaxagent.data import fields
from jaxagent.data.fields import RowError

TASK_COLUMNS = ("id", "prompt", "answers", "kind", "metadata")
_NEAR = {"kind": ("kinds", "iknd", "knid", "kidn")}  # of short names not all that is a letter off: "find" is a word
_SEARCH_R1 = "Answer the given question"  # how Search-R1's rendered prompt begins
_QUESTION_MARK = "Question:"  # what stands before the question in it
_GSM8K = re.compile(r"(?:.*\n)?#### *([-+$]?[\d.,/%]*\d%?)\s*", re.DOTALL)  # a solution that ends with its number
_SEARCH_R1_TOO = ("id", "question", "golden_answers", "metadata")  # columns of FlashRAG's that its script leaves there
_KNOWN = {  # columns that are read, or left out for good; of "ours" all are
    "verl": fields.VERL_COLUMNS,
    "flashrag": (*_SEARCH_R1_TOO, "data_source"),
}
# A layout that one environment's tasks are published in -> the module beside that environment which reads it. It has
# is_published(row), to_task(row), and COLUMNS where it does not read all columns.
LAYOUTS = {
    "toolrl": "jaxagent.envs.toolcalls.rows",
    "long_text": "jaxagent.envs.memagent.rows",
    "software": "jaxagent.envs.coding.rows",
    "tau_bench": "jaxagent.envs.tau.rows",
    "tau2": "jaxagent.envs.tau2.rows",
    "nemo_gym": "jaxagent.envs.nemo_gym.rows",
    "kernelbench": "jaxagent.envs.speedup.rows",
}
# A key of our own rows' metadata -> the module whose check(value, column) its value must pass.
_IN_METADATA = {"coding": "jaxagent.envs.coding.rows", "tau2": "jaxagent.envs.tau2.rows"}
_VERL_AND_MORE = ("toolrl", "long_text")  # verl's columns, and what tells them from any other of verl's rows


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the rows of a source are read."""

    layout: str = "auto"  # "ours", "verl", "flashrag" or a name of `LAYOUTS`; "auto" = the one whose columns a row has
    columns: Columns | None = None  # what other people call the columns of our layout; None: our own names
    messages: bool = True  # whether who plays begins with the messages before the last one; else such a row is refused


AS_IT_IS = Reading()


class LeftOut(config.ConfigError):
    """A published row without a question: a source goes on without it, and says so."""


def to_task(row: Mapping[str, Any], need_answers: bool, how: Reading = AS_IT_IS, made_id: str = "") -> types.Task:
    """Converts and checks one row of plain Python values, strings decoded.

    `need_answers`: refuse a row without a gold answer, whose reward could only ever be 0. `made_id`: "split/number",
    the id of a row that has none, of verl's for what extra_info lacks; "" refuses it. Raises RowError: a column is
    missing, empty, of the wrong type or unknown; or the row has several layouts.
    """
    if not isinstance(row, Mapping):
        raise RowError("*", f"a row must be an object with columns, got {fields.show(row)}")
    row = {name: value for name, value in row.items() if not fields.missing(value)}
    named = dataclasses.asdict(how.columns) if how.columns else {}
    if renamed := {name: theirs for name, theirs in named.items() if theirs}:
        row = _renamed(row, renamed)
    layout = "ours" if renamed else how.layout
    layout = _layout_of(row) if layout == "auto" else layout
    if layout in LAYOUTS:
        module = importlib.import_module(LAYOUTS[layout])
        task, columns = module.to_task(row), getattr(module, "COLUMNS", row)
    else:
        task, columns = GENERAL[layout](row, made_id), _KNOWN.get(layout, row)
    if layout == "verl" and isinstance(row["reward_model"]["ground_truth"], Mapping):
        columns = (*columns, *_SEARCH_R1_TOO)
    if others := {name: value for name, value in row.items() if name not in columns and value is not None}:
        task = dataclasses.replace(task, metadata=_joined(task.metadata, others))
    if need_answers and not task.answers:
        raise RowError(_answer_column(row, layout), "no gold answer")
    if not how.messages and (earlier := task.metadata.get(fields.MESSAGES)):
        roles = ", ".join(str(m.get("role")) for m in earlier) if isinstance(earlier, list) else "others"
        raise RowError(
            "prompt", f"this environment takes one question, and would lose the messages before it ({roles})"
        )
    return task


def _layout_of(row: Mapping[str, Any]) -> str:
    """The one layout that a row has: ours where it has an id of its own and is complete, or where it is no other."""
    possible = [name for name, columns in _MARKS.items() if all(column in row for column in columns)]
    if row.get("id") is not None and "ours" in possible:
        return "ours"
    possible += [name for name, path in LAYOUTS.items() if importlib.import_module(path).is_published(row)]
    less = ("verl", "flashrag") if set(possible) & set(_VERL_AND_MORE) else ("flashrag",) if "verl" in possible else ()
    possible = [name for name in possible if name not in less]
    if len(possible) > 1:
        raise RowError("*", f"the row can be read as {' and as '.join(possible)}: say which with data.layout")
    return possible[0] if possible else "ours"


def _renamed(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A row under our names. Of a solution as GSM8K writes it the answer is the number behind "####"."""
    for name, theirs in names.items():
        if theirs not in row:
            advice = nearest(theirs, list(map(str, row)))
            raise RowError(theirs, f"missing, and data.columns.{name} names it. {advice.rstrip('.')}")
    ours_row = {ours: row[theirs] for ours, theirs in names.items()}
    ours_row |= {name: value for name, value in row.items() if name not in names.values() and name not in ours_row}
    if "answers" in names and (match := _GSM8K.fullmatch(str(ours_row["answers"]))):
        ours_row["answers"] = re.sub(r"(?<=\d),(?=\d{3})", "", match[1])
    return ours_row


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


def _ours(row: Mapping[str, Any], made_id: str = "") -> types.Task:
    metadata = fields.json_object(row.get("metadata"))
    others = {name: value for name, value in row.items() if name not in TASK_COLUMNS}
    for name in others:
        if meant := next((column for column in TASK_COLUMNS if column not in row and _looks_like(name, column)), ""):
            raise RowError(str(name), f"unknown; did you mean '{meant}'? data.columns.{meant}={name} says so")
    prompt, earlier = fields.conversation(fields.get(row, "prompt"))
    metadata = _joined(metadata, others | earlier)
    for name in metadata.keys() & _IN_METADATA.keys():
        importlib.import_module(_IN_METADATA[name]).check(metadata[name], f"metadata.{name}")
    return types.Task(
        prompt=prompt,
        answers=fields.answers(fields.get(row, "answers"), "answers"),
        id=made_id if made_id and row.get("id") is None else fields.label(row, "id"),
        kind=fields.label(row, "kind", empty=True) if row.get("kind") is not None else "",
        metadata=metadata,
    )


def _looks_like(name: Any, column: str) -> bool:
    """Whether a name is probably a column's, written wrongly: other capitals, a beginning of it, or a letter off."""
    name = str(name).casefold()
    if name == column or len(column) < 5:
        return name == column or name in _NEAR.get(column, ())
    if len(name) >= 4 and column.startswith(name):
        return True
    same = next((i for i, (a, b) in enumerate(zip(name, column, strict=False)) if a != b), min(len(name), len(column)))
    rest, column_rest = name[same:], column[same:]
    return rest[1:] == column_rest[1:] or rest[1:] == column_rest or rest == column_rest[1:]


def _joined(metadata: Mapping[str, Any], others: Mapping[str, Any]) -> Mapping[str, Any]:
    """Metadata with further columns, none of which may have a name that is taken by something else."""
    for name, value in others.items():
        if name in metadata and metadata[name] != value:
            raise RowError(str(name), "stands in the row's metadata, too, with another value: leave one out")
    return {**metadata, **others} if others else metadata


def _verl(row: Mapping[str, Any], made_id: str = "") -> types.Task:
    source = fields.text(row, "data_source")
    extra = fields.mapping({} if row.get("extra_info") is None else row["extra_info"], "extra_info")
    extra = {name: value for name, value in extra.items() if value is not None}
    place = dict(zip(("split", "index"), made_id.rsplit("/", 1), strict=False) if made_id else ()) | extra
    for column in ("split", "index"):
        if column not in place:
            raise RowError(f"extra_info.{column}", "missing; the task's id is made of it")
    model = fields.mapping(fields.get(row, "reward_model"), "reward_model")
    truth = fields.get(model, "ground_truth", "reward_model.")
    rest = {name: value for name, value in model.items() if name not in ("ground_truth", "style") and value is not None}
    if searched := isinstance(truth, Mapping):  # Search-R1's own; verl's others, such as its GSM8K, have a text
        column = "reward_model.ground_truth.target"
        if beside := {name: value for name, value in truth.items() if name != "target" and value is not None}:
            rest["ground_truth"] = beside
        truth = fields.get(truth, "target", "reward_model.ground_truth.")
    else:
        column = "reward_model.ground_truth"
    answers = (truth,) if isinstance(truth, str) and truth else fields.answers(truth, column)
    prompt, earlier = _question(row) if searched else fields.conversation(fields.get(row, "prompt"))
    return types.Task(
        id=f"{source}/{place['split']}/{place['index']}",
        prompt=prompt.strip(),
        answers=answers,
        kind=source,
        metadata=_joined(extra, earlier | ({"reward_model": rest} if rest else {})),
    )


def _question(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Of Search-R1's rows: the column `question`, or what its template has behind its "Question:"."""
    if row.get("question"):
        return as_question(fields.text(row, "question")), {}
    if isinstance(prompt := fields.get(row, "prompt"), str):
        raise RowError("prompt", f"must be a list of {{role, content}} messages, got {fields.show(prompt)}")
    text, earlier = fields.conversation(prompt)
    if earlier or not text.lstrip().startswith(_SEARCH_R1) or _QUESTION_MARK not in text:
        return text, earlier  # of somebody else, who means all of it
    question = text.partition(_QUESTION_MARK)[2].strip()
    if not question:
        raise RowError("prompt[-1].content", f"nothing after '{_QUESTION_MARK}'")
    return as_question(question), {}


def _flashrag(row: Mapping[str, Any], made_id: str = "") -> types.Task:
    source = fields.text(row, "data_source") if row.get("data_source") else ""
    name = fields.label(row, "id")
    return types.Task(
        id=f"{source}/{name}" if source else name,
        prompt=as_question(fields.text(row, "question")),
        answers=fields.answers(fields.get(row, "golden_answers"), "golden_answers"),
        kind=source,
        metadata=fields.json_object(row.get("metadata")),
    )


def as_question(text: str) -> str:
    """Search-R1's clean-up: surrounding space off, and a question mark at the end."""
    text = text.strip()
    return text if text.endswith("?") else text + "?"


GENERAL = {"ours": _ours, "verl": _verl, "flashrag": _flashrag}
_MARKS = {"ours": ("prompt", "answers"), "verl": ("reward_model",), "flashrag": ("golden_answers",)}


def _answer_column(row: Mapping[str, Any], layout: str) -> str:
    if layout != "ours" and "reward_model" in row:
        return "reward_model.ground_truth"
    return "golden_answers" if layout == "flashrag" else "answers"


def check(
    row: Any, place: str, need_answers: bool, how: Reading = AS_IT_IS, made_id: str = "", not_given: Any = None
) -> types.Task:
    """`to_task`, which turns a failure into one line for the user. `not_given` makes the metadata `fields.plain`.

    Raises:
      LeftOut: the row is one that its publisher left without a question.
      config.ConfigError: naming `place` (file and row) and the column.
    """
    try:
        task = to_task(row, need_answers, how, made_id)
        return task if not_given is None else dataclasses.replace(task, metadata=fields.plain(task.metadata, not_given))
    except RecursionError:
        raise config.ConfigError(f"{place}: column 'metadata': is nested too deeply to be written as JSON.") from None
    except RowError as error:
        kind = LeftOut if isinstance(error, fields.EmptyRow) else config.ConfigError
        raise kind(f"{place}: {error}.") from None


def row_to_store(task: types.Task, place: str) -> dict[str, Any]:
    """`to_row`, which turns a failure into a ConfigError that names `place` (file and row) and the column."""
    try:
        return to_row(task)
    except RowError as error:
        raise config.ConfigError(f"{place}: {error}.") from None
