"""`EngineSetup`: what an engine is built for, besides its model and weights. Fixed for its life."""

from __future__ import annotations

import dataclasses

from jaxagent.config import EngineConfig
from jaxagent.engine.automaton import Automaton


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What the programs of an engine are compiled for, and how requests are treated."""

    cfg: EngineConfig  # sizes
    context: int  # tokens of the longest sequence, prompt and everything after it
    stops: Automaton  # of requests that bring no stop strings of their own, for the model's vocabulary
    eos_ids: tuple[int, ...]  # tokens that end a turn by themselves
    exact: bool  # whether tokens and log-probs may depend on nothing but their own sequence, bit for bit
    truncation: bool = False  # whether requests may use top-p, top-k or min-p: their programs are compiled only then
    seed: int = 0  # of the run; with task, sample, conversation, turn and position it fixes every random number
    # Turns that may be in hand beyond the number of slots; one more is refused with `BusyError`. None: the callers see
    # to it themselves, as rollout workers do, which are `concurrent_episodes` at most.
    max_waiting: int | None = None
