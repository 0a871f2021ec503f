"""Runs made without a model, for the page: honest ones and hostile ones."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from jaxagent.config import EpisodesConfig
from jaxagent.observe.episode_store import EpisodeStore, Learnt
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory, UntrainedConversation

WORDS = str.split("the search finds a city in the country and its capital is where that river ends so answer it")
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    '"><svg onload=window.hacked=3>',
    "<iframe srcdoc='<script>parent.hacked=4</script>'></iframe>",
    "javascript:window.hacked=5",
    "</script></style></pre><base href=//evil>",
    "{{constructor.constructor('window.hacked=6')()}} ${window.hacked=7}",
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil\x07link \x00\x08\x7f\x9b",
    "\u202e\u2066\u2069\u200f moc.live \u202d\u061c",
    "\ud800 lone \udfff \ufffe \uffff",
    "a\u0300" * 300,
    "__proto__ constructor toString hasOwnProperty",
    "\u2028line\u2029paragraph\r\n\f\v",
    "&lt;b&gt; &#x3c;script&#x3e; %3Cscript%3E",
    "<style>*{display:none}</style><meta http-equiv=refresh content=0;url=//evil>",
)


def table() -> list[bytes]:
    """Token i is byte i."""
    return [bytes([value]) for value in range(256)]


def trajectory(parts: Iterable[tuple[str, TokenKind]], seed: int, version: int = 0) -> Trajectory:
    """Tokens are bytes of UTF-8; each sampled part begins a turn."""
    raw, kinds, turns, turn = b"", list[int](), list[int](), -1
    for text, kind in parts:
        part = text.encode("utf-8", "surrogatepass")
        turn += kind is TokenKind.ACTION
        raw, kinds, turns = raw + part, kinds + [int(kind)] * len(part), turns + [max(turn, 0)] * len(part)
    actions = np.array(kinds, np.uint8) == TokenKind.ACTION
    logprobs = np.where(actions, -np.random.default_rng(seed).exponential(0.6, len(kinds)), 0)
    return Trajectory(
        np.frombuffer(raw, np.uint8).astype(np.int32),
        np.array(kinds, np.uint8),
        logprobs.astype(np.float32),
        np.where(actions, version, -1).astype(np.int32),
        np.array(turns, np.int32),
    )


def episode(step: int, place: int, sample: int, rng: np.random.Generator) -> Episode:
    """One attempt, which fails now and then, and is right more often later on."""
    answer = " ".join(rng.choice(WORDS, 12))
    found = " ".join(rng.choice(WORDS, 40))
    parts = [
        (f"Question {place}: where?\n", TokenKind.PROMPT),
        (f"<search> {answer} </search>", TokenKind.ACTION),
        (f"\n<information>{found}</information>\n", TokenKind.OBSERVATION),
        ("<answer> there </answer>", TokenKind.ACTION),
    ]
    fails = rng.random() < 0.02
    reward = float(rng.random() < 0.3 + 0.6 * min(1.0, step / 50))
    task = Task(f"train/{place}", f"Question {place}: where?", ("there",), ("one_hop/x", "two_hop/y")[place % 2])
    times = {"queue_s": 0.01, "prefill_s": 0.05, "decode_s": float(rng.exponential(0.4)), "env_s": 0.02}
    return Episode(
        task, sample, (trajectory(parts, int(rng.integers(2**31)), step),), 0.0 if fails else reward, {"em": reward},
        StopReason.ENV_ERROR if fails else StopReason.ANSWER, 2, times | {"total_s": sum(times.values())},
        "".join(text for text, _ in parts), f"search engine {place % 3} answered 503" if fails else "",
    )  # fmt: skip


def learnt(episodes: Sequence[Episode], rng: np.random.Generator) -> dict[int, Learnt]:
    """Advantages by the mean of the episodes; the trainer's log-probs a little apart from the engine's."""
    mean = float(np.mean([e.reward for e in episodes]))
    out = {}
    for e in episodes:
        for t in e.trajectories:
            actions, apart = t.action_mask, rng.normal(0, 1e-4, len(t))
            logprobs = np.where(actions, t.logprobs + apart, np.nan).astype(np.float32)
            advantages = np.where(actions, e.reward - mean, 0).astype(np.float32)
            out[id(t)] = Learnt(advantages, logprobs, actions & (e.reward != mean))
    return out


def hostile(number: int) -> Episode:
    """One in which everything that can be text is an attack; some are very long."""
    text = HOSTILE[number % len(HOSTILE)]
    if number % 250 == 7:
        text = text + "x" * 5_000_000 + text
    tokens = text if len(text) < 10_000 else text[:200_000]
    kinds = (TokenKind.PROMPT, TokenKind.ACTION, TokenKind.OBSERVATION, TokenKind.WARNING)
    played = trajectory([(tokens, kind) for kind in kinds], number)
    raw = np.concatenate([played.tokens[:-3], np.array([0xFF, 0xC3, 0x28], np.int32)])  # no UTF-8
    heard = UntrainedConversation(text[:500], ((text, text),), None, number % 2)
    task = Task(f"{text[:300]}{number}", text, (text[:1000],), text[:200])
    reason = (StopReason.ANSWER, StopReason.ENV_ERROR)[number % 2]
    odd = {text[:100]: 1.0, "__proto__": 2.0}
    played = Trajectory(raw, played.kinds, played.logprobs, played.policy_versions, played.turns)
    return Episode(task, number, (played,), float(number % 3), odd, reason, 1, odd, text, text, (), (heard,))


def write(folder: pathlib.Path, steps: int, tasks: int = 16, group: int = 8, seed: int = 0, evil: int = 0) -> None:
    """A run's workdir with `steps` steps, and `evil` hostile episodes in a log of their own."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = {
        "workdir": str(folder), "seed": seed, "mesh": {"data": 1}, "env": {"name": "search"},
        "model": {"path": "", "family": "qwen3", "num_layers": 1, "embed_dim": 32}, "tokenizer": {"path": ""},
        "rl": {"steps": steps, "advantage": {"name": "group_mean_std"}, "objective": {"name": "ppo_clip"}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    log, records = EpisodeStore(folder / "episodes", "rl", 0, EpisodesConfig(), False), []
    for step in range(steps):
        places = rng.integers(0, 200, tasks)
        episodes = [episode(step, int(place), step * group + i, rng) for place in places for i in range(group)]
        log.append(step, episodes, learnt(episodes, rng))
        reward = float(np.mean([e.reward for e in episodes]))
        numbers = {"reward/mean": reward, "reward/em": reward, "policy/entropy": 1 / (1 + step), "time/step_s": 2.0}
        held_out = {"eval/em": reward, "eval/n": 8.0} if step % 10 == 0 else {}
        records.append({"stage": "rl", "step": step + 1, **held_out, **numbers})
        if step % 8 == 0:
            log.wait()
    log.close()
    if evil:
        log = EpisodeStore(folder / "episodes", "evil", 0, EpisodesConfig(), False)
        for first in range(0, evil, 50):
            log.append(first, [hostile(first + i) for i in range(50)], {})
            log.wait()
        log.close()
        records.append({"stage": HOSTILE[0], "step": 1, HOSTILE[1]: 1.0, "reward/mean": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "summary.json").write_text(
        json.dumps({"eval/em_before_rl": 0.25, "eval/em_after_rl": 0.75, "steps": steps})
    )
