"""Rejection-sampling fine-tuning: imitate one's own distinct successes (algorithms/supervised.py)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.algorithms.supervised import sft, successes
from jaxagent.config import ConfigError
from jaxagent.data.episode_log import by_task
from jaxagent.engine.driver import Driver
from jaxagent.models.params import Params
from jaxagent.runs.parts import Parts
from jaxagent.runs.stages import offline
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Episode

RFT = "rft"


def run(parts: Parts, workdir: Workdir, driver: Driver, params: Params) -> Params:
    """Trains on the successes among the logged episodes; returns the trained policy."""
    cfg = parts.cfg.rft
    examples = successes(by_task(offline.read_episodes(parts, workdir, cfg.episodes)), cfg.min_reward, cfg.per_task)
    if not examples:
        raise ConfigError(f"rft: no logged episode has a reward of {cfg.min_reward} or more (rft.min_reward).")

    def to_streams(_: object, chosen: Sequence[Episode]):
        return sft([t for e in chosen for t in e.trajectories], observations=False, mode=cfg.aggregation), {}

    return offline.train(parts, workdir, driver, params, RFT, cfg, examples, lambda *_: to_streams)
