"""The warm start: supervised learning on demonstrations until every relation is learnt, not for a fixed count.

First a curriculum of short sequences with one passage, on observation tokens too: the circuit that copies a name from
the context appears there, suddenly. Then whole episodes, action tokens only. Every `gate_every` steps the engine
answers one-hop questions about *training* entities; the stage ends when the worst kind of them reaches `gate_accuracy`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxagent.algorithms.sft import sft
from jaxagent.build import Parts
from jaxagent.engine.driver import Driver
from jaxagent.envs.base import Message
from jaxagent.envs.search import render_prompt
from jaxagent.evaluate import GREEDY, play
from jaxagent.learner.batch import Batch
from jaxagent.learner.batching import Packer
from jaxagent.rollout import demonstrations
from jaxagent.rollout.statistics import exact_match
from jaxagent.types import Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """Batches of the stage, resumable by step: `curriculum_steps` batches of one file, then all of the other."""

    parts: Parts
    curriculum: Packer
    full: Packer

    def batches(self, step: int) -> Iterator[list[Batch]]:
        """The micro-batches of step, step + 1, ..."""
        cfg = self.parts.cfg.warm_start
        for name, first, last in (
            ("curriculum", 0, cfg.curriculum_steps),
            ("full", cfg.curriculum_steps, cfg.max_steps),
        ):
            if step >= last or first == last:
                continue
            rows = demonstrations.load(demonstrations_file(self.parts, name))
            size = cfg.curriculum_sequences if name == "curriculum" else cfg.batch_sequences
            packer = self.curriculum if name == "curriculum" else self.full
            pack = functools.partial(_pack, packer, name == "curriculum")
            stream = demonstrations.stream(rows, self._trajectory, size, pack)
            stream.set_state({"next_index": max(step - first, 0)})
            yield from itertools.islice(stream, last - max(step, first))

    def _trajectory(self, row: dict[str, Any]):
        style = self.parts.cfg.env.prompt
        return demonstrations.trajectory(
            row, self.parts.conversation, lambda question: (Message("user", render_prompt(style, question)),)
        )


def _pack(packer: Packer, observations: bool, trajectories: list[Trajectory]) -> list[Batch]:
    return packer.pack(sft(trajectories, observations=observations))


def check(parts: Parts) -> None:
    """Raises ConfigError for demonstrations that are missing or malformed, before any device work."""
    for name in ("curriculum", "full"):
        demonstrations.load(demonstrations_file(parts, name))


def demonstrations_file(parts: Parts, name: str) -> Path:
    """`name`.jsonl of the config's demonstrations, or of the dataset."""
    given = parts.cfg.warm_start.demonstrations
    return Path(given) / f"{name}.jsonl" if given else parts.dataset / f"{name}.jsonl"


def gate_tasks(parts: Parts) -> list[Task]:
    """`gate_questions` training questions of every one-hop kind."""
    chosen: dict[str, list[Task]] = {}
    for task in parts.train:
        kind = chosen.setdefault(task.kind, [])
        if task.kind.startswith("one_hop") and len(kind) < parts.cfg.warm_start.gate_questions:
            kind.append(task)
    return [task for kind in sorted(chosen) for task in chosen[kind]]


def gate(parts: Parts, driver: Driver, tasks: list[Task]) -> dict[str, float]:
    """Greedy exact match on the gate's questions: the mean, the worst kind, and every kind."""
    scores = exact_match(play(parts, driver, tasks, GREEDY))
    kinds = {
        name.removeprefix("em/one_hop/"): value for name, value in scores.items() if name.startswith("em/one_hop/")
    }
    return {"gate/mean_accuracy": scores["em"], "gate/worst_accuracy": min(kinds.values())} | {
        f"gate/{kind}": value for kind, value in kinds.items()
    }
