"""Questions over hundreds or thousands of documents, as MemAgent trains on and RULER-HQA measures with.

    python -m data_pipelines.long_qa build --train=hotpot_train_v1.1.json --test=hotpot_dev_distractor_v1.json \\
        --out=data/long_qa                                                     # one data set for every length
    python -m data_pipelines.long_qa export --data=data/long_qa --num_docs=50 --out=eval_50.jsonl
    python -m data_pipelines.long_qa export --data=data/long_qa --length_tokens=28000 --tokenizer=Qwen2.5-7B-Instruct \\
        --layout=memagent --split=train --tasks=1000 --out=train_28k.jsonl
    python -m data_pipelines.long_qa lines --rows=eval_3200.json --out=eval_3200.jsonl

build reads HotpotQA's own files: lists of {"question", "answer", "context": [[title, [sentence, ...]], ...]}. Copies
without `context` have no documents and are refused. It writes tasks with the numbers of their own documents (ten: two
that answer and eight that do not), and documents.jsonl with every document once; a context is put together when it is
read, with as many others of the split as env.num_docs or env.length_tokens say (50, 100, ..., 6400 documents are about
7K, 14K, ..., 900K tokens). The published training set is filtered: questions that Qwen2.5-7B answers without any
document are left out. That needs the model, and is not done here.

export writes the contexts out, in RULER-HQA's layout or MemAgent's, for other programs; a folder that
`data_pipelines.long_geography` made will do as well. lines turns a published .json list into a line per row, which a
run reads one by one and not all at once: `--config.data.eval_source=eval_3200.jsonl`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import count, exit_code
from jaxagent.data import fields, files, rows, sources
from jaxagent.data.fields import RowError
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.data_pipelines import generated
from jaxagent.envs.memagent import documents
from jaxagent.types import Task

NUM_DOCS = 200  # of a published training context: 28K to 32K tokens
_LAYOUTS = ("ruler", "memagent")


class Pool:
    """Documents of all splits, each once, by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def begin(self) -> int:
        """Begins a split, which shares no document with others; returns the number of its first."""
        self._numbers.clear()
        return len(self.texts)

    def add(self, text: str) -> int:
        """The number of a document, new or not."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


def build(train: Path, test: Path | None, out: Path, num_docs: int) -> dict[str, tuple[int, int]]:
    """Writes a dataset into `out`, which must not exist yet. Returns tasks and documents of every split.

    Raises:
      ConfigError: a missing or malformed file, named by file, row and column.
    """
    pool, made, counts = Pool(), {}, {}
    for split, path in {"train": train, "test": test}.items():
        if path is None:
            continue
        first = pool.begin()
        found = list(hotpotqa_rows(path, split, pool))
        whole = [first, len(pool.texts)]
        made[split] = [
            row | {"metadata": {"documents": own, "pool": whole, "num_docs": min(num_docs, whole[1] - whole[0])}}
            for row, own in found
        ]
        if short := next((row["id"] for row, own in found if len(own) > num_docs), None):
            raise ConfigError(f"--num_docs={num_docs} is less than the documents of the question '{short}' alone.")
        counts[split] = (len(found), whole[1] - whole[0])
    generated.write_dataset(out, made, {documents.FILE: ({"text": text} for text in pool.texts)})
    return counts


def hotpotqa_rows(path: Path, split: str, pool: Pool) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yields tasks of a file in HotpotQA's format, with the numbers of their documents.

    Raises:
      ConfigError: no file, or a malformed row, named by file, row and column.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file '{path}'.")
    data = files.open_rows(path, "")
    for index in range(len(data)):
        try:
            yield _hotpotqa(data[index], f"hotpotqa/{split}", index, pool)
        except RowError as error:
            raise ConfigError(f"{data.place(index)}: {error}.") from None


def _hotpotqa(row: Any, name: str, index: int, pool: Pool) -> tuple[dict[str, Any], list[int]]:
    row = fields.mapping(row, "*")
    question, answer = fields.text(row, "question"), fields.text(row, "answer")
    if "context" not in row:
        raise RowError(
            "context", "missing: this copy has questions alone. Documents are in HotpotQA's own distractor files"
        )
    own = [pool.add(document(entry, f"context[{i}]")) for i, entry in enumerate(_list(row["context"], "context"))]
    if not own:
        raise RowError("context", "has no document")
    kind = row.get("type")
    return {
        "id": f"{name}/{row.get('_id') or index}",
        "prompt": question.strip(),
        "answers": [answer],
        "kind": f"hotpotqa/{kind}" if isinstance(kind, str) and kind else "hotpotqa",
    }, list(dict.fromkeys(own))


def document(entry: Any, column: str) -> str:
    """A paragraph as one text, as published: its title on a line of its own, then its sentences."""
    pair = _list(entry, column)
    if len(pair) != 2 or not isinstance(pair[0], str):
        raise RowError(column, f"must be [title, [sentence, ...]], got {fields.show(entry)}")
    sentences = _list(pair[1], f"{column}[1]")
    if not all(isinstance(sentence, str) for sentence in sentences):
        raise RowError(f"{column}[1]", f"must be a list of texts, got {fields.show(sentences)}")
    if not (text := f"{pair[0]}\n{''.join(sentences)}").strip():
        raise RowError(column, "is a document without a word")  # a run would refuse it in the middle
    return text


def _list(value: Any, column: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RowError(column, f"must be a list, got {fields.show(value)}")
    return value


def exported(
    tasks: Iterable[Task],
    found: documents.Documents,
    layout: str,
    num_docs: int,
    length_tokens: int,
    tokenizer: Tokenizer | None,
) -> Iterator[dict[str, Any]]:
    """Yields rows with whole contexts, in a published layout."""
    for index, task in enumerate(tasks):
        documents.check(task, found, num_docs, length_tokens)
        texts = documents.texts_of_context(
            task, found, num_docs, length_tokens, lambda text: len(tokenizer.encode(text)) if tokenizer else 0
        )
        context = documents.numbered(texts)
        yield row_of(layout, task, index, context, len(texts))


def row_of(layout: str, task: Task, index: int, context: str, num_docs: int) -> dict[str, Any]:
    """A row of RULER-HQA's or MemAgent's layout."""
    answers = list(task.answers)
    if layout == "ruler":
        return {"context": context, "input": task.prompt, "answers": answers, "num_docs": num_docs, "index": index}
    return {
        "data_source": task.kind.partition("/")[0],
        "prompt": [{"role": "user", "content": task.prompt}],
        "context": context,
        "ability": "memory",
        "reward_model": {"style": "rule", "ground_truth": answers},
        "extra_info": {"index": index, "question": task.prompt, "num_docs": num_docs},
    }


def lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the checked rows of a .json list in a published layout."""
    if not path.is_file():
        raise ConfigError(f"There is no file '{path}'.")
    data = files.open_rows(path, "")
    for index in range(len(data)):
        rows.check(data[index], data.place(index), True)
        yield data[index]


def parser() -> argparse.ArgumentParser:
    """The flags of the three commands."""
    out = argparse.ArgumentParser(
        prog="python -m data_pipelines.long_qa",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = out.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="HotpotQA's files -> a data set for every length")
    one.add_argument("--train", required=True, type=Path, help="hotpot_train_v1.1.json")
    one.add_argument("--test", type=Path, help="hotpot_dev_distractor_v1.json")
    one.add_argument("--num_docs", type=count, default=NUM_DOCS, help="of a context, unless a config says otherwise")
    one.add_argument("--out", required=True, type=Path, help="folder of the data set; must not exist")
    one = commands.add_parser("export", help="contexts of one length as rows of a published layout")
    one.add_argument("--data", required=True, type=Path, help="folder of a data set with documents.jsonl")
    one.add_argument("--split", default="", help="its split (default: the held-out one)")
    one.add_argument("--tasks", type=count, help="the first so many (default: all)")
    length = one.add_mutually_exclusive_group(required=True)
    length.add_argument("--num_docs", type=count, default=0, help="documents of every context")
    length.add_argument("--length_tokens", type=count, default=0, help="tokens of every context, at most")
    one.add_argument("--tokenizer", type=Path, help="folder of the tokenizer that counts them")
    one.add_argument("--layout", choices=_LAYOUTS, default="ruler")
    one.add_argument("--out", required=True, type=Path, help="jsonl to write; must not exist")
    one = commands.add_parser("lines", help="a published .json list -> jsonl")
    one.add_argument("--rows", required=True, type=Path, help="eval_50.json")
    one.add_argument("--out", required=True, type=Path, help="jsonl to write; must not exist")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    args = parser().parse_args(argv)
    if args.out.exists():
        raise ConfigError(f"{args.out} exists; remove it or choose another --out")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.command == "build":
        for split, (tasks, texts) in build(args.train, args.test, args.out, args.num_docs).items():
            print(f"{split}: {tasks:,} questions, {texts:,} documents")
    elif args.command == "export":
        _export(args)
    else:
        _write(args.out, lines(args.rows))
    print(f"wrote {args.out}")
    return 0


def _export(args: argparse.Namespace) -> None:
    if args.length_tokens and args.tokenizer is None:
        raise ConfigError("--length_tokens needs --tokenizer=FOLDER, which counts them.")
    split = args.split or next((name for name in sources.HELD_OUT if name in files.splits(args.data)), sources.TRAIN)
    tasks = itertools.islice(sources.load_tasks(args.data, split), args.tasks)
    tokenizer = Tokenizer.load(args.tokenizer) if args.tokenizer else None
    found = documents.Documents(args.data / documents.FILE)
    _write(args.out, exported(tasks, found, args.layout, args.num_docs, args.length_tokens, tokenizer))


def _write(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Writes lines beside `path`, and moves there what is complete."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        generated.write_jsonl(partial, items)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
