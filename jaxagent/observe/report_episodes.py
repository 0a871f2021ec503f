"""The episodes that a report shows: which of a workdir's logs, however long these have grown, and their markup.

Evaluation episodes come from `episodes.jsonl` (episodes.py), training episodes, where `log_episodes` kept them, from
`episodes/<stage>.jsonl` (data/episode_log.py), whose tokens get their text from the run's tokenizer. Only the two ends
of a log are read. The page holds them as JSON (`compact`), and report.js shows them, token by token.
"""

from __future__ import annotations

import html
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.data.episode_log import EVALUATION
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.observe.episodes import report_record
from jaxagent.observe.files import EPISODES_FILE, EPISODES_FOLDER
from jaxagent.types import StopReason, TokenKind

READ_BYTES = 16_000_000  # of a log, from its beginning and its end together
SHOWN_BYTES = 6_000_000  # of all episodes that can be browsed, as they stand in the page
_KINDS = (("prompt", "var(--prompt)"), ("action (sampled, trained)", "rgb(var(--action))"))
_KINDS += (("observation", "var(--observation)"), ("warning", "var(--warning)"))

Record = dict[str, Any]


def markup(pairs: Sequence[Sequence[Record]], browsed: Sequence[Record], sentence: str) -> str:
    """Where report.js puts the chosen episodes and the list of all, and the compact records of both."""
    records = {"pairs": [[compact(record) for record in pair] for pair in pairs], "all": browsed}
    data = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")  # no tag can begin in it
    key = "".join(f'<span class="key" style="--c:{colour}">{name}</span>' for name, colour in _KINDS)
    choices = "".join(
        f'<label>{title}<select data-by="{name}"><option value="">all</option></select></label>'
        for name, title in (
            ("stage", "stage"), ("split", "split"), ("step", "step"), ("kind", "kind"), ("stop_reason", "ended by"),
            ("result", "reward"),
        )
    )  # fmt: skip
    chosen = (
        '<h2>Episodes</h2><p class="note">The same held-out question, first and last time it was tried. The darker a '
        "sampled token, the less sure the policy was of it; point at a token for its log-prob. The middle of what is "
        f'long is folded.</p><div class="kinds">{key}</div><div id="pairs">This needs JavaScript.</div>'
    )
    browser = (
        f'<h2>All episodes</h2><p class="note">{html.escape(sentence)}</p><div id="browser">'
        f'<form class="filters">{choices}'
        '<label class="wide">text<input type="search" data-by="text" placeholder="prompt, answer, tokens"></label>'
        '</form><p class="note count">This list needs JavaScript.</p><div class="rows"></div>'
        '<button type="button" class="more" hidden>more</button></div>'
        f'<script type="application/json" id="episodes">{data}</script>'
    )
    return (chosen if pairs else "") + (browser if browsed else "")


def choose(records: Iterable[Record], limit: int) -> list[list[Record]]:
    """Attempts by task, first and last of each: tasks whose reward rose first, then the rest, `limit` at most."""
    by_task: dict[str, list[Record]] = {}
    for record in records:
        by_task.setdefault(record["task"], []).append(record)
    pairs = [[tries[0]] if len(tries) == 1 else [tries[0], tries[-1]] for tries in by_task.values()]

    def gain(pair: list[Record]) -> float:
        return pair[-1]["reward"] - pair[0]["reward"]

    pairs.sort(key=lambda pair: (-gain(pair), -pair[-1]["turns"]))
    if len(pairs) <= limit:
        return pairs
    # Mostly what was learned, and always a few that went wrong: a report of successes alone misleads.
    worst = sorted(pairs[limit // 2 :], key=lambda pair: pair[-1]["reward"])[: limit - limit * 2 // 3]
    return pairs[: limit * 2 // 3] + worst


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
