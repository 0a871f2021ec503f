"""HotpotQA's files -> contexts of any number of documents, in both published layouts; what is refused, and why."""

import json
import pathlib

import pytest

from data_pipelines import long_qa
from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.memagent import documents

SHARED = pathlib.Path(__file__).parents[2] / ".." / "shared" / "data"


def question(i, **changes):
    """A row in HotpotQA's format with two documents of its own, and one that all have."""
    return {
        "_id": f"q{i}",
        "question": f"Who wrote book {i}?",
        "answer": f"author {i}",
        "type": "bridge",
        "supporting_facts": [[f"Book {i}", 0]],
        "context": [[f"Book {i}", ["First. ", f"By author {i}."]], [f"Other {i}", ["No."]], ["Common", ["Yes."]]],
    } | changes


def build(tmp_path, train=None, test=None, num_docs=8):
    paths = []
    for name, found in (("train", train), ("test", test)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([question(i) for i in range(10)] if found is None else found))
        paths.append(path)
    return long_qa.build(*paths, tmp_path / "out", num_docs), tmp_path / "out"


def test_every_document_is_written_once_per_split(tmp_path):
    counts, out = build(tmp_path, test=[question(i) for i in range(4)])
    assert counts == {"train": (10, 21), "test": (4, 9)}
    texts = [json.loads(line)["text"] for line in (out / documents.FILE).read_text().splitlines()]
    assert len(texts) == 30 and texts[:3] == ["Book 0\nFirst. By author 0.", "Other 0\nNo.", "Common\nYes."]
    task = sources.load_tasks(out, "test")[3]
    assert (task.id, task.prompt, task.answers) == ("hotpotqa/test/q3", "Who wrote book 3?", ("author 3",))
    assert (task.kind, dict(task.metadata)) == ("hotpotqa/bridge", {"documents": [28, 29, 23], "pool": [21, 30],
                                                                    "num_docs": 8})  # fmt: skip


def test_contexts_hold_the_split_alone_and_more_than_the_tasks_own(tmp_path):
    _, out = build(tmp_path, test=[question(i) for i in range(20, 24)])
    found = documents.Documents(out / documents.FILE)
    for split, known in (("train", range(10)), ("test", range(20, 24))):
        for task in sources.load_tasks(out, split):
            texts = documents.texts_of_context(task, found, 0, 0, len)
            assert len(set(texts)) == 8
            number = task.prompt.removeprefix("Who wrote book ").removesuffix("?")
            assert f"Book {number}\nFirst. By author {number}." in texts
            books = {int(t.split("\n")[0].split()[1]) for t in texts if not t.startswith("Common")}
            assert books <= set(known) and len(books) > 1


@pytest.mark.parametrize("layout", ["ruler", "memagent"])
def test_exported_rows_are_read_back(tmp_path, layout):
    _, out = build(tmp_path)
    rows = tmp_path / f"{layout}.jsonl"
    arguments = ["export", f"--data={out}", "--num_docs=5", f"--layout={layout}", f"--out={rows}", "--tasks=3"]
    assert long_qa.main(arguments) == 0
    tasks = sources.load_tasks(rows)
    assert len(tasks) == 3 and tasks[1].answers == ("author 1",) and tasks[1].metadata["num_docs"] == 5
    context = tasks[1].metadata["context"]
    assert [context.count(f"Document {i}:\n") for i in range(1, 7)] == [1, 1, 1, 1, 1, 0]
    assert "Book 1\nFirst. By author 1." in context
    assert set(json.loads(rows.read_text().splitlines()[0])) == (
        {"context", "input", "answers", "num_docs", "index"}
        if layout == "ruler"
        else {"data_source", "prompt", "context", "ability", "reward_model", "extra_info"}
    )
    with pytest.raises(ConfigError, match="exists; remove it or choose another --out"):
        long_qa.main(arguments)


@pytest.mark.parametrize("length", [100, 300, 700])
def test_exported_contexts_have_so_many_tokens(tmp_path, length):
    _, out = build(tmp_path, train=[question(i) for i in range(30)])
    tokenizer = Tokenizer.train(["Document Book Other First By author No Yes Common"], 300, ())
    tokenizer.save(tmp_path / "tokenizer")
    rows = tmp_path / "rows.jsonl"
    long_qa.main(["export", f"--data={out}", "--split=train", f"--length_tokens={length}",
                  f"--tokenizer={tmp_path / 'tokenizer'}", f"--out={rows}"])  # fmt: skip
    for task in sources.load_tasks(rows):
        tokens = len(tokenizer.encode(task.metadata["context"]))
        assert length - 45 < tokens <= length  # less than the next document


def test_a_published_list_becomes_lines(tmp_path):
    row = {"context": "Document 1:\nA", "input": "Who?", "answers": ["X"], "num_docs": 1, "index": 0}
    (tmp_path / "eval_50.json").write_text(json.dumps([row, row | {"index": 1}]))
    assert long_qa.main(["lines", f"--rows={tmp_path / 'eval_50.json'}", f"--out={tmp_path / 'eval_50.jsonl'}"]) == 0
    assert [task.id for task in sources.load_tasks(tmp_path / "eval_50.jsonl")] == ["ruler_hqa/0", "ruler_hqa/1"]
    (tmp_path / "bad.json").write_text(json.dumps([row, row | {"answers": []}]))
    with pytest.raises(ConfigError, match=r"bad\.json, row 1: column 'answers': no gold answer"):
        long_qa.main(["lines", f"--rows={tmp_path / 'bad.json'}", f"--out={tmp_path / 'bad.jsonl'}"])
    assert not (tmp_path / "bad.jsonl").exists() and not list(tmp_path.glob(".bad*"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"question": ""}, "column 'question': must not be empty"),
        ({"answer": 7}, "column 'answer': must be text"),
        ({"context": "text"}, "column 'context': must be a list"),
        ({"context": []}, "column 'context': has no document"),
        ({"context": [["A"]]}, "column 'context[0]': must be [title, [sentence, ...]]"),
        ({"context": [["A", ["b"]], ["A", "b"]]}, "column 'context[1][1]': must be a list"),
        ({"context": [["A", ["b"]], [" ", []]]}, "column 'context[1]': is a document without a word"),
        ({"context": [["A", [1]]]}, "column 'context[0][1]': must be a list of texts"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, changes, told):
    with pytest.raises(ConfigError) as refused:
        build(tmp_path, train=[question(0), question(1, **changes)])
    assert str(refused.value).startswith(f"{tmp_path / 'train.json'}, row 1: {told}")
    assert not (tmp_path / "out").exists()


def test_too_few_documents_and_files_that_are_not_there(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--num_docs=2 is less than the documents of the question 'hotpotqa/train/q0'"
    ):
        build(tmp_path, num_docs=2)
    with pytest.raises(ConfigError, match="There is no file"):
        long_qa.build(tmp_path / "none.json", None, tmp_path / "out", 5)


def test_a_copy_without_paragraphs_says_what_it_lacks(tmp_path):
    path = SHARED / "hotpotqa-react" / "hotpot_dev_v1_simplified.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    with pytest.raises(ConfigError, match=r"row 0: column 'context': missing: this copy has questions alone"):
        long_qa.build(path, None, tmp_path / "out", 20)
