"""Episodes as HTML: the same question before and after training, token by token, and all of them to be looked through.

Records of `episodes.jsonl` (see episodes.py) in -> HTML. A token's background says how unsure the policy was. What is
long is folded in its middle: where an episode ends can always be seen.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxagent.types import StopReason

_SURPRISE = 3.0  # nats of -log p at which the background is darkest
_HEAD, _TAIL = 60, 240  # tokens shown of a trajectory that is longer than both and some more
_HEAD_CHARS, _TAIL_CHARS = 400, 800  # characters shown of a longer text that another role saw or said
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
    rewards = "".join(f"{name} {value:g}, " for name, value in record["rewards"].items()).removesuffix(", ")
    failed = StopReason(record["stop_reason"]).is_failure
    mark = "loss" if failed or record["reward"] <= 0 else "win"
    reward = "failed" if failed else f"reward {record['reward']:g}"
    error = f" · {html.escape(record['error'])}" if record.get("error") else ""
    bodies = _conversations(record)
    return (
        f'<div class="attempt"><h4>{html.escape(record["stage"])}, step {record["step"]} '
        f'<span class="{mark}">{reward}</span> '
        f"<i>{html.escape(rewards)} · {record['turns']} turns · {html.escape(record['stop_reason'])}{error}</i></h4>"
        f"{bodies}</div>"
    )


def _conversations(record: Record) -> str:
    """What was said: one sequence as it is; of several conversations each with whose it is, in the order they began."""
    tokens = [f'<div class="tokens">{_folded(_spans(t))}</div>' for t in record["trajectories"]]
    untrained = list(record.get("heard", ()))
    if not untrained and len(tokens) <= 1:
        return "".join(tokens)
    talks = []
    for number, body in enumerate(tokens):
        talks += [_untrained_conversation(talk) for talk in untrained if talk["after"] == number]
        name = f"policy, conversation {number + 1}" if len(tokens) > 1 else "policy"
        talks.append(f'<section class="talk"><h5>{name} <i>trained</i></h5>{body}</section>')
    talks += [_untrained_conversation(talk) for talk in untrained if talk["after"] >= len(tokens)]
    return f'<div class="talks">{"".join(talks)}</div>'


def _untrained_conversation(talk: Mapping[str, Any]) -> str:
    """A conversation that carries no gradient: what its role was shown, and what it said."""
    turns = "".join(
        f'<p class="shown">{_text(observation)}</p><p class="said">{_text(reply)}</p>'
        for observation, reply in talk["turns"]
    )
    return f'<section class="talk heard"><h5>{html.escape(talk["role"])} <i>not trained</i></h5>{turns}</section>'


def _text(text: str) -> str:
    """A text with its line ends; of a long one the middle is folded away."""
    if len(text) <= _HEAD_CHARS + _TAIL_CHARS + 200:
        return html.escape(text)
    head, middle, tail = text[:_HEAD_CHARS], text[_HEAD_CHARS:-_TAIL_CHARS], text[-_TAIL_CHARS:]
    folded = f"<details><summary>{len(middle)} characters</summary>{html.escape(middle)}</details>"
    return f"{html.escape(head)}{folded}{html.escape(tail)}"


def browser(records: Sequence[Record], sentence: str) -> str:
    """The markup of the list that report.js makes of compact records (report_logs.py), and the records themselves.

    Args:
      records: newest first.
      sentence: the sentence that says how many of all episodes they are.
    """
    data = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")  # no tag can begin in it
    choices = "".join(
        f'<label>{title}<select data-by="{name}"><option value="">all</option></select></label>'
        for name, title in (
            ("stage", "stage"), ("split", "split"), ("step", "step"), ("kind", "kind"), ("stop_reason", "ended by"),
            ("result", "reward"),
        )
    )  # fmt: skip
    return (
        f'<p class="note">{html.escape(sentence)}</p><div id="browser"><form class="filters">{choices}'
        '<label class="wide">text<input type="search" data-by="text" placeholder="prompt, answer, tokens"></label>'
        '</form><p class="note count">This list needs JavaScript.</p><div class="rows"></div>'
        '<button type="button" class="more" hidden>more</button></div>'
        f'<script type="application/json" id="episodes">{data}</script>'
    )


def _folded(spans: Sequence[str]) -> str:
    """The whole text, or its beginning and end with the middle folded away."""
    if len(spans) <= _HEAD + _TAIL + 40:
        return "".join(spans)
    head, middle, tail = spans[:_HEAD], spans[_HEAD:-_TAIL], spans[-_TAIL:]
    return f"{''.join(head)}<details><summary>{len(middle)} tokens</summary>{''.join(middle)}</details>{''.join(tail)}"


def _spans(trajectory: Mapping[str, Sequence[Any]]) -> list[str]:
    out = []
    columns = (trajectory[name] for name in ("text", "kind", "logprob", "turn", "version"))
    for text, kind, logprob, turn, version in zip(*columns, strict=True):
        sampled = ""
        if logprob is not None:
            surprise = min(1.0, -logprob / _SURPRISE)
            sampled = f' data-p="{logprob:.4g}" data-v="{version}" style="--s:{surprise:.2f}"'
        escaped = html.escape(text).replace("\n", "↵\n")
        out.append(f'<span class="k{kind}" data-k="{kind}" data-t="{turn}"{sampled}>{escaped}</span>')
    return out
