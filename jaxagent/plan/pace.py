"""How fast a fleet's parts are, and what its episodes are like: by formula. `measured` has it from a run's metrics."""

from __future__ import annotations

import dataclasses

from jaxagent.config import Config
from jaxagent.fleet.simulate import Turns
from jaxagent.plan import costs
from jaxagent.plan.chips import Chip


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds of one engine and one trainer, each of `config.mesh` devices, and what episodes are like."""

    decode_s: float  # a decode step of an engine, whatever it holds
    sequence_s: float  # of a decode step, for each sequence; its share of prefill included
    prefill_s: float  # per token of context that is computed again
    update_s: float  # per sampled token of the batch: scoring, gradients and updates
    episodes: tuple[Turns, ...]  # each as likely as the others
    waits_known: bool  # False: nobody knows how long environments take, and the episodes have no waits
    sources: tuple[str, ...]  # where the numbers are from, a sentence each


def estimated(cfg: Config, work: costs.Work, times: costs.Times, reads_s: tuple[float, float], chip: Chip) -> Pace:
    """From what the plan says of a step.

    Args:
      cfg: the run's.
      work: of a step; all episodes are as long as they may be.
      times: of it, with one engine and one trainer of `config.mesh` devices.
      reads_s: of a decode step: weights, and the cache of one sequence.
      chip: of every device.
    """
    sampled = work.episodes * work.sampled_tokens
    computed_s = work.decode_flops / sampled / cfg.mesh.devices / (chip.flops * chip.prefill_mfu)
    turns = cfg.env.most_turns
    return Pace(
        decode_s=reads_s[0] + chip.dispatch_s / cfg.engine.steps_per_dispatch,
        sequence_s=max(reads_s[1], computed_s) + times.prefill_s / sampled,
        prefill_s=times.prefill_s / max(1, work.episodes * work.prefill_tokens),
        update_s=(times.train_s + times.score_s) / sampled,
        episodes=(((work.sampled_tokens / turns, 0.0),) * turns,),
        waits_known=False,
        sources=(
            "seconds per token: estimated, as in the table of one RL step",
            "lengths: assumed, every episode as long as it may be; where real lengths differ, a synchronous step waits "
            "for the longest, and a fleet gains more than is said here",
        ),
    )
