"""Rows and folders as other people have them: each gives the same tasks, or one sentence with file, row and column."""

import csv
import dataclasses
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxagent.config import Columns, ConfigError, DataConfig
from jaxagent.config.env import Layout
from jaxagent.data import files, rows, sources
from jaxagent.data.dataset import Files
from jaxagent.data.rows import Reading
from jaxagent.envs import Environment, Search
from jaxagent.envs import Python as PythonEnv
from jaxagent.envs.base import Message
from jaxagent.types import Task

# ------------------------------------------------------------------ layouts of rows

FLAT = [{"id": f"q{i}", "prompt": f"Who wrote book {i}?", "answers": [f"Author {i}"]} for i in range(4)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
MAPPED = Reading(columns=Columns(id="number", prompt="question", answers="answer"))


def _tasks(**changes):
    return [Task(r["id"], r["prompt"], tuple(r["answers"]), "", changes) for r in FLAT]


def _own(i):
    """Metadata in which every row has other keys: a table fills them with nulls."""
    return {f"only{i}": i, "files": {f"{i}.py": "x"}}


# name -> (rows, how they are read, the tasks that they are)
VARIANTS = {
    "ours": (FLAT, rows.AS_IT_IS, _tasks()),
    "further columns": (
        [r | {"level": "3", "question": "raw"} for r in FLAT], rows.AS_IT_IS, _tasks(level="3", question="raw"),
    ),
    "without ids": (
        [{"prompt": r["prompt"], "answers": r["answers"]} for r in FLAT],
        rows.AS_IT_IS,
        [Task(f"train/{i}", r["prompt"], tuple(r["answers"])) for i, r in enumerate(FLAT)],
    ),
    "other names": (
        [
            {"number": str(i), "question": r["prompt"], "answer": r["answers"][0], "info": "x"}
            for i, r in enumerate(FLAT)
        ],
        MAPPED,
        [Task(str(i), r["prompt"], tuple(r["answers"]), "", {"info": "x"}) for i, r in enumerate(FLAT)],
    ),
    "nested": (
        [r | {"metadata": _own(i)} for i, r in enumerate(FLAT)],
        rows.AS_IT_IS,
        [Task(r["id"], r["prompt"], tuple(r["answers"]), "", _own(i)) for i, r in enumerate(FLAT)],
    ),
    "messages": (
        [{"id": r["id"], "prompt": CHAT, "answers": ["2"], "solution": 2} for r in FLAT],
        rows.AS_IT_IS,
        [Task(r["id"], "1+1?", ("2",), "", {"solution": 2, "earlier_messages": CHAT[:1]}) for r in FLAT],
    ),
}  # fmt: skip
ONLY_TEXTS = ("ours", "further columns", "without ids", "other names")  # what CSV can hold


# ------------------------------------------------------------------ layouts of files


def _jsonl(data):
    return "".join(json.dumps(row) + "\n" for row in data).encode()


def _csv(data):
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(data[0]))
    writer.writeheader()
    lists = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in data]
    writer.writerows(lists)
    return out.getvalue().encode()


def _stream(data, path):
    table = pa.Table.from_pylist(data)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def _ipc_file(data, path):
    table = pa.Table.from_pylist(data)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table)


def _parquet(data, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(data), path)


def _saved(data, folder, split="train"):
    folder.mkdir(parents=True)
    for i, part in enumerate((data[:1], data[1:])):
        _stream(part + data[:0], folder / f"data-{i:05d}-of-00002.arrow")
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"id": {"dtype": "string", "_type": "Value"}}}))
    names = [{"filename": f"data-{i:05d}-of-00002.arrow"} for i in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": split}))


def _saved_dict(data, folder):
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for split in ("train", "test"):
        _saved(data, folder / split, split)


def _shards(data, folder):
    for i, part in enumerate((data[:2], data[2:])):
        _parquet(part, folder / f"train-{i:05d}-of-00002.parquet")


def _cache(data, folder):
    folder.mkdir()
    _stream(data, folder / "gsm8k-train.arrow")
    (folder / "dataset_info.json").write_text(json.dumps({"builder_name": "gsm8k", "splits": {"train": {}}}))


def _bytes(make, name, pack=lambda data: data):
    def write(data, folder):
        folder.mkdir()
        (folder / name).write_bytes(pack(make(data)))

    return write


def _hub(inner):
    def write(data, folder):
        _shards(data, folder / inner)
        _parquet([{**data[0], "id": "t"}], folder / inner / "test-00000-of-00001.parquet")
        (folder / "README.md").write_text("---\n")
        (folder / ".cache/huggingface").mkdir(parents=True)
        (folder / "dataset_infos.json").write_text("{}")

    return write


FORMATS = {
    "jsonl": _bytes(_jsonl, "train.jsonl"),
    "jsonl, BOM, CRLF": _bytes(lambda data: b"\xef\xbb\xbf" + _jsonl(data).replace(b"\n", b"\r\n"), "train.jsonl"),
    "jsonl.gz": _bytes(_jsonl, "train.jsonl.gz", gzip.compress),
    "json": _bytes(lambda data: json.dumps(data, indent=1).encode(), "train.json"),
    "json.gz": _bytes(lambda data: json.dumps(data).encode(), "train.json.gz", gzip.compress),
    "json of lines": _bytes(_jsonl, "train.json"),
    "csv": _bytes(_csv, "train.csv"),
    "csv.gz": _bytes(_csv, "train.csv.gz", gzip.compress),
    "parquet": lambda data, folder: _parquet(data, folder / "train.parquet"),
    "arrow": lambda data, folder: (folder.mkdir(), _stream(data, folder / "train.arrow")),
    "arrow file": lambda data, folder: (folder.mkdir(), _ipc_file(data, folder / "train.arrow")),
    "shards": _shards,
    "snapshot data/": _hub("data"),
    "snapshot main/": _hub("main"),
    "snapshot train/0000.parquet": lambda data, folder: _parquet(data, folder / "default/train/0000.parquet"),
    "save_to_disk": _saved,
    "DatasetDict": _saved_dict,
    "cache": _cache,
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_of_files_gives_the_same_tasks(variant, tmp_path):
    data, how, wanted = VARIANTS[variant]
    for number, (name, write) in enumerate(FORMATS.items()):
        if name.startswith("csv") and variant not in ONLY_TEXTS:
            continue
        folder = tmp_path / str(number)
        write(data, folder)
        if name.startswith("snapshot train"):
            folder = folder / "default"
        for place in (folder, *(p for p in folder.iterdir() if name in ("json", "csv", "arrow", "jsonl.gz"))):
            split = "train" if "train" in files.splits(place) else ""
            source = sources.load_tasks(place, split, how=how)
            assert list(source) == wanted, name


WRONG = [
    ({"Kind": "x"}, "Kind", "did you mean 'kind'"),
    ({"meta": "x"}, "meta", "did you mean 'metadata'"),
    ({"metdata": "x"}, "metdata", "did you mean 'metadata'"),
    ({"kinds": "x"}, "kinds", "did you mean 'kind'"),
    ({"knid": "x"}, "knid", "did you mean 'kind'"),
    ({"answers": "['a' 'b']"}, "answers", "may be a list or a text in brackets"),
    ({"prompt": [*CHAT, {"role": "assistant", "content": "a"}]}, "prompt", "must end with a message of the user"),
    ({"prompt": [{"role": "user", "content": "q", "images": ["x.png"]}]}, "prompt[0].images", "is no text"),
    ({"prompt": [{"role": "user", "content": ""}, {"role": "user", "content": "q"}]}, "prompt[0].content", "be empty"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["jsonl", "jsonl.gz", "json", "parquet", "arrow", "save_to_disk", "snapshot data/"])
def test_a_mistake_is_one_sentence_with_file_row_and_column(name, tmp_path):
    for number, (change, column, said) in enumerate(WRONG):
        folder = tmp_path / str(number)
        FORMATS[name]([r | change for r in FLAT], folder)
        with pytest.raises(ConfigError) as error:
            sources.load_tasks(folder, "train")
        text = str(error.value)
        assert str(folder) in text and f"column '{column}'" in text and said in text and "\n" not in text, text
        assert "row 0" in text or "line 1" in text


def test_a_row_that_has_our_columns_is_ours_whatever_else_it_has():
    """Columns by which other layouts are known, alone and in pairs: all go to the metadata."""
    marks = {
        "context": "X is 42.", "data_source": "rlla", "repo": "me/x", "instance_id": "i", "user_scenario": "a story",
        "index": 3, "golden_answers": ["7"], "reward_model": {"style": "rule"}, "problem_statement": "p",
        "question": "raw q", "input": "x", "ability": "memory", "extra_info": {"split": "train", "index": 1},
        "expected_output_json": "{}", "answer": "7", "find": "f", "kin": "k", "mind": "m", "king": "k", "ids": "i",
    }  # fmt: skip
    for one in marks:
        for other in marks:
            more = {one: marks[one], other: marks[other]}
            assert rows.to_task(FLAT[0] | more, True) == Task("q0", "Who wrote book 0?", ("Author 0",), "", more)
    nested = {"eval_cmd": "make", "instance": "x1", "actions": [], "user_id": "u", "instruction": "do"}
    assert rows.to_task(FLAT[0] | {"index": 1, "metadata": nested}, True).metadata == nested | {"index": 1}


def test_a_row_of_several_layouts_is_refused_unless_its_layout_is_named():
    verl = _verl(CHAT[1:])
    both = verl | {"instance_id": "i", "problem_statement": "p", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": []}
    with pytest.raises(rows.RowError, match=r"can be read as verl and as software: say which with data\.layout"):
        rows.to_task(both, False)
    assert rows.to_task(both, True, Reading(layout="verl")).answers == ("4",)
    assert "coding" in rows.to_task(both, False, Reading(layout="software")).metadata
    memagent = verl | {"ability": "memory", "context": "c"}
    ruler = {"context": "c", "input": "q", "prompt": "p"}
    software = {name: both[name] for name in ("instance_id", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")}
    published = {
        "verl": verl, "toolrl": verl | {"data_source": "rlla"}, "long_text": memagent, "long_text ": ruler,
        "flashrag": {"question": "q", "golden_answers": ["g"], "prompt": "p"}, "software": software | {"prompt": "p"},
    }  # fmt: skip
    for layout, row in published.items():  # an id that is made makes none of them ours
        for more in ({"answers": ["2"]}, {"answers": ["2"], "id": None}):
            with pytest.raises(rows.RowError, match=rf"as ours and as {layout.strip()}: say which with data\.layout"):
                rows.to_task(row | more, False, made_id="train/0")
            mine = rows.to_task(row | more, False, Reading(layout="ours"), made_id="train/0")
            assert (mine.id, mine.answers) == ("train/0", ("2",))
    assert rows.to_task(verl, True, made_id="train/0").id == "math/train/0"
    assert set(rows.GENERAL) | set(rows.LAYOUTS) | {"auto"} == set(Layout.__args__)


def _verl(messages, **changes):
    row = {
        "data_source": "math",
        "prompt": messages,
        "ability": "x",
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    return row | {"extra_info": {"split": "train", "index": 0}} | changes


def _user(text):
    return {"role": "user", "content": text}


TEMPLATE = "Answer the given question. You must conduct reasoning."
TARGET = {"style": "rule", "ground_truth": {"target": ["4"]}}


@pytest.mark.parametrize(
    ("row", "prompt", "before"),
    [
        (_verl([CHAT[0], _user("What is 2+2?")]), "What is 2+2?", CHAT[:1]),
        (_verl([_user("Passage: green.\nQuestion: What colour?")]), "Passage: green.\nQuestion: What colour?", []),
        (_verl([_user("Question: 1+1? Answer: 2 Question: 2+2?")]), "Question: 1+1? Answer: 2 Question: 2+2?", []),
        (
            _verl([_user("I am Bo."), {"role": "assistant", "content": "Hello."}, _user("Who am I?")]),
            "Who am I?",
            [_user("I am Bo."), {"role": "assistant", "content": "Hello."}],
        ),
        (_verl([_user("Passage: a.\nQuestion: b?")], reward_model=TARGET), "Passage: a.\nQuestion: b?", []),
        (_verl([_user(f"{TEMPLATE} Question: b\n")], reward_model=TARGET), "b?", []),
        (_verl([_user(f"{TEMPLATE} Question: b\n")]), f"{TEMPLATE} Question: b", []),
        (_verl([CHAT[0], _user(f"{TEMPLATE} Question: b")], reward_model=TARGET), f"{TEMPLATE} Question: b", CHAT[:1]),
        (_verl([_user("x")], reward_model=TARGET, question=" what is it "), "what is it?", []),
        (_verl([_user("x")], question="other"), "x", []),
        (_verl([{"role": "system", "content": ""}, _user("x")]), "x", []),
        (_verl([CHAT[0] | {"name": "rules", "weight": 0}, _user("x") | {"name": "Bo", "weight": 1}]), "x", CHAT[:1]),
    ],
)  # fmt: skip
def test_what_stands_before_a_question_is_kept_or_refused(row, prompt, before):
    task = rows.to_task(row, True)
    assert task.prompt == prompt and task.metadata.get("earlier_messages", []) == before
    if before:
        with pytest.raises(rows.RowError, match=r"'prompt': this environment takes one question, and would lose .*\("):
            rows.to_task(row, True, Reading(messages=False))
    else:
        assert rows.to_task(row, True, Reading(messages=False)) == task


def test_what_a_reward_may_read_reaches_the_metadata():
    model = {"style": "rule", "ground_truth": {"target": ["4"], "tolerance": 0.1}, "weight": 2}
    task = rows.to_task(_verl([_user("x")], reward_model=model, agent_name="tool", tools=None), True)
    assert task.metadata == {
        "split": "train", "index": 0, "agent_name": "tool",
        "reward_model": {"weight": 2, "ground_truth": {"tolerance": 0.1}},
    }  # fmt: skip
    flashrag = {"id": "a", "question": "q", "golden_answers": ["x"], "metadata": {"hops": 2}, "level": "hard"}
    assert rows.to_task(flashrag, True).metadata == {"hops": 2, "level": "hard"}
    with pytest.raises(rows.RowError, match="column 'index': stands in the row's metadata, too"):
        rows.to_task(_verl([_user("x")], index=5), True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": "q", "prompt": "a", "prompt": "b", "answers": ["x"]}\n', "the key 'prompt' stands twice"),
        ('{"id": "q", "prompt": "a", "answers": ["x"], "metadata": {"k": 1, "k": 2}}\n', "the key 'k' stands twice"),
        (json.dumps(FLAT[0] | {"metadata": '{"k": 1, "k": 2}'}) + "\n", "the key 'k' stands twice"),
    ],
)
def test_a_key_twice_is_refused(text, said, tmp_path):
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said):
        sources.load_tasks(tmp_path / "train.jsonl")


def test_a_map_names_columns_that_must_be_there(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(_jsonl([{"question": "1+1?", "answer": 2, "id": 7}]))
    how = Reading(columns=Columns(id="id", prompt="question", answers="answer"))
    assert list(sources.load_tasks(tmp_path / "t.jsonl", how=how)) == [Task("7", "1+1?", ("2",))]
    with pytest.raises(
        ConfigError, match=r"column 'questions': missing, and data.columns.prompt names it. Did you mean 'question'"
    ):
        sources.load_tasks(tmp_path / "t.jsonl", how=Reading(columns=Columns(prompt="questions")))


def test_long_cells_and_blanks_in_the_first_line_of_csv(tmp_path):
    (tmp_path / "t.csv").write_text(f"id, prompt ,answers,context\n1,q,\"['a', 'b']\",{'x' * 200_000}\n")
    assert list(sources.load_tasks(tmp_path / "t.csv")) == [Task("1", "q", ("a", "b"), "", {"context": "x" * 200_000})]
    (tmp_path / "t.csv").write_text("prompt, prompt\nq,r\n")
    with pytest.raises(ConfigError, match="has two columns of one name"):
        sources.load_tasks(tmp_path / "t.csv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Talk(Environment):
    """An environment whose own prompt has a system message."""

    takes_messages = True

    def messages(self, text):
        return (Message("system", "Own rules."), Message("user", f"Task: {text}"))

    def attempt(self, task):
        raise NotImplementedError


def test_an_attempt_begins_with_what_its_row_has_before_the_question():
    chat = [CHAT[0], _user("I am Bo."), {"role": "assistant", "content": "Hello."}, _user("Who am I?")]
    task = rows.to_task({"id": "a", "prompt": chat, "answers": ["Bo"]}, True)
    said = [(message.role, message.content) for message in Talk().prompt_messages(task)]
    assert said == [
        ("system", "Own rules.\n\nBe brief."),
        ("user", "I am Bo."),
        ("assistant", "Hello."),
        ("user", "Task: Who am I?"),
    ]
    plain = rows.to_task(FLAT[0], True)
    for environment in (Talk(), Search(), PythonEnv()):
        assert tuple(environment.prompt_messages(plain)) == tuple(environment.messages(plain.prompt))


# ------------------------------------------------------------------ folders that are none, or several


def test_folders_that_are_no_data_set_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"No data at openai/gsm8k\. .*hf download --repo-type=dataset openai/gsm8k"):
        files.splits(Path("openai/gsm8k"))
    for name in ("main", "socratic"):
        _parquet(FLAT, tmp_path / "gsm8k" / name / "train-00000-of-00001.parquet")
    with pytest.raises(ConfigError, match="holds several data sets, main, socratic: name one of these folders"):
        files.splits(tmp_path / "gsm8k")
    assert set(files.splits(tmp_path / "gsm8k/main")) == {"train"}
    _saved(FLAT, tmp_path / "saved")
    (tmp_path / "saved/data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"names data-00001-of-00002\.arrow, which is missing"):
        files.splits(tmp_path / "saved")
    (tmp_path / "t.jsonl.gz").write_bytes(b"not packed")
    (tmp_path / "t.arrow").write_bytes(b"ARROW1")
    (tmp_path / "t.csv").write_text('id,prompt\n"a,b\n')
    (tmp_path / "u.csv").write_text("id,prompt\na\n")
    wrong = {
        "t.jsonl.gz": "be unpacked",
        "t.arrow": "readable arrow",
        "t.csv": "readable csv",
        "u.csv": "row 0 has 1 c",
    }
    for name, said in wrong.items():
        with pytest.raises(ConfigError, match=said):
            sources.load_tasks(tmp_path / name)


# ------------------------------------------------------------------ held-out tasks that training has


def _data(**changes):
    return DataConfig(**{"source": Files("unread"), "eval_source": "", "seed": 0, "num_eval": 1} | changes)


def _opened(folder, train, test, **changes):
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(_jsonl(train))
    (folder / "val.jsonl").write_bytes(_jsonl(test))
    told = []
    sources.open_train_and_held_out(folder, _data(**changes), need_answers=False, note=told.append)
    return told


def test_held_out_tasks_that_training_has_are_counted_or_refused(tmp_path):
    other = [
        {**r, "id": f"t{r['id']}", "prompt": r["prompt"].upper() + " "} for r in FLAT
    ]  # the same, written otherwise
    new = [{**r, "id": f"n{r['id']}", "prompt": f"new {r['prompt']}"} for r in FLAT]
    for number, same in enumerate((FLAT, FLAT[::-1], FLAT[:2], other, other[:1], [{**r, "level": 3} for r in other])):
        with pytest.raises(ConfigError, match="holds the same tasks as"):
            _opened(tmp_path / f"all{number}", FLAT, same)
    assert _opened(tmp_path / "some", FLAT, other[1:3] + new) == [
        f"{tmp_path}/some:val: 2 of 6 held-out tasks are training tasks as well, the first tq1, tq2"
    ]
    assert _opened(tmp_path / "none", FLAT, new) == []
    otherwise = [FLAT[0] | {"id": "a", "answers": ["author, 0."]}, FLAT[1] | {"id": "b", "answers": ["Nobody"]}]
    assert _opened(tmp_path / "otherwise", FLAT, otherwise) == [
        f"{tmp_path}/otherwise:val: 1 of 2 held-out tasks are training tasks as well, the first a",
        f"{tmp_path}/otherwise:val: 1 of 2 held-out tasks have the prompt of a training task, with another answer or "
        "other metadata, the first b",
    ]
    twice = [{**r, "id": f"{level}{r['id']}", "level": level} for level in range(2) for r in FLAT]
    (told,) = _opened(tmp_path / "twice", twice, [FLAT[0] | {"id": "c", "level": 2}])
    assert "1 of 1 held-out tasks have the prompt of a training task" in told
    for number, (one, other) in enumerate((("-1", "1"), ("1.5", "15"), ("a+b", "a-b"), ("?", "!"))):
        (told,) = _opened(tmp_path / f"{number}", [FLAT[1], FLAT[0] | {"answers": [one]}], [
            FLAT[0] | {"id": "d", "answers": [other]}])  # fmt: skip
        assert "with another answer" in told
    (told,) = _opened(tmp_path / "ids", FLAT, [{**r, "id": r["id"][1:]} for r in new])
    assert "4 of 4 held-out tasks have the id of another training task, the first q0, q1, q2" in told
    seeds = [{"id": f"s{i}", "prompt": "Begin.", "answers": [], "metadata": {"seed": i}} for i in range(6)]
    assert _opened(tmp_path / "seeds", seeds[:4], seeds[4:]) == []  # one prompt for all: metadata tell them apart
    (told,) = _opened(tmp_path / "seed", seeds[:4], [seeds[4], seeds[0] | {"id": "x"}])
    assert "1 of 2 held-out tasks are training tasks" in told
    few = [
        {"id": f"{i}", "prompt": "Guess.", "answers": [str(i % 3)]} for i in range(9)
    ]  # three tasks are all there are
    (told,) = _opened(tmp_path / "few", few[:6], few[6:])
    assert "3 of 3 held-out tasks are training tasks" in told
    made = [{"prompt": r["prompt"], "answers": r["answers"]} for r in FLAT + new]
    assert _opened(tmp_path / "made", made[:4], made[4:]) == []


# ------------------------------------------------------------------ what `datasets` itself writes

_WRITE = """
import sys, json
from datasets import Dataset, DatasetDict
rows = json.loads(sys.argv[1]); out = sys.argv[2]
data = Dataset.from_list(rows)
data.save_to_disk(out + "/saved", num_shards=2)
DatasetDict({"train": data, "test": data}).save_to_disk(out + "/dict")
data.to_parquet(out + "/train.parquet")
data.to_json(out + "/train.json")
data.to_json(out + "/train.jsonl.gz", compression="gzip")
"""


@pytest.mark.slow
def test_what_the_package_datasets_writes_is_read(tmp_path):
    """In an environment of its own, which is made here."""
    python = tmp_path / "venv/bin/python"
    made = subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], capture_output=True)
    if (
        made.returncode
        or subprocess.run([python, "-m", "pip", "-q", "install", "datasets"], capture_output=True).returncode
    ):
        pytest.skip("the package datasets cannot be installed here")
    check_datasets(python, tmp_path)


def check_datasets(python, out):
    """What `datasets` of an interpreter writes, against the rows that it was given. Its JSON has nulls, which stay."""
    tables, texts = ("saved", "dict", "train.parquet"), ("train.json", "train.jsonl.gz")
    for variant, names in (("nested", tables), ("messages", (*tables, *texts)), ("further columns", (*tables, *texts))):
        data, how, wanted = VARIANTS[variant]
        folder = out / variant.replace(" ", "_")
        folder.mkdir()
        subprocess.run([python, "-c", _WRITE, json.dumps(data), str(folder)], check=True, capture_output=True)
        for name in names:
            split = "train" if name == "dict" else ""
            assert list(sources.load_tasks(folder / name, split, how=how)) == wanted, (variant, name)
