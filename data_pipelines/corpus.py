"""A corpus of passages, checked line by line, and its dense index.

    python -m data_pipelines.corpus --corpus=corpus.jsonl                                    # only check it
    python -m data_pipelines.corpus --corpus=corpus.jsonl --index=index --encoder=/ckpt/e5-base-v2

Every line is {"id": ..., "contents": "Title\\ntext"}. Then `--config.env.retriever.corpus=corpus.jsonl`, and for
the index `--config.env.retriever=dense --config.env.retriever.index=index`. BM25 needs no index of its own.

The encoder is a Hugging Face folder (transformers and torch installed), or "hashing:SIZE" for a trial without a model.
The corpus is read from disk as it goes. An interrupted run of the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.command import exit_code
from jaxagent.data import files
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.io.files import replace

CHUNK = 4096  # passages encoded between two savings of the position
_PASSAGES_PER_TELL = 1024  # drawing the bar more often would cost more than reading


class CorpusFile(Sequence[Passage]):
    """The passages of a jsonl file, read when asked for."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise ConfigError(f"No corpus at {path}.")
        self._rows = files.JsonlRows(path)
        if len(self._rows) == 0:
            raise ConfigError(f"{path} has no passages.")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Passage:  # type: ignore[override]  # slices are not offered
        """Passage `index`. Raises ConfigError, naming file, line and field, when it is malformed."""
        row, place = self._rows[index], self._rows.place(index)
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: a passage must be an object with id and contents.")
        for field in ("id", "contents"):
            if field not in row:
                raise ConfigError(f"{place}: field '{field}' is missing; the line has {', '.join(row) or 'no fields'}.")
        if not isinstance(row["id"], (str, int)) or isinstance(row["id"], bool):
            raise ConfigError(f"{place}: field 'id' must be text or a whole number, got {row['id']!r}.")
        if not isinstance(row["contents"], str) or not row["contents"].strip():
            raise ConfigError(f"{place}: field 'contents' must be non-empty text.")
        return Passage.from_contents(str(row["id"]), row["contents"])

    def __iter__(self) -> Iterator[Passage]:
        return (self[i] for i in range(len(self)))


@dataclasses.dataclass(frozen=True)
class Watched(Sequence[Passage]):
    """Passages that tell `tell(passages read)` as they are gone through."""

    passages: CorpusFile
    tell: Callable[[int], None]

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, index: int) -> Passage:  # type: ignore[override]
        return self.passages[index]

    def __iter__(self) -> Iterator[Passage]:
        for count, passage in enumerate(self.passages, 1):
            yield passage
            if count % _PASSAGES_PER_TELL == 0 or count == len(self):
                self.tell(count)


def write_index(
    folder: Path, passages: Sequence[Passage], corpus: str, encoder_name: str, progress: Callable[[int], None]
) -> None:
    """Encodes `passages` into an index folder as `jaxagent.envs.search.retriever.dense` reads it, or goes on doing so.

    Args:
      folder: gets vectors.npy (f32[N, E]) and, last of all, index.json.
      passages: the N passages of the corpus.
      corpus: their fingerprint.
      encoder_name: what `open_encoder` opens.
      progress: called with the number of passages done.

    Raises:
      ConfigError: the folder belongs to another corpus or encoder, or the encoder cannot be opened.
    """
    import numpy as np

    from jaxagent.envs.search.retriever.dense import open_encoder

    facts = {"encoder": encoder_name, "passages": len(passages), "corpus": corpus}
    finished, position = folder / "index.json", folder / "progress.json"
    if finished.exists():
        if _read(finished) != facts:
            raise ConfigError(f"{folder} holds the index of another corpus or encoder; choose another --index.")
        progress(len(passages))
        return
    folder.mkdir(parents=True, exist_ok=True)
    encoder = open_encoder(encoder_name)
    size = encoder([passages[0].contents], "passage").shape[1]
    started = _read(position) if position.exists() and (folder / "vectors.npy").exists() else None
    if started and {key: started.get(key) for key in facts} != facts:
        raise ConfigError(f"{folder} holds the unfinished index of another corpus or encoder; choose another --index.")
    shape = (len(passages), size)
    vectors = np.lib.format.open_memmap(
        folder / "vectors.npy", mode="r+" if started else "w+", dtype=None if started else np.float32, shape=shape
    )
    for start in range(started["done"] if started else 0, len(passages), CHUNK):
        end = min(start + CHUNK, len(passages))
        vectors[start:end] = encoder([passages[i].contents for i in range(start, end)], "passage")
        vectors.flush()
        _write(position, {**facts, "done": end})  # only after its vectors are on disk
        progress(end)
    _write(finished, facts)
    position.unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}. Remove it to start over.") from None


def _write(path: Path, value: dict[str, Any]) -> None:
    replace(path, json.dumps(value, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for a mistake of the user's, told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipelines.corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--corpus", required=True, type=Path, help='jsonl of {"id", "contents"}')
    parser.add_argument("--index", type=Path, help="folder of the dense index; without it the corpus is only checked")
    parser.add_argument("--encoder", help="folder of a Hugging Face encoder, or hashing:SIZE")
    args = parser.parse_args(argv)
    if (args.index is None) != (args.encoder is None):
        parser.error("--index and --encoder go together")

    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn())
    try:
        passages = CorpusFile(args.corpus)
        with bars.Progress(*columns, bars.TimeRemainingColumn(), console=console) as bar:
            checking = bar.add_task("checking", total=len(passages))
            watched = Watched(passages, lambda count: bar.update(checking, completed=count))
            from jaxagent.envs.search.retriever.dense import fingerprint

            corpus = fingerprint(watched)  # reads, and so checks, every line
            if args.index is not None:
                encoding = bar.add_task("encoding", total=len(passages))
                write_index(args.index, passages, corpus, args.encoder, lambda n: bar.update(encoding, completed=n))
    except ConfigError as error:
        console.print(f"error: {error}", markup=False)
        return 2
    console.print(f"{args.corpus}: {len(passages):,} passages, fingerprint {corpus}", markup=False)
    if args.index is not None:
        console.print(f"index written to {args.index}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
