"""The logged episodes of a workdir, as much of them as a report shows, however long the logs have grown.

Evaluation episodes come from `episodes.jsonl` (episodes.py), training episodes, where `log_episodes` kept them, from
`episodes/<stage>.jsonl` (data/episode_log.py), whose tokens get their text from the run's tokenizer. Only the two ends
of a log are read.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.episode_log import EVALUATION
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.observe.episodes import token_texts
from jaxagent.observe.files import EPISODES_FILE, EPISODES_FOLDER
from jaxagent.types import StopReason

READ_BYTES = 16_000_000  # of a log, from its beginning and its end together
SHOWN_BYTES = 6_000_000  # of all episodes that can be browsed, as they stand in the page

Record = dict[str, Any]


def evaluations(workdir: pathlib.Path, limit: int = READ_BYTES) -> list[Record]:
    """Evaluation episodes in the order of the log: all, or the first and the last `limit` bytes' worth together."""
    path = workdir / EPISODES_FILE
    return [json.loads(line) for line in _ends(path, limit)]


def browsed(workdir: pathlib.Path, config: Mapping[str, Any], limit: int = SHOWN_BYTES) -> tuple[list[Record], str]:
    """The episodes that the page can browse, newest first, and a sentence that says how many of all they are.

    Evaluation episodes have at least half of `limit`; see `compact` for the form.
    """
    logs = sorted(
        path
        for path in (workdir / EPISODES_FOLDER).glob("*.jsonl")
        if not path.name.endswith(EVALUATION)  # these stand in EPISODES_FILE too
    )
    found, whole, used = _newest(workdir / EPISODES_FILE, limit // 2 if logs else limit, compact)
    table = _token_table(workdir, config) if logs else []
    of_log = functools.partial(compact_log, table=table)
    for index, path in enumerate(logs):
        more, all_of_it, bytes_used = _newest(path, (limit - used) // (len(logs) - index), of_log)
        found, whole, used = found + more, whole and all_of_it, used + bytes_used
    names = ", ".join([EPISODES_FILE, *(f"{EPISODES_FOLDER}/{path.name}" for path in logs)])
    said = f"All {len(found):,} logged episodes"
    if not whole:
        said = f"The newest {len(found):,} logged episodes: this page takes {limit / 1e6:g} MB of them"
    by_number = " Tokens of training episodes are shown by number: the run's tokenizer is not there."
    return found, f"{said}. Everything lies in {names}.{by_number if table is None else ''}"


def compact(record: Mapping[str, Any]) -> Record:
    """A record of episodes.py for the page: equal values as run lengths, log-probs of sampled tokens only."""
    trajectories = [
        (t["text"], t["kind"], t["turn"], *_sampled(t["logprob"], t["version"])) for t in record["trajectories"]
    ]
    return _compact(record, record, record["task"], record["split"], trajectories)


def compact_log(record: Mapping[str, Any], table: Sequence[bytes] | None) -> Record:
    """The same of a record of data/episode_log.py; `table[id]` are a token's bytes, None = ids stand for them."""
    task = record["task"]

    def known(tokens: Sequence[int]) -> bool:
        return table is not None and max(tokens, default=-1) < len(table)

    trajectories = [
        (
            token_texts(t["tokens"], table) if known(t["tokens"]) else [f" {token}" for token in t["tokens"]],
            t["kinds"],
            t["turns"],
            t["logprobs"],
            t["policy_versions"],
        )
        for t in record["trajectories"]
    ]
    return _compact(record, task, task["id"], "train", trajectories)


def _compact(record: Record, task: Record, name: str, split: str, trajectories: Sequence[tuple]) -> Record:
    return {
        "split": split,
        "task": name,
        **{key: task[key] for key in ("kind", "prompt", "answers")},
        **{key: record[key] for key in ("stage", "step", "sample", "rewards", "stop_reason", "error", "turns")},
        "reward": None if StopReason(record["stop_reason"]).is_failure else record["reward"],
        "trajectories": [
            {
                "text": text,
                "kind": "".join(map(str, kinds)),
                "turn": _runs(turns),
                "logprob": [None if value is None else round(value, 3) for value in logprobs],
                "version": _runs(versions),
            }
            for text, kinds, turns, logprobs, versions in trajectories
        ],
    }


def _sampled(logprobs: Sequence[float | None], versions: Sequence[int]) -> tuple[list[float], list[int]]:
    at = [i for i, value in enumerate(logprobs) if value is not None]
    return [logprobs[i] for i in at], [versions[i] for i in at]


def _token_table(workdir: pathlib.Path, config: Mapping[str, Any]) -> list[bytes] | None:
    """Bytes of the run's tokens; None where its tokenizer is not found."""
    named = [config.get(section, {}).get("path", "") for section in ("tokenizer", "model")]
    for folder in (*filter(None, named), workdir / "tokenizer", workdir / "policy"):
        try:
            return Tokenizer.load(folder).token_bytes()
        except (ConfigError, OSError):
            continue
    return None


def _newest(path: pathlib.Path, limit: int, convert: Callable[[Record], Record]) -> tuple[list[Record], bool, int]:
    """(records, newest first, whether that is the whole log, bytes used)."""
    found, used = [], 0
    lines = list(_ends(path, READ_BYTES, tail_only=True)) if path.is_file() else []
    for line in reversed(lines):
        record = convert(json.loads(line))
        size = len(json.dumps(record, separators=(",", ":")))
        if used + size > limit:
            return found, False, used
        found.append(record)
        used += size
    return found, not path.is_file() or path.stat().st_size <= READ_BYTES, used


def _ends(path: pathlib.Path, limit: int, tail_only: bool = False) -> Iterator[bytes]:
    """Complete lines of the first and last `limit` / 2 bytes, or of the last `limit`; of a small file all."""
    if not path.is_file():
        return
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size > limit:
            if not tail_only:
                head = file.read(limit // 2)
                yield from head[: head.rfind(b"\n") + 1].splitlines()
            file.seek(size - (limit if tail_only else limit // 2))
            file.readline()  # the rest of a line
        for line in file:
            if line.endswith(b"\n"):  # a process that is writing, or was killed, leaves a part of one
                yield line


def _runs(values: Sequence[int]) -> list[int]:
    """[count, value, count, value, ...]"""
    out: list[int] = []
    for value in values:
        if out and out[-1] == value:
            out[-2] += 1
        else:
            out += [1, value]
    return out
