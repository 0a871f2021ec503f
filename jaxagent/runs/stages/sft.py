"""Supervised fine-tuning on demonstrations, with negatives among them.

Negatives are those of Agent-FLAN (Chen et al., arXiv 2403.12881): demonstrations of NOT using the tool, (1) of the
usual prompt with a question that needs no tool and is answered at once, (2) of a prompt that offers no tool. A row's
"prompt" is the question, or, for (2), a list of messages that is taken as it stands. They are trained like every other
demonstration: nothing is made less likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxagent.algorithms.supervised import sft
from jaxagent.engine.driver import Driver
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.rollout import demonstrations
from jaxagent.runs.parts import Parts
from jaxagent.runs.stages import offline
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Trajectory

SFT = "sft"


def run(parts: Parts, workdir: Workdir, driver: Driver, params: Params) -> Params:
    """Trains on `sft.demonstrations`, and on `sft.negatives` for `negative_frac` of every update's examples."""
    cfg = parts.cfg.sft
    positives, negatives = load(parts)
    count = negative_count(cfg.examples, cfg.negative_frac) if negatives else 0

    def to_streams(state: TrainState, chosen: Sequence[dict]):
        rows = with_negatives(chosen, negatives, count, (parts.cfg.seed, int(state.step)))
        return sft([to_trajectory(parts, row) for row in rows], observations=False, mode=cfg.aggregation), {}

    return offline.train(parts, workdir, driver, params, SFT, cfg, positives, lambda *_: to_streams)


def with_negatives(chosen: Sequence[dict], negatives: Sequence[dict], count: int, at: tuple[int, int]) -> list[dict]:
    """An update's examples of which the last `count` make room for negatives: every negative before any comes again."""
    if not count:
        return list(chosen)
    return [*chosen[:-count], *(negatives[i] for i in offline.order(len(negatives), count, at))]


def negative_count(examples: int, frac: float) -> int:
    """How many of an update's examples are negatives: the nearest whole number, at least one."""
    return max(int(np.rint(examples * frac)), 1)


def load(parts: Parts) -> tuple[list[dict], list[dict]]:
    """Demonstrations and negatives; no negatives when none are named."""
    cfg = parts.cfg.sft
    positives = demonstrations.load(Path(cfg.demonstrations) if cfg.demonstrations else parts.dataset / "full.jsonl")
    return positives, demonstrations.load(cfg.negatives) if cfg.negatives else []


def to_trajectory(parts: Parts, row: dict) -> Trajectory:
    """A demonstration as the trajectory that an episode with these texts would have been."""
    return demonstrations.trajectory(row, parts.conversation(), parts.environment)


def check(parts: Parts) -> None:
    """Raises ConfigError for missing or malformed demonstrations."""
    load(parts)
