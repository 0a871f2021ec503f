"""Every file format gives the same tasks; whatever is wrong is told in one line, at open."""

import datetime
import decimal
import json
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python import array_record_module

from data_pipelines.write import write_tasks
from jaxagent.config import ConfigError, DataConfig
from jaxagent.data import files, sources
from jaxagent.data.dataset import Files
from jaxagent.types import Task

TRAIN = [
    {
        "id": f"train/{i}",
        "prompt": f"Frage {i} – où?",
        "answers": ["ä", "b"][: 1 + i % 2],
        "kind": "k",
        "metadata": "{}",
    }
    for i in range(7)
]
TEST = [{"id": "test/0", "prompt": "q", "answers": ["a"], "kind": "", "metadata": '{"n": 1}'}]


def config(eval_source: str) -> DataConfig:
    """A data section in which only `eval_source` matters."""
    return DataConfig(source=Files("unread"), eval_source=eval_source, seed=0, num_eval=1)


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_array_record(path: Path, records: list[bytes]) -> Path:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.fixture
def dataset(tmp_path) -> Path:
    write_tasks(tmp_path / "dataset", {"train": TRAIN, "test": TEST})
    return tmp_path / "dataset"


def as_tasks(rows):
    return [Task(r["id"], r["prompt"], tuple(r["answers"]), r["kind"], json.loads(r["metadata"])) for r in rows]


def test_every_format_gives_the_same_tasks(tmp_path, dataset):
    pq.write_table(pa.Table.from_pylist(TRAIN), tmp_path / "train.parquet")
    write_jsonl(tmp_path / "train.jsonl", TRAIN)
    write_array_record(tmp_path / "train.array_record", [json.dumps(row).encode() for row in TRAIN])
    opened = [sources.load_tasks(tmp_path / f"train.{end}") for end in ("parquet", "jsonl", "array_record")]
    opened.append(sources.load_tasks(dataset, "train"))
    opened.append(sources.load_tasks(tmp_path / "train.jsonl", "train"))  # the split that its name says
    for source in opened:
        assert list(source) == as_tasks(TRAIN)
        assert source[len(source) - 1] == as_tasks(TRAIN)[-1]
        assert pickle.loads(pickle.dumps(source))[3] == source[3]
        with pytest.raises(IndexError):
            source[len(TRAIN)]
    assert len({source.fingerprint for source in opened}) == 1


def test_a_split_in_several_files_is_one_sequence(tmp_path):
    for i, part in enumerate((TRAIN[:3], TRAIN[3:4], TRAIN[4:])):
        write_jsonl(tmp_path / f"train-0000{i}-of-00003.jsonl", part)
    write_jsonl(tmp_path / "corpus.jsonl", [{"id": "0", "contents": "no task"}])
    assert list(sources.load_tasks(tmp_path)) == as_tasks(TRAIN)
    write_jsonl(tmp_path / "train-00002-of-00003.jsonl", [TRAIN[4], TRAIN[5] | {"answers": []}])
    with pytest.raises(ConfigError, match=r"train-00002-of-00003\.jsonl, line 2: column 'answers'"):
        sources.load_tasks(tmp_path)


def test_a_folder_of_a_split_is_whole_and_of_one_format(tmp_path):
    wrong = {
        "piece": (
            ["train-00000-of-00004.jsonl"],
            "cut into 4 files, of which 3 are missing: the first is number 00001",
        ),
        "format": (["0000.jsonl", "0000.json"], r"0000\.json, 0000\.jsonl all claim to be split 'train'"),
        "packed": (["0.jsonl", "0.jsonl.gz"], r"0\.jsonl, 0\.jsonl\.gz all claim"),
        "both": (["0000.jsonl", "train-00000-of-00001.jsonl"], "all claim to be split"),
        "older": (["train-00000-of-00001.jsonl", "train-00000-of-00002.jsonl"], "cut into 1 and into 2 files at once"),
    }
    for name, (names, said) in wrong.items():
        (tmp_path / name / "train").mkdir(parents=True)
        for file in names:
            write_jsonl(tmp_path / name / "train" / file, TRAIN)
        with pytest.raises(ConfigError, match=said):
            files.splits(tmp_path / name)
    (tmp_path / "whole/test").mkdir(parents=True)
    for number in range(2):
        write_jsonl(tmp_path / f"whole/test/test-0000{number}-of-00002.jsonl", TRAIN[number : number + 1])
    write_jsonl(tmp_path / "whole/test/corpus.jsonl", [{"id": "0", "contents": "no task"}])
    assert list(sources.load_tasks(tmp_path / "whole", "test")) == as_tasks(TRAIN[:2])


def test_a_stray_file_does_not_hide_the_folder_data(tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "preview.jsonl", TEST)
    assert set(files.splits(tmp_path)) == {"preview"}
    write_jsonl(tmp_path / "data/meta.jsonl", TRAIN)
    assert set(files.splits(tmp_path)) == {"preview"}
    write_jsonl(tmp_path / "data/train.jsonl", TRAIN)
    assert list(sources.load_tasks(tmp_path, "train")) == as_tasks(TRAIN)
    write_jsonl(tmp_path / "train.jsonl", TEST)  # splits here go before splits in data/
    assert list(sources.load_tasks(tmp_path, "train")) == as_tasks(TEST)


def test_files_named_as_hugging_face_named_them_with_a_fingerprint(tmp_path):
    write_jsonl(tmp_path / "train-00000-of-00002-6ef3991c06080e14.jsonl", TRAIN[:3])
    write_jsonl(tmp_path / "train-00001-of-00002-0a1b2c3d4e5f6789.jsonl", TRAIN[3:])
    write_jsonl(tmp_path / "test-00000-of-00001-ffffffffffffffff.jsonl", TEST)
    train, held_out = sources.open_train_and_held_out(tmp_path, config(""))
    assert list(train) == as_tasks(TRAIN) and list(held_out) == as_tasks(TEST)


def test_a_split_in_files_is_whole_too(tmp_path):
    write_jsonl(tmp_path / "train-00000-of-00003.jsonl", TRAIN[:3])
    write_jsonl(tmp_path / "train-00002-of-00003.jsonl", TRAIN[4:])
    with pytest.raises(ConfigError, match="cut into 3 files, of which 1 are missing: the first is number 00001"):
        sources.load_tasks(tmp_path, "train")
    (tmp_path / "train-00000-of-00003.jsonl").rename(tmp_path / "train-00002-of-00003.parquet")
    with pytest.raises(ConfigError, match=r"train-00002-of-00003\.jsonl, train-00002-of-00003\.parquet are the same"):
        sources.load_tasks(tmp_path, "train")


@pytest.mark.parametrize(
    ("value", "kept", "left_out"),
    [
        (datetime.datetime(2024, 1, 1, 12), "2024-01-01T12:00:00", ""),
        (datetime.date(2024, 1, 1), "2024-01-01", ""),
        (datetime.time(12), "12:00:00", ""),
        (datetime.timedelta(1), "1 day, 0:00:00", ""),
        (decimal.Decimal("1.5"), "1.5", ""),
        (float("nan"), None, ""),
        ([1.0, float("nan")], [1.0, None], ""),
        (float("inf"), None, "more"),
        (b"\xff", None, "more"),
        ([[b"\xff"]], None, "more"),
        ({"bytes": b"\xff", "path": "a.png"}, {"path": "a.png"}, "more.bytes"),
        ([{"bytes": b"\xff", "path": "a.png"}], [{"path": "a.png"}], "more.bytes"),
    ],
)
def test_what_a_table_holds_beside_texts_and_numbers(tmp_path, value, kept, left_out):
    """Among further columns and inside extra_info; what JSON cannot hold is left out and named once."""
    chat = [{"role": "user", "content": "Question: x?"}]
    verl = {"data_source": "nq", "prompt": chat, "reward_model": {"ground_truth": {"target": ["a"]}}}
    for layout in (
        lambda name: TRAIN[0] | {"id": name, "more": value, "metadata": {"level": 1}},
        lambda name: verl | {"extra_info": {"split": name, "index": 0, "level": 1, "more": value}},
    ):
        for split in ("train", "test"):
            data = [layout(f"{split}{number}") for number in range(2)]
            pq.write_table(pa.Table.from_pylist(data), tmp_path / f"{split}.parquet")
        told = []
        for source in sources.open_train_and_held_out(tmp_path, config(""), note=told.append):
            for task in source:
                assert task.metadata["level"] == 1
                assert task.metadata.get("more") == kept and ("more" in task.metadata) == (kept is not None)
        named = [line for line in told if f"'{left_out}' is left out of the metadata, as JSON cannot hold" in line]
        assert len(named) == (2 if left_out else 0)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (r'{"a": "\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "is not JSON: maximum recursion"),
        ("1" * 5000, "is not JSON: Exceeds the limit"),
    ],
)
def test_metadata_as_text_are_looked_at_like_the_row_around_them(tmp_path, metadata, said):
    path = write_jsonl(tmp_path / "train.jsonl", [TRAIN[0] | {"metadata": metadata}])
    with pytest.raises(ConfigError, match=rf"train\.jsonl, line 1: column 'metadata': {said}"):
        sources.load_tasks(path)


def test_bytes_that_are_no_text_in_a_parquet_file_are_named(tmp_path):
    raw = pa.array([b"\xff\xfe"], pa.binary())
    prompts = pa.Array.from_buffers(pa.string(), 1, raw.buffers())
    pq.write_table(pa.table({"id": ["a"], "prompt": prompts, "answers": [["x"]]}), tmp_path / "train.parquet")
    with pytest.raises(ConfigError, match=r"train\.parquet, row 0 cannot be decoded: 'utf-8' codec"):
        sources.load_tasks(tmp_path, "train")


def test_a_number_of_thousands_of_digits_is_told_in_one_line(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"id": ' + "1" * 5000 + "}\n")
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 1: not JSON: Exceeds the limit"):
        sources.load_tasks(tmp_path, "train")


def test_a_folder_where_one_file_is_meant_is_a_mistake_and_no_crash(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", TRAIN)
    with pytest.raises(ConfigError, match="is a folder: name one file of tasks"):
        files.open_rows(tmp_path, "")
    with pytest.raises(ConfigError, match=r"has no split 'trian'.*train"):
        files.open_rows(tmp_path, "trian")


def test_reading_from_many_threads(dataset):
    source = sources.load_tasks(dataset, "train")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(source.__getitem__, list(range(7)) * 20)) == as_tasks(TRAIN) * 20


def test_malformed_rows_are_found_at_open_and_placed(tmp_path):
    path = tmp_path / "train.jsonl"
    write_jsonl(path, TRAIN)
    path.write_text(
        path.read_text() + "\n\n" + '{"id": "x", "prompt": "p"}\n'
    )  # blank lines count as lines of the file
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 10: column 'answers': missing; the row has id, prompt"):
        sources.load_tasks(path)
    path.write_text('{"id": "x", "prompt": "p", "answers": ["a"]}\n{"id": \n')
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 2: not JSON"):
        sources.load_tasks(path)
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 1: not JSON"):
        sources.load_tasks(path)
    write_jsonl(path, [TRAIN[0], TRAIN[1], TRAIN[0]])
    with pytest.raises(ConfigError, match=r"line 3: column 'id': 'train/0' is also the id of .*line 1"):
        sources.load_tasks(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="has no rows"):
        sources.load_tasks(path)
    bare = write_array_record(tmp_path / "x.array_record", [b'{"id": "a", "prompt": "p", "answers": ["a"]}', b"junk"])
    with pytest.raises(ConfigError, match=r"x\.array_record, row 1: not JSON"):
        sources.load_tasks(bare)


def test_a_foreign_tfds_folder_with_a_malformed_row(tmp_path):
    import tensorflow_datasets as tfds

    (tmp_path / "d").mkdir()
    identity = tfds.core.DatasetIdentity(
        name="other", version=tfds.core.Version("2.0.0"), data_dir=str(tmp_path / "d"), module_name="other"
    )
    columns = {name: tfds.features.Text() for name in ("id", "question")}
    columns["golden_answers"] = tfds.features.Sequence(tfds.features.Text())
    info = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(columns))
    writer = tfds.core.SequentialWriter(info, 2, file_format="array_record")  # two rows per file
    writer.initialize_splits(["train"])
    good = [{"id": str(i), "question": "q?", "golden_answers": ["a"]} for i in range(3)]
    writer.add_examples({"train": [*good, {"id": "3", "question": "", "golden_answers": ["a"]}]})
    writer.close_all()
    with pytest.raises(ConfigError, match=r"d, split 'train', row 3: column 'question': must not be empty"):
        sources.load_tasks(tmp_path / "d")


def test_damaged_files_are_told_in_one_line(tmp_path, dataset):
    for name in ("x.parquet", "x.array_record"):
        (tmp_path / name).write_bytes(b"not what the name says" * 5000)
        with pytest.raises(ConfigError, match=rf"{name}.* (not a readable|cannot be read)"):
            sources.load_tasks(tmp_path / name)
    file = dataset / "tasks-train.array_record-00000"
    content = bytearray(file.read_bytes())
    content[1000:2000] = bytes(1000)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"dataset, split 'train', row \d cannot be decoded"):
        sources.load_tasks(dataset, "train")
    file.unlink()
    with pytest.raises(ConfigError, match="split 'train'"):
        sources.load_tasks(dataset, "train")
    (dataset / "features.json").write_text("{")
    with pytest.raises(ConfigError, match="not a readable TFDS dataset"):
        sources.load_tasks(dataset, "train")


def test_wrong_paths_and_splits_name_the_nearest(tmp_path, dataset):
    with pytest.raises(ConfigError, match="Did you mean 'dataset'"):
        sources.load_tasks(tmp_path / "datasets", "train")
    with pytest.raises(ConfigError, match=r"no split 'tran'\. Did you mean 'train'"):
        sources.load_tasks(dataset, "tran")
    with pytest.raises(ConfigError, match="several splits: train, test"):
        sources.load_tasks(dataset)
    with pytest.raises(ConfigError, match=r"unknown data format '\.xls'"):
        (tmp_path / "x.xls").write_text("a")
        sources.load_tasks(tmp_path / "x.xls")
    with pytest.raises(ConfigError, match="holds no dataset"):
        (tmp_path / "empty").mkdir()
        sources.load_tasks(tmp_path / "empty")
    one = write_jsonl(tmp_path / "one.jsonl", TRAIN)
    with pytest.raises(ConfigError, match="without a split 'test'"):
        sources.load_tasks(one, "test")
    shutil.copy(one, tmp_path / "empty/train.jsonl")
    pq.write_table(pa.Table.from_pylist(TRAIN), tmp_path / "empty/train.parquet")
    with pytest.raises(ConfigError, match="all claim to be split 'train'"):
        sources.load_tasks(tmp_path / "empty")


def test_train_and_held_out(tmp_path, dataset):
    train, held_out = sources.open_train_and_held_out(dataset, config(""))
    assert (list(train), list(held_out)) == (as_tasks(TRAIN), as_tasks(TEST))
    one = write_jsonl(tmp_path / "one.jsonl", TRAIN)
    with pytest.raises(ConfigError, match=r"data\.eval_source"):
        sources.open_train_and_held_out(one, config(""))
    train, held_out = sources.open_train_and_held_out(one, config(str(dataset)))
    assert (list(train), list(held_out)) == (as_tasks(TRAIN), as_tasks(TEST))
    other = write_jsonl(tmp_path / "other.jsonl", TEST)
    _, held_out = sources.open_train_and_held_out(dataset, config(str(other)))
    assert list(held_out) == as_tasks(TEST)
    with pytest.raises(ConfigError, match="the same tasks"):
        sources.open_train_and_held_out(one, config(str(one)))


def test_the_datasets_own_passages(tmp_path, dataset):
    assert sources.corpus_of(dataset) is None
    corpus = write_jsonl(dataset / "corpus.jsonl", [{"id": "0", "contents": "T\nx"}])
    assert sources.corpus_of(dataset) == corpus
    assert set(files.splits(dataset)) == {"train", "test"}


def test_reading_and_writing_need_neither_tensorflow_nor_jax(dataset, tmp_path):
    code = (
        "from importlib.machinery import PathFinder\n"
        "find, absent = PathFinder.find_spec, ('tensorflow', 'jax', 'jaxlib')\n"
        "PathFinder.find_spec = lambda name, *a: None if name.partition('.')[0] in absent else find(name, *a)\n"
        "from data_pipelines.write import write_tasks\n"
        "from jaxagent.data.sources import load_tasks\n"
        f"rows = [vars(task) for task in load_tasks({str(dataset)!r}, 'train')]\n"
        f"write_tasks({str(tmp_path / 'copy')!r}, {{'train': rows}})\n"
        f"print(load_tasks({str(tmp_path / 'copy')!r}).fingerprint)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == sources.load_tasks(dataset, "train").fingerprint
