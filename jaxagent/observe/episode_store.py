"""Every episode of a run, whole: `episodes/<name>.index` and the blocks it points into, `episodes/<name>.<n>.blocks`.

A name is a stage's, or "<stage>.eval" for held-out tasks. Episodes are appended in blocks, compressed, as data/codec.py
writes them, with what the trainer made of their tokens beside them (`Learnt`). The index has a line of JSON per block,
with a column for each thing that people look for an episode by; it is read whole, and the blocks are not. A block is on
disk before its line is, so a process that is killed leaves at most bytes that no line points to.

    {"step": 3, "file": 0, "at": 91234, "texts": 5120, "body": 30500, "tasks": ["t1"], "kinds": ["one_hop"],
     "task": [0, 0], "sample": [24, 25], "reward": [1.0, null], "advantage": [0.7, null], "stop": ["answer", "timeout"],
     "turns": [2, 1], "tokens": [310, 80], "sampled": [40, 9], "seconds": [0.4, 60.0], "error": ["", "60 s are over"],
     "crc": 1234567890}

"advantage" is the mean over an episode's trained tokens, null where none was trained. "crc" is the CRC-32 of the line
before it; the first runs had none. Lines stay where blocks are given up (`config.episodes`): such a line has "body" 0,
or its file, one of the oldest, is gone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxagent.config import ConfigError, EpisodesConfig
from jaxagent.data import codec, episode_log
from jaxagent.observe import jsonl
from jaxagent.types import Episode, TokenKind

INDEX, BLOCKS = ".index", ".blocks"
BLOCK_EPISODES, BLOCK_TOKENS, BLOCK_CHARS = 64, 1 << 18, 1 << 22  # of a block, at most, unless one episode has more
FILES = 8  # of a log that keeps the newest: the oldest file goes as a whole
ERROR_CHARS = 160  # of a failure, in the index
MOST_BYTES = 1 << 31  # of one block that is read


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What the trainer made of one trajectory's tokens. Arrays are f32[T] and bool[T]."""

    advantages: np.ndarray
    logprobs: np.ndarray  # the trainer's; NaN where it was not asked, or the policy did not sample
    mask: np.ndarray  # whether the policy's loss counts the token


class EpisodeStore:
    """Appends to one log. A thread of its own compresses and writes; `wait` says that all is on disk."""

    def __init__(self, folder: Path, name: str, position: int, keep: EpisodesConfig, learns: bool):
        """Opens a log, keeping its first `position` blocks: what an interrupted run wrote after them goes.

        Args:
          learns: whether later stages learn from these episodes: then all are kept, whatever `keep` says.

        Raises:
          ConfigError: another process has it open, or it has fewer blocks.
        """
        self._folder, self._name, self._learns = folder, name, learns
        self._keep = EpisodesConfig() if learns else keep
        self._index = jsonl.JsonlLog(folder / f"{name}{INDEX}", position)
        try:
            blocks = StoredEpisodes(folder, name).blocks
        except ConfigError:
            self._index.close()
            raise
        self._file = blocks[-1]["file"] if blocks else 0
        ends = {block["file"]: block["at"] + block["texts"] + block["body"] for block in blocks}
        for number, path in files_of(folder, name).items():
            if number > self._file:
                path.unlink()
            elif path.stat().st_size > ends.get(number, 0):
                os.truncate(path, ends.get(number, 0))
        if self._size() < ends.get(self._file, 0):  # it was given up before the run went back; lines point into it
            self._file += 1
            self._path().touch()
        self._thread = ThreadPoolExecutor(1, "episodes")
        self._written: list[Future[None]] = []
        self.dropped = 0  # episodes, or files of them, whose tokens this process has given up

    @property
    def position(self) -> int:
        """Blocks that are on disk, once `wait` has returned."""
        return self._index.position

    def append(self, step: int, episodes: Iterable[Episode], learnt: Mapping[int, Learnt]) -> None:
        """Takes the episodes of a step; `learnt` is by the `id` of a trajectory. Raises OSError as `wait` does."""
        self._written = [written for written in self._written if not written.done() or written.result()]
        episodes = list(episodes)
        # Here, and not by the thread: an id is an object's only as long as the object is there.
        columns = [[learnt.get(id(trajectory)) for trajectory in episode.trajectories] for episode in episodes]
        self._written.append(self._thread.submit(self._append, step, episodes, columns))

    def wait(self) -> None:
        """On return all that was appended is on disk. Raises OSError, each time: the disk was full, or failed."""
        for written in self._written:
            written.result()
        self._written = []

    def close(self) -> None:
        """Ends the thread when it has written what it was given."""
        self._thread.shutdown()
        self._index.close()

    def _append(self, step: int, episodes: list[Episode], learnt: list[list[Learnt | None]]) -> None:
        if any(written.done() and written.exception() for written in self._written):
            return  # what follows a hole is no log: `append` and `wait` say so
        whole = [self._keeps(step, episode) for episode in episodes]
        if self._keep.keep == "sampled":  # with a failed attempt, all attempts at its task
            failed = {episode.task.id for episode in episodes if episode.stop_reason.is_failure}
            whole = [yes or episode.task.id in failed for yes, episode in zip(whole, episodes, strict=True)]
        for wanted in (True, False):
            chosen = [
                pair for pair, yes in zip(zip(episodes, learnt, strict=True), whole, strict=True) if yes is wanted
            ]
            for part in _blocks(chosen):
                self._write(step, [episode for episode, _ in part], [columns for _, columns in part], wanted)

    def _keeps(self, step: int, episode: Episode) -> bool:
        if self._keep.keep != "sampled":
            return True
        digest = hashlib.blake2b(f"{step}\0{episode.task.id}".encode(errors="replace"), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._keep.fraction * 2**64

    def _write(self, step: int, episodes: list[Episode], learnt: list[list[Learnt | None]], whole: bool) -> None:
        texts, body = pack(episodes, learnt, step) if whole else (b"", b"")
        at, most = self._size(), self._keep.megabytes * 1_000_000
        if self._keep.keep == "newest" and at and at + len(texts) + len(body) > most // FILES:
            self._file, at = self._file + 1, 0
            older = {path: path.stat().st_size for path in files_of(self._folder, self._name).values()}
            total = sum(older.values()) + max(most // FILES, len(texts) + len(body))
            for path, size in older.items():
                if total > most:
                    path.unlink()
                    total, self.dropped = total - size, self.dropped + 1
        if whole:
            try:
                with self._path().open("ab") as file:
                    file.write(texts + body)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path())) from error
        else:
            self.dropped += len(episodes)
        where = {"step": step, "file": self._file, "at": at, "texts": len(texts), "body": len(body)}
        self._index.append(index_line(where, episodes, learnt, self._learns))

    def _path(self) -> Path:
        return self._folder / f"{self._name}.{self._file:05d}{BLOCKS}"

    def _size(self) -> int:
        return self._path().stat().st_size if self._path().exists() else 0


def files_of(folder: Path, name: str) -> dict[int, Path]:
    """The files of a log's blocks, by number, in order."""
    numbers = {path: path.name[len(name) + 1 : -len(BLOCKS)] for path in folder.glob(f"{name}.*{BLOCKS}")}
    return dict(sorted((int(number), path) for path, number in numbers.items() if number.isdecimal()))


def _blocks(pairs: Sequence[tuple[Episode, Any]]) -> Iterator[list[tuple[Episode, Any]]]:
    block, tokens, chars = list[tuple[Episode, Any]](), 0, 0
    for episode, learnt in pairs:
        block.append((episode, learnt))
        tokens, chars = tokens + sum(map(len, episode.trajectories)), chars + len(episode.text)
        if len(block) == BLOCK_EPISODES or tokens > BLOCK_TOKENS or chars > BLOCK_CHARS:
            yield block
            block, tokens, chars = [], 0, 0
    if block:
        yield block


def index_line(
    where: Mapping[str, int], episodes: Sequence[Episode], learnt: Sequence[Sequence[Learnt | None]], learns: bool
) -> dict[str, Any]:
    """A line of the index; `where` is its step, and where its block lies."""
    line = dict(where) | ({"learns": True} if learns else {}) | columns_of(episodes, learnt)
    return line | {"crc": zlib.crc32(jsonl.line(line)[: -len(b"}\n")])}


def columns_of(episodes: Sequence[Episode], learnt: Sequence[Sequence[Learnt | None]]) -> dict[str, list[Any]]:
    """A line of the index, but for where its block lies."""
    tasks = {episode.task.id: episode.task for episode in episodes}
    places = {name: place for place, name in enumerate(tasks)}
    forks = [None if e.fork_of is None else [e.fork_of, e.forked_at] for e in episodes]  # of whom, at which turn
    return {
        "tasks": list(tasks),
        "kinds": [task.kind for task in tasks.values()],
        "task": [places[episode.task.id] for episode in episodes],
        "sample": [episode.sample for episode in episodes],
        "reward": [None if e.stop_reason.is_failure else round(e.total_reward, 6) for e in episodes],
        "advantage": [_mean_advantage(columns) for columns in learnt],
        "stop": [str(episode.stop_reason) for episode in episodes],
        "turns": [episode.turns for episode in episodes],
        "tokens": [sum(map(len, episode.trajectories)) for episode in episodes],
        "sampled": [sum(int((t.kinds == TokenKind.ACTION).sum()) for t in e.trajectories) for e in episodes],
        "seconds": [round(float(episode.metrics.get("total_s", 0.0)), 3) for episode in episodes],
        "error": [episode.error[:ERROR_CHARS] for episode in episodes],
        **({"fork": forks} if any(forks) else {}),
    }


def _mean_advantage(learnt: Sequence[Learnt | None]) -> float | None:
    trained = [columns.advantages[columns.mask] for columns in learnt if columns is not None]
    values = np.concatenate(trained) if trained else np.zeros(0)
    return round(float(values.mean()), 5) if len(values) else None


def pack(episodes: Sequence[Episode], learnt: Sequence[Sequence[Learnt | None]], step: int) -> tuple[bytes, bytes]:
    """The two parts of a block: texts, that are searched and shown in lists, and all the rest.

    The step stands in it for who makes a lost index anew (episode_index.py).
    """
    texts = [[episode.text, episode.task.prompt, words(episode)] for episode in episodes]
    columns = _columns([dataclasses.replace(episode, text="") for episode in episodes])
    has = [[trajectory is not None for trajectory in each] for each in learnt]
    trained = [trajectory for each in learnt for trajectory in each if trajectory is not None]
    about = json.dumps({"step": step, "has": has})
    parts = [len(columns).to_bytes(8, "little"), columns, about.encode(), b"\n"]
    for name, dtype in LEARNT.items():
        parts += [getattr(trajectory, name).astype(dtype).tobytes() for trajectory in trained]
    return zlib.compress(json.dumps(texts).encode(), codec.LEVEL), zlib.compress(b"".join(parts), codec.LEVEL)


def _columns(episodes: Sequence[Episode]) -> bytes:
    """`codec.to_columns`, also where a task or a counter says something in NumPy's numbers."""
    try:
        return codec.to_columns(episodes)
    except TypeError:
        plain = [
            dataclasses.replace(
                episode,
                task=dataclasses.replace(episode.task, metadata=jsonl.plain(dict(episode.task.metadata))),
                metrics=jsonl.plain(dict(episode.metrics)),
            )
            for episode in episodes
        ]
    try:
        return codec.to_columns(plain)
    except TypeError as error:
        raise ConfigError(f"An episode of '{episodes[0].task.id}' cannot be kept, it is not JSON: {error}.") from error


LEARNT = {"advantages": "<f4", "logprobs": "<f4", "mask": "?"}


def words(episode: Episode) -> str:
    """What is searched beside an episode's text and prompt: the rest of its task, its failure, what others said."""
    heard = [part for conversation in episode.heard for turn in conversation.turns for part in turn]
    task = episode.task
    return "\n".join([*task.answers, task.id, task.kind, episode.error, *heard])


def unpack(raw: bytes, texts: bytes) -> tuple[int | None, list[tuple[Episode, list[Learnt | None]]]]:
    """The step of a block, None where the first version wrote it, and its episodes; both parts are inflated.

    Raises ConfigError, ValueError, LookupError or TypeError where it is damaged.
    """
    end = 8 + int.from_bytes(raw[:8], "little")
    episodes = codec.of_columns(raw[8:end])
    line = raw.index(b"\n", end)
    about = json.loads(raw[end:line])
    step, has = (about["step"], about["has"]) if isinstance(about, dict) else (None, about)
    lengths = [
        len(trajectory)
        for episode, each in zip(episodes, has, strict=True)
        for trajectory, yes in zip(episode.trajectories, each, strict=True)
        if yes
    ]
    at, columns = line + 1, dict[str, np.ndarray]()
    for name, dtype in LEARNT.items():
        columns[name] = np.frombuffer(raw, dtype, sum(lengths), at)
        at += columns[name].nbytes
    cuts = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    trained = (Learnt(**{name: column[a:b] for name, column in columns.items()}) for a, b in cuts)
    return step, [
        (dataclasses.replace(episode, text=text), [next(trained) if yes else None for yes in each])
        for episode, each, (text, *_) in zip(episodes, has, json.loads(texts), strict=True)
    ]


def inflate(part: bytes) -> bytes:
    """Raises zlib.error where it is damaged, cut off, or grows beyond all bounds."""
    decompress = zlib.decompressobj()
    content = decompress.decompress(part, MOST_BYTES)
    if not decompress.eof:
        raise zlib.error("a block is cut off, or too long")
    return content


def line_of(line: bytes, path: Path, at: int) -> dict[str, Any]:
    """A line of the index at byte `at`. Raises ConfigError: it is damaged."""
    try:
        block = json.loads(line)
        if block.get("crc") not in (None, zlib.crc32(line[: line.rfind(b',"crc":')])):
            raise ValueError("its checksum differs")
        if block.keys() >= {"file", "at", "texts", "body", "sample"}:
            return block
        raise ValueError("it lacks columns")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}, byte {at}: damaged ({error}).") from None


def read(path: Path) -> tuple[list[Episode], int]:
    """The logged training episodes of a folder, of one index, or of one file of lines as earlier versions wrote it.

    Of a folder, those of which stages learn: a stage's "sample", and RL's with `episodes.learn`; logs of held-out tasks
    never. The number is that of what killed processes left unfinished, and is left out.

    Raises:
      ConfigError: there are none, or what is there is damaged.
    """
    if path.suffix != INDEX and not (path.is_dir() and any(path.glob(f"*{INDEX}"))):
        return episode_log.read(path)
    logs = [path] if path.suffix == INDEX else sorted(path.glob(f"*{INDEX}"))
    episodes, torn = list[Episode](), 0
    for log in logs:
        if log.is_file() and not log.stem.endswith(episode_log.EVALUATION):
            own = StoredEpisodes(log.parent, log.stem)
            for block in own.blocks:
                if block.get("learns") or log == path:
                    episodes += (whole := own.of(block))
                    if block.get("learns") and not whole:
                        raise ConfigError(f"{log}: episodes of step {block['step']}, to be learnt from, were given up.")
            torn += own.torn
    if path.is_dir() and any(not f.stem.endswith(episode_log.EVALUATION) for f in path.glob("*.jsonl")):
        earlier, more = episode_log.read(path)
        episodes, torn = earlier + episodes, torn + more
    if not episodes:
        raise ConfigError(f"'{path}' holds no complete episode. Log some: a stage 'sample', or episodes.learn=true.")
    return episodes, torn


class StoredEpisodes:
    """Reads one log, also while it is written. Rows are numbered as they lie there.

    Attributes:
      blocks: the lines of the index that were read; "first" is the number of a block's first row.
      torn: 1 where the log ends in the middle of a line.
    """

    def __init__(self, folder: Path, name: str):
        """Reads the index. Raises ConfigError where a line of it is damaged."""
        self.folder, self.name = folder, name
        self.blocks: list[dict[str, Any]] = []
        self._firsts: list[int] = []
        self.rows = self.torn = self._end = 0
        self._last = b""  # the last line that was read
        self.refresh()

    def refresh(self) -> None:
        """Reads what was appended; begins anew where a run has gone back to an earlier bundle."""
        path = self.folder / f"{self.name}{INDEX}"
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                file.seek(0)
                self.blocks, self._firsts, self.rows, self._end, self._last = [], [], 0, 0, b""
            new = file.read()
        for line in new.splitlines(keepends=True):
            self.torn = int(not line.endswith(b"\n"))
            if not self.torn:
                block = line_of(line, path, self._end)
                self._firsts.append(self.rows)
                self.blocks.append(block | {"first": self.rows})
                self.rows += len(block["sample"])
                self._end, self._last = self._end + len(line), line

    def block_of(self, row: int) -> dict[str, Any]:
        """The line of the index that has a row. Raises ConfigError: there is none."""
        if not 0 <= row < self.rows:
            raise ConfigError(f"{self.name} has no episode {row}: there are {self.rows}.")
        return self.blocks[int(np.searchsorted(self._firsts, row, "right")) - 1]

    def part(self, block: Mapping[str, Any], body: bool) -> bytes | None:
        """The compressed body or texts of a block; None where it was given up. Raises ConfigError: its file is lost."""
        path = self.folder / f"{self.name}.{block['file']:05d}{BLOCKS}"
        if not block["body"]:
            return None
        if not path.is_file():
            if block["file"] >= min(files_of(self.folder, self.name), default=0):  # only the oldest are given up
                raise ConfigError(f"{path} is gone, and {self.name}{INDEX} has episodes in it: the folder was changed.")
            return None
        with path.open("rb") as file:
            file.seek(block["at"] + (block["texts"] if body else 0))
            return file.read(block["body" if body else "texts"])

    def texts(self, block: Mapping[str, Any]) -> list[list[str]] | None:
        """Each episode's text, prompt and other words (`words`); None where they were given up.

        Raises ConfigError: the block is damaged.
        """
        part = self.part(block, body=False)
        return None if part is None else self._checked(block, lambda: json.loads(inflate(part)))

    def with_learnt(self, block: Mapping[str, Any]) -> list[tuple[Episode, list[Learnt | None]]] | None:
        """The episodes of a block, and what was learnt of each of their trajectories; None where they were given up.

        Raises ConfigError: the block is damaged.
        """
        body, texts = self.part(block, body=True), self.part(block, body=False)
        if body is None or texts is None:
            return None
        return self._checked(block, lambda: unpack(inflate(body), inflate(texts))[1])

    def of(self, block: Mapping[str, Any]) -> list[Episode]:
        """The episodes of a block; none where they were given up."""
        return [episode for episode, _ in self.with_learnt(block) or ()]

    def _checked(self, block: Mapping[str, Any], read_block: Any) -> Any:
        try:
            return read_block()
        except (ValueError, LookupError, TypeError, zlib.error) as error:
            where = f"{self.folder / self.name}.{block['file']:05d}{BLOCKS}, byte {block['at']}"
            raise ConfigError(f"{where}: damaged ({type(error).__name__}: {error}).") from None
