"""Episodes as HTML: the same question before and after training, token by token.

Records of `episodes.jsonl` (see episodes.py) in -> HTML. A token's background says how unsure the policy was.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SURPRISE = 3.0  # nats of -log p at which the background is darkest
_KINDS = ("prompt", "action (sampled, trained)", "observation", "warning")

Record = Mapping[str, Any]


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


def section(pairs: Sequence[Sequence[Record]]) -> str:
    """The HTML of all chosen tasks, with a key of the colours."""
    colours = ("var(--prompt)", "rgb(var(--action))", "var(--observation)", "var(--warning)")
    key = "".join(f'<span class="key" style="--c:{c}">{name}</span>' for c, name in zip(colours, _KINDS, strict=True))
    return f'<div class="kinds">{key}</div>' + "".join(_task(pair) for pair in pairs)


def _task(pair: Sequence[Record]) -> str:
    first = pair[0]
    answers = ", ".join(first["answers"])
    return (
        f'<article class="episode"><header><b>{html.escape(first["prompt"])}</b>'
        f"<span>{html.escape(first['kind'])}</span><span>gold: {html.escape(answers)}</span></header>"
        f'<div class="pair">{"".join(_attempt(record) for record in pair)}</div></article>'
    )


def _attempt(record: Record) -> str:
    rewards = ", ".join(f"{name} {value:g}" for name, value in record["rewards"].items())
    mark = "win" if record["reward"] > 0 else "loss"
    error = f" · {html.escape(record['error'])}" if record.get("error") else ""
    bodies = "".join(f'<p class="tokens">{_spans(trajectory)}</p>' for trajectory in record["trajectories"])
    return (
        f'<div class="attempt"><h4>{html.escape(record["stage"])}, step {record["step"]} '
        f'<span class="{mark}">reward {record["reward"]:g}</span> '
        f"<i>{html.escape(rewards)} · {record['turns']} turns · {html.escape(record['stop_reason'])}{error}</i></h4>"
        f"{bodies}</div>"
    )


def _spans(trajectory: Mapping[str, Sequence[Any]]) -> str:
    out = []
    columns = (trajectory[name] for name in ("text", "kind", "logprob", "turn", "version"))
    for text, kind, logprob, turn, version in zip(*columns, strict=True):
        sampled = ""
        if logprob is not None:
            surprise = min(1.0, -logprob / _SURPRISE)
            sampled = f' data-p="{logprob:.4g}" data-v="{version}" style="--s:{surprise:.2f}"'
        shown = html.escape(text).replace("\n", "↵\n")
        out.append(f'<span class="k{kind}" data-k="{kind}" data-t="{turn}"{sampled}>{shown}</span>')
    return "".join(out)
