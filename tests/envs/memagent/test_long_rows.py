"""MemAgent's and RULER-HQA's rows against rows written by hand, and the column that a malformed row is blamed on."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from jaxagent.config import ConfigError
from jaxagent.data import rows, sources
from jaxagent.types import Task

MEMAGENT = {
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "Who is it?"}],
    "context": "Document 1:\nA\nB. C.",
    "ability": "memory",
    "reward_model": {"style": "rule", "ground_truth": ["X", "Y"]},
    "extra_info": {"index": 7, "question": "Who is it?", "num_docs": 200},
}
RULER = {"context": "Document 1:\nA", "input": "Who? ", "answers": ["X"], "num_docs": 50, "index": 3}


def test_the_two_layouts():
    assert rows.to_task(MEMAGENT, True) == Task(
        "hotpotqa/7", "Who is it?", ("X", "Y"), "hotpotqa", {"context": MEMAGENT["context"], "num_docs": 200}
    )
    assert rows.to_task(RULER, True) == Task(
        "ruler_hqa/3", "Who?", ("X",), "ruler_hqa", {"context": "Document 1:\nA", "num_docs": 50}
    )


def test_a_question_that_stands_in_the_prompt_alone():
    row = MEMAGENT | {"extra_info": {"index": 0}}
    assert rows.to_task(row, True).prompt == "Who is it?"


def test_rows_without_a_number_have_different_ids():
    row = {k: v for k, v in RULER.items() if k in ("context", "input", "answers")}
    ids = {rows.to_task(row | changes, True).id for changes in ({}, {"input": "Where?"}, {"context": "Document 2"})}
    assert len(ids) == 3 and all(id.startswith("ruler_hqa/") for id in ids)
    assert rows.to_task(row, True) == rows.to_task(dict(row), True)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (MEMAGENT | {"context": " "}, "context"),
        (MEMAGENT | {"data_source": ""}, "data_source"),
        (MEMAGENT | {"extra_info": {"question": "q"}}, "extra_info.index"),
        (MEMAGENT | {"reward_model": {"style": "rule"}}, "reward_model.ground_truth"),
        (MEMAGENT | {"reward_model": {"ground_truth": [""]}}, "reward_model.ground_truth[0]"),
        (MEMAGENT | {"reward_model": {"ground_truth": []}}, "reward_model.ground_truth"),
        (MEMAGENT | {"extra_info": {"index": 1, "num_docs": "many"}}, "extra_info.num_docs"),
        (MEMAGENT | {"extra_info": {"index": [1]}}, "extra_info.index"),
        (MEMAGENT | {"extra_info": {"index": True}}, "extra_info.index"),
        (MEMAGENT | {"context": None}, "context"),  # and not as another layout's
        ({k: v for k, v in MEMAGENT.items() if k != "context"}, "context"),
        (RULER | {"index": {"a": 1}}, "index"),
        (RULER | {"num_docs": "50"}, "num_docs"),
        (MEMAGENT | {"extra_info": {"index": 1}, "prompt": []}, "prompt"),
        (MEMAGENT | {"extra_info": {"index": 1}, "prompt": [{"role": "user"}]}, "prompt[0].content"),
        (RULER | {"answers": {"text": "X"}}, "answers"),
        (RULER | {"answers": []}, "answers"),
        (RULER | {"input": ""}, "input"),
        ({k: v for k, v in RULER.items() if k != "answers"}, "answers"),
    ],
)
def test_a_malformed_row_is_blamed_on_its_column(row, column, tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps(RULER | {"index": 99}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ConfigError) as refused:
        sources.load_tasks(tmp_path / "test.jsonl")
    assert str(refused.value).startswith(f"{tmp_path / 'test.jsonl'}, line 2: column '{column}'")


def test_the_parquet_that_is_published(tmp_path):
    second = MEMAGENT | {"extra_info": {"index": 8, "question": "And she?", "num_docs": 200}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([MEMAGENT, second]), tmp_path / "train.parquet")
    found = sources.load_tasks(tmp_path / "train.parquet")
    assert [task.prompt for task in found] == ["Who is it?", "And she?"]
    assert found[0] == rows.to_task(MEMAGENT, True)
