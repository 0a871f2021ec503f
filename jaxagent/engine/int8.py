"""Serving with int8 matrices: a quarter of float32's memory, and how far the numbers are from the trainer's.

A matrix is multiplied out where it is used (`models.layers.Int8Array`), so that only int8 stays on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.engine.lm import Cache, LanguageModel
from jaxagent.engine.model import ROWS
from jaxagent.models.layers import quantise
from jaxagent.models.params import Params

# What log-probs are compared on: prose, a question, a tool call, code, numbers.
TEXTS = (
    "The river rises in the hills north of the town, turns east at the old mill and reaches the sea after sixty miles.",
    "Question: Which country has the calling code 233, and what is its capital? Let me think about it step by step.",
    "<search> capital of Ghana </search>\n\n<information>Doc 1: Accra is its capital.</information>\n\n<answer>",
    "def mean(values):\n    if not values:\n        raise ValueError('empty')\n    return sum(values) / len(values)\n",
    '{"name": "refund", "arguments": {"order": 10482, "amount": 39.95, "currency": "EUR", "reason": "damaged"}}',
)
# Axes that a product sums over, by array; each index of the others is an output channel.
_SUMMED = {"wq": -3, "wk": -3, "wv": -3, "wo": (-3, -2), "w_gate": -2, "w_up": -2, "w_down": -2}
_MEASURED_TOKENS = 64  # of each text


@dataclasses.dataclass(frozen=True)
class Int8LanguageModel(LanguageModel):
    """A `LanguageModel` whose placed parameters are int8, one tree per layer."""

    def lay_out(self, params: Params) -> Params:
        """The weights with their matrices quantised. An embedding that is only looked up stays as it is."""
        params = super().lay_out(params)
        name = "embed" if params.head is None else "head"
        quantised = {name: quantise(getattr(params, name), -1)}
        layers = {name: quantise(getattr(params.layers, name), summed) for name, summed in _SUMMED.items()}
        return params.replace(layers=params.layers.replace(**layers), **quantised)

    def extend(
        self, params: Params, cache: Cache, tokens: jax.Array, positions: jax.Array, tables: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """As `LanguageModel.extend`. A tied embedding is multiplied out here, not ahead of the loop over steps."""
        if params.head is None:
            params = params.replace(embed=params.embed.after(positions))
        return super().extend(params, cache, tokens, positions, tables)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """As `LanguageModel.logits`. The head is multiplied out here, not ahead of the loop over steps."""
        name = "embed" if params.head is None else "head"
        return super().logits(params.replace(**{name: getattr(params, name).after(hidden)}), hidden)


def logprob_gaps(plain: LanguageModel, params: Params, quantised: Params, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """How far the log-prob of each next token is from that of unquantised weights, under the mesh in use.

    Args:
      plain: the model without quantisation.
      params, quantised: what `plain` and its `Int8LanguageModel` placed.
      texts: token ids of each, two or more; `_MEASURED_TOKENS` of each are used.

    Returns:
      f32[tokens], in nats, none negative.
    """
    models = (plain, params), (Int8LanguageModel(plain.spec, plain.cache_dtype), quantised)
    score = jax.jit(_next_logprobs, static_argnums=0)
    gaps = []
    for text in texts:
        length = min(len(text), _MEASURED_TOKENS)
        tokens = np.zeros(_MEASURED_TOKENS, np.int32)
        tokens[:length] = text[:length]
        true, rounded = (np.asarray(score(model, weights, tokens))[: length - 1] for model, weights in models)
        gaps.append(np.abs(true - rounded))
    return np.concatenate(gaps)


def _next_logprobs(model: LanguageModel, params: Params, tokens: jax.Array) -> jax.Array:
    """f32[N - 1]: log-probs of tokens[1:], each given those before, by the engine's own forward on one page."""
    count = tokens.shape[0]
    at = jax.reshard(jnp.arange(count), ROWS)
    tables = jax.reshard(jnp.ones((count, 1), jnp.int32), jax.P(*ROWS, None))
    hidden, _ = model.extend(params, model.init_cache(2, count), jax.reshard(tokens, ROWS), at, tables)
    logprobs = jax.reshard(jax.nn.log_softmax(model.logits(params, hidden)), jax.P(None, None))
    return jnp.take_along_axis(logprobs[:-1], tokens[1:, None], axis=1)[:, 0]
