"""The episodes that a report shows: which of a workdir's logs, however long these have grown, and their markup.

They come from the run's logs (episode_store.py), and their tokens get their text from the run's tokenizer. The page
holds them as JSON (`compact`), and report.js shows them, token by token.
"""

from __future__ import annotations

import html
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.data.codec import encode_episode
from jaxagent.data.episode_log import EVALUATION
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.observe.episode_store import INDEX, StoredEpisodes
from jaxagent.observe.episodes import report_record
from jaxagent.observe.files import EPISODES_FOLDER
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


def evaluations(workdir: pathlib.Path, table: Sequence[bytes] | None, limit: int = READ_BYTES) -> list[Record]:
    """Held-out episodes in the order of their logs: all, or the first and the last `limit` bytes' worth of each."""
    records = []
    for log in logs(workdir):
        if log.name.count(".") == 1 and log.name.endswith(EVALUATION):  # greedy ones
            sizes = np.cumsum([block["body"] for block in log.blocks])
            near = [s <= limit // 2 or sizes[-1] - s < limit // 2 for s in sizes]
            chosen = [block for block, yes in zip(log.blocks, near, strict=True) if yes]
            records += [record for block in chosen for record in records_of(log, block, table)]
    return records


def browsed(workdir: pathlib.Path, table: Sequence[bytes] | None, limit: int = SHOWN_BYTES) -> tuple[list[Record], str]:
    """The episodes that the page can browse, newest first of each log, and a sentence that says how many of all."""
    records, rows, every = [], 0, logs(workdir)
    for index, log in enumerate(every):
        rows += log.rows
        left = (limit - sum(len(json.dumps(r, separators=(",", ":"))) for r in records)) // (len(every) - index)
        for block in reversed(log.blocks):
            for record in reversed(records_of(log, block, table)):
                left -= len(json.dumps(small := compact(record), separators=(",", ":")))
                if left < 0:
                    break
                records.append(small)
            if left < 0:
                break
    sentence = f"All {rows:,} episodes"
    if len(records) < rows:
        sentence = f"The newest {len(records):,} of {rows:,} episodes: this page takes {limit / 1e6:g} MB of them"
    by_number = " Tokens are shown by number: the run's tokenizer is not there." if table is None else ""
    return records, f"{sentence}. All can be seen with: python -m jaxagent.view {workdir}.{by_number}"


def logs(workdir: pathlib.Path) -> list[StoredEpisodes]:
    """The logs of a run's episodes, by name."""
    folder = workdir / EPISODES_FOLDER
    return [StoredEpisodes(folder, path.name.removesuffix(INDEX)) for path in sorted(folder.glob(f"*{INDEX}"))]


def records_of(log: StoredEpisodes, block: Mapping[str, Any], table: Sequence[bytes] | None) -> list[Record]:
    """A block's episodes as the report shows them; none where their tokens were given up."""
    split, stage = ("eval" if log.name.endswith(EVALUATION) else "train"), log.name.partition(".")[0]
    rows = ({"stage": stage, "step": block["step"], "split": split, **encode_episode(e)} for e in log.of(block))
    return [report_record(row, table) for row in rows]


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


def token_table(workdir: pathlib.Path, config: Mapping[str, Any]) -> list[bytes] | None:
    """Bytes of the run's tokens; None where its tokenizer is not found."""
    named = [config.get(section, {}).get("path", "") for section in ("tokenizer", "model")]
    for folder in (*filter(None, named), workdir / "tokenizer", workdir / "policy"):
        try:
            return Tokenizer.load(folder).token_bytes()
        except (ConfigError, OSError):
            continue
    return None


def _runs(values: Sequence[int]) -> list[int]:
    """[count, value, count, value, ...]"""
    out: list[int] = []
    for value in values:
        if out and out[-1] == value:
            out[-2] += 1
        else:
            out += [1, value]
    return out
