"""Stages that learn from logged episodes (algorithms/supervised.py): preferences, and one's own distinct successes."""

from __future__ import annotations

from collections.abc import Sequence

from jaxagent.algorithms import supervised
from jaxagent.algorithms.supervised import Pair
from jaxagent.config import ConfigError
from jaxagent.data.episode_log import by_task
from jaxagent.engine.driver import Driver
from jaxagent.learner import forward
from jaxagent.learner.batching import Packer
from jaxagent.learner.score import policy_scorer
from jaxagent.learner.state import TrainState
from jaxagent.models.params import Params
from jaxagent.runs.parts import Parts
from jaxagent.runs.stages import offline
from jaxagent.runs.workdir import Workdir
from jaxagent.types import Episode

DPO, RFT = "dpo", "rft"


def dpo(parts: Parts, workdir: Workdir, driver: Driver, params: Params) -> Params:
    """Direct preference optimisation: score, then one weighted-NLL update. The reference is what it began with."""
    cfg = parts.cfg.dpo
    episodes = offline.read_episodes(parts, workdir, cfg.episodes)
    pairs = supervised.pairs(by_task(episodes), cfg.pairs_per_task, cfg.min_gap)
    if not pairs:
        raise ConfigError(f"dpo: no task has attempts whose rewards differ by {cfg.min_gap} or more (dpo.min_gap).")

    def prepare(packer: Packer, state: TrainState) -> offline.ToStreams:
        # At temperature 1, as the update's NLL: the scores must be those of the parameters that are about to move.
        score = policy_scorer(forward.policy_forward(parts.spec), 1.0, packer, parts.mesh)
        score.warm_up(state.params)
        every, _ = score(state.reference, [t for pair in pairs for t in pair.trajectories])
        scores = iter(every)
        reference = {id(pair): [next(scores) for _ in pair.trajectories] for pair in pairs}

        def to_streams(state: TrainState, chosen: Sequence[Pair]):
            logprobs, _ = score(state.params, [t for pair in chosen for t in pair.trajectories])
            of_reference = [array for pair in chosen for array in reference[id(pair)]]
            return supervised.dpo_streams(
                chosen, logprobs, of_reference, cfg.beta, cfg.length_normalised, cfg.nll_coefficient
            )

        return to_streams

    return offline.train(parts, workdir, driver, params, DPO, cfg, pairs, prepare, keep_reference=True)


def rft(parts: Parts, workdir: Workdir, driver: Driver, params: Params) -> Params:
    """Rejection-sampling fine-tuning: imitates the successes among the logged episodes."""
    cfg = parts.cfg.rft
    examples = supervised.successes(
        by_task(offline.read_episodes(parts, workdir, cfg.episodes)), cfg.min_reward, cfg.per_task
    )
    if not examples:
        raise ConfigError(f"rft: no logged episode has a reward of {cfg.min_reward} or more (rft.min_reward).")

    def to_streams(_: object, chosen: Sequence[Episode]):
        return supervised.sft([t for e in chosen for t in e.trajectories], observations=False, mode=cfg.aggregation), {}

    return offline.train(parts, workdir, driver, params, RFT, cfg, examples, lambda *_: to_streams)
