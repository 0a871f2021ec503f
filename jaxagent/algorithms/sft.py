"""Supervised fine-tuning as streams: cross-entropy on demonstration tokens.

In: demonstrations as trajectories (the demonstrated tokens have kind ACTION). Out: normalised `Streams`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxagent.algorithms import aggregate
from jaxagent.algorithms.streams import Streams
from jaxagent.types import TokenKind, Trajectory


def sft(demonstrations: Sequence[Trajectory], observations: bool, mode: str = "token_mean") -> list[Streams]:
    """Mean cross-entropy over the demonstrated tokens of one optimiser update.

    Args:
      demonstrations: all sequences of the update.
      observations: also train on observation and warning tokens (the warm start's curriculum).
      mode: "token_mean" or "sequence_mean".
    """
    kinds = [TokenKind.ACTION, TokenKind.OBSERVATION, TokenKind.WARNING] if observations else [TokenKind.ACTION]
    streams = []
    for demonstration in demonstrations:
        mask = np.isin(demonstration.kinds, kinds)
        mask[:1] = False  # nothing predicts the first token
        streams.append(Streams.of(demonstration, ce_weights=mask.astype(np.float32)))
    return aggregate.normalise(streams, ["ce_weights"], aggregate.AGGREGATIONS[mode]())
