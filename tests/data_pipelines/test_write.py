"""The writer: what TFDS itself reads back, whole or nothing, and never over somebody's files."""

import pytest
import tensorflow_datasets as tfds

from data_pipelines import write
from jaxagent.config import ConfigError
from jaxagent.data import sources

ROW = {"id": "0", "prompt": "q – ü", "answers": ["a", "b"], "kind": "k", "metadata": '{"hops": 2}'}


def rows(count, prefix="t"):
    return [{"id": f"{prefix}{i}", "prompt": "q", "answers": ["a"]} for i in range(count)]


def test_tfds_reads_what_was_written(tmp_path):
    counts = write.write_tasks(tmp_path / "d", {"train": [ROW], "test": rows(3)}, description="one line")
    assert counts == {"train": 1, "test": 3}
    builder = tfds.builder_from_directory(str(tmp_path / "d"))
    assert builder.info.description == "one line"
    assert {name: info.num_examples for name, info in builder.info.splits.items()} == counts
    (example,) = builder.as_data_source(split="train")
    assert {k: v for k, v in example.items() if k != "answers"} == {
        "id": b"0", "prompt": "q – ü".encode(), "kind": b"k", "metadata": b'{"hops": 2}'
    }  # fmt: skip
    assert list(example["answers"]) == [b"a", b"b"]


def test_many_rows_are_cut_into_files_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "ROWS_PER_FILE", 10)
    monkeypatch.setattr(write, "_ROWS_PER_CALL", 7)
    seen = []
    write.write_tasks(tmp_path / "d", {"train": iter(rows(25))}, progress=lambda split, n: seen.append((split, n)))
    assert [task.id for task in sources.load_tasks(tmp_path / "d")] == [f"t{i}" for i in range(25)]
    assert len(list((tmp_path / "d").glob("*.array_record-*"))) == 3
    assert seen == [("train", 7), ("train", 14), ("train", 21), ("train", 25)]


def test_the_same_rows_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write.write_tasks(tmp_path / name, {"train": [ROW, *rows(20)]})
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [ROW, ROW | {"id": "1", "answers": []}]}, "split 'train', row 1: column 'answers'"),
        (
            {"train": [ROW], "test": [ROW]},
            "split 'test', row 0: column 'id': '0' is also the id of split 'train', row 0",
        ),
        ({"train": [ROW], "test": []}, "No rows for split 'test'"),
        ({}, "at least one split"),
    ],
)
def test_a_bad_dataset_leaves_the_old_one_untouched(tmp_path, splits, message):
    write.write_tasks(tmp_path / "d", {"train": rows(2)})
    before = sources.load_tasks(tmp_path / "d").fingerprint
    with pytest.raises(ConfigError, match=message):
        write.write_tasks(tmp_path / "d", splits)
    assert sources.load_tasks(tmp_path / "d").fingerprint == before
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_replacing_a_dataset_leaves_nothing_of_it(tmp_path):
    write.write_tasks(tmp_path / "d", {"train": rows(2), "test": rows(1, "x")})
    write.write_tasks(tmp_path / "d", {"train": rows(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert len(sources.load_tasks(tmp_path / "d")) == 3


def test_other_peoples_files_are_not_overwritten(tmp_path):
    write.write_tasks(tmp_path / "d", {"train": rows(2)})
    (tmp_path / "d/corpus.jsonl").write_text("hours of downloads")
    with pytest.raises(ConfigError, match=r"also holds corpus\.jsonl"):
        write.write_tasks(tmp_path / "d", {"train": rows(1)})
    with pytest.raises(ConfigError, match="is a file"):
        write.write_tasks(tmp_path / "d/corpus.jsonl", {"train": rows(1)})
    assert (tmp_path / "d/corpus.jsonl").read_text() == "hours of downloads"
    assert len(sources.load_tasks(tmp_path / "d")) == 2
