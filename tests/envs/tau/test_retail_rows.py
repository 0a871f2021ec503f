"""tau-bench's folder: which files are splits, and rows that are malformed."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxagent.config import ConfigError, DataConfig
from jaxagent.data.sources import load_tasks, open_train_and_held_out

ACTION = {"name": "cancel_pending_order", "kwargs": {"order_id": "#p", "reason": "no longer needed"}}
METADATA = {"user_id": "ann_1", "instruction": "You are Ann.", "actions": [ACTION], "outputs": ["5"]}


def folder_of(path, **rows):
    path.mkdir(exist_ok=True)
    for split in ("train", "dev", "test"):
        found = rows.get(
            split, [{"index": i, "metadata": METADATA | {"instruction": f"{split} {i}"}} for i in range(2)]
        )
        (path / f"retail_{split}_tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (path / "few_shot.jsonl").write_text('{"messages_display": ""}\n')
    (path / "airline_test_tasks.jsonl").write_text("{}\n")
    return path


def test_the_published_folder_is_three_splits(tmp_path):
    folder = folder_of(tmp_path)
    train, held_out = open_train_and_held_out(
        folder, DataConfig(source=None, eval_source="", seed=0, num_eval=2), False
    )
    assert train[1].prompt == "train 1" and held_out[0].prompt == "test 0"
    task = train[1]
    assert task.id == "retail/ann_1/1" and task.kind == "retail/one_write" and task.metadata["actions"] == [ACTION]
    data = DataConfig(source=None, eval_source=str(folder / "retail_dev_tasks.jsonl"), seed=0, num_eval=2)
    assert open_train_and_held_out(folder, data, False)[1][0].prompt == "dev 0"


def test_parquet_pads_every_action_with_the_arguments_of_all_tools_and_the_tasks_are_the_same(tmp_path):
    actions = [ACTION, {"name": "get_user_details", "kwargs": {"user_id": "ann_1"}}, {"name": "x", "kwargs": {}}]
    rows = [{"index": 0, "metadata": METADATA | {"actions": actions}}]
    stored = tmp_path / "retail_train_tasks.parquet"
    pq.write_table(pa.Table.from_pylist(rows), stored)
    assert pq.read_table(stored).to_pylist()[0]["metadata"]["actions"][0]["kwargs"]["user_id"] is None
    found, plain = (
        load_tasks(stored, need_answers=False),
        load_tasks(folder_of(tmp_path / "plain", train=rows), "train", False),
    )
    assert found[0].metadata["actions"] == actions and found.fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"index": "0", "metadata": METADATA}, "column 'index': must be a whole number, got str '0'"),
        ({"index": 0, "metadata": METADATA | {"instruction": ""}}, "column 'metadata.instruction': must not be empty"),
        ({"index": 0, "metadata": METADATA | {"outputs": "5"}}, "column 'metadata.outputs': must be a list"),
        ({"index": 0, "metadata": METADATA | {"outputs": [5]}}, "column 'metadata.outputs[0]'"),
        ({"index": 0, "metadata": METADATA | {"user_id": None}}, "'metadata.user_id': must be text, got NoneType"),
        ({"index": 0, "metadata": METADATA | {"actions": [{"name": "x"}]}}, "[0].kwargs': missing; the row has name."),
        ({"index": 0, "metadata": METADATA | {"actions": ["x"]}}, "column 'metadata.actions[0]': must be an object"),
        ({"index": 0, "metadata": METADATA | {"actions": None}}, "column 'metadata.actions': must be a list"),
    ],
)  # fmt: skip
def test_malformed_rows_name_file_row_and_column(tmp_path, row, told):
    folder = folder_of(tmp_path, dev=[{"index": 1, "metadata": METADATA}, row])
    with pytest.raises(ConfigError) as error:
        load_tasks(folder, "dev", need_answers=False)
    assert told in str(error.value) and "retail_dev_tasks.jsonl, line 2" in str(error.value)


@pytest.mark.parametrize("field", ["instruction", "user_id", "outputs"])
def test_half_of_a_surrogate_pair_is_no_text_and_would_end_the_run_at_its_first_log(tmp_path, field):
    wrong = ["\ud800"] if field == "outputs" else "\ud800 x"
    folder = folder_of(tmp_path, dev=[{"index": 0, "metadata": METADATA | {"instruction": "\U0001f600"}}])
    assert load_tasks(folder, "dev", need_answers=False)[0].prompt == "\U0001f600"
    folder_of(tmp_path, dev=[{"index": 0, "metadata": METADATA | {field: wrong}}])
    with pytest.raises(ConfigError, match=r"retail_dev_tasks\.jsonl, line 1: half of a surrogate pair"):
        load_tasks(folder, "dev", need_answers=False)
