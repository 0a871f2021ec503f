"""The logged episodes of a workdir, as much of them as a report shows, however long the logs have grown.

Evaluation episodes come from `episodes.jsonl` (episodes.py), training episodes, where `log_episodes` kept them, from
`episodes/<stage>.jsonl` (data/episode_log.py), whose tokens get their text from the run's tokenizer. Only the two ends
of a log are read.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.episode_log import EVALUATION
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.observe.episodes import report_record
from jaxagent.observe.files import EPISODES_FILE, EPISODES_FOLDER
from jaxagent.types import StopReason, TokenKind

READ_BYTES = 16_000_000  # of a log, from its beginning and its end together
SHOWN_BYTES = 6_000_000  # of all episodes that can be browsed, as they stand in the page

Record = dict[str, Any]


def evaluations(workdir: pathlib.Path, limit: int = READ_BYTES) -> list[Record]:
    """Evaluation episodes in the order of the log: all, or the first and the last `limit` bytes' worth together."""
    path = workdir / EPISODES_FILE
    return [report_record(json.loads(line)) for line in _ends(path, limit)]


def browsed(workdir: pathlib.Path, config: Mapping[str, Any], limit: int = SHOWN_BYTES) -> tuple[list[Record], str]:
    """The episodes that the page can browse, newest first, and a sentence that says how many of all they are.

    Evaluation episodes have at least half of `limit`; see `compact` for the form.
    """
    logs = sorted(
        path
        for path in (workdir / EPISODES_FOLDER).glob("*.jsonl")
        if not path.name.endswith(EVALUATION)  # these stand in EPISODES_FILE too
    )
    records, complete, bytes_so_far = _newest(workdir / EPISODES_FILE, limit // 2 if logs else limit, None)
    table = _token_table(workdir, config) if logs else []
    for index, path in enumerate(logs):
        more, all_of_it, bytes_used = _newest(path, (limit - bytes_so_far) // (len(logs) - index), table)
        records, complete, bytes_so_far = records + more, complete and all_of_it, bytes_so_far + bytes_used
    names = ", ".join([EPISODES_FILE, *(f"{EPISODES_FOLDER}/{path.name}" for path in logs)])
    sentence = f"All {len(records):,} logged episodes"
    if not complete:
        sentence = f"The newest {len(records):,} logged episodes: this page takes {limit / 1e6:g} MB of them"
    by_number = " Tokens of training episodes are shown by number: the run's tokenizer is not there."
    return records, f"{sentence}. Everything lies in {names}.{by_number if table is None else ''}"


def compact(record: Mapping[str, Any]) -> Record:
    """A report's record, smaller: equal values as run lengths, log-probs of sampled tokens only."""
    keys = ("split", "task", "kind", "prompt", "answers", "stage", "step", "sample", "rewards", "stop_reason", "error")
    return {
        **{key: record[key] for key in (*keys, "turns")},
        "reward": None if StopReason(record["stop_reason"]).is_failure else record["reward"],
        "trajectories": [_compact(t) for t in record["trajectories"]],
        **({"heard": record["heard"]} if record.get("heard") else {}),
    }


def _compact(columns: Mapping[str, Any]) -> Record:
    at = [i for i, kind in enumerate(columns["kind"]) if kind == TokenKind.ACTION]
    logprobs = [columns["logprob"][i] for i in at]  # None: it was not finite
    return {
        "text": columns["text"],
        "kind": "".join(map(str, columns["kind"])),
        "turn": _runs(columns["turn"]),
        "logprob": [None if value is None else round(value, 3) for value in logprobs],
        "version": _runs([columns["version"][i] for i in at]),
    }


def _token_table(workdir: pathlib.Path, config: Mapping[str, Any]) -> list[bytes] | None:
    """Bytes of the run's tokens; None where its tokenizer is not found."""
    named = [config.get(section, {}).get("path", "") for section in ("tokenizer", "model")]
    for folder in (*filter(None, named), workdir / "tokenizer", workdir / "policy"):
        try:
            return Tokenizer.load(folder).token_bytes()
        except (ConfigError, OSError):
            continue
    return None


def _newest(path: pathlib.Path, limit: int, table: Sequence[bytes] | None) -> tuple[list[Record], bool, int]:
    """(records, newest first, whether that is the whole log, bytes used). `table[id]` are a token's bytes."""
    shown_records, bytes_so_far = [], 0
    lines = list(_ends(path, READ_BYTES, tail_only=True)) if path.is_file() else []
    for line in reversed(lines):
        record = compact(report_record(json.loads(line), table))
        size = len(json.dumps(record, separators=(",", ":")))
        if bytes_so_far + size > limit:
            return shown_records, False, bytes_so_far
        shown_records.append(record)
        bytes_so_far += size
    return shown_records, not path.is_file() or path.stat().st_size <= READ_BYTES, bytes_so_far


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
