"""How far an engine's log-probs with int8 matrices (`LanguageModel.int8`) are from those of the trainer's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.model import ROWS
from jaxagent.models.params import Params

# What log-probs are compared on: prose, a question, a tool call, code, numbers.
TEXTS = (
    "The river rises in the hills north of the town, turns east at the old mill and reaches the sea after sixty miles.",
    "Question: Which country has the calling code 233, and what is its capital? Let me think about it step by step.",
    "<search> capital of Ghana </search>\n\n<information>Doc 1: Accra is its capital.</information>\n\n<answer>",
    "def mean(values):\n    if not values:\n        raise ValueError('empty')\n    return sum(values) / len(values)\n",
    '{"name": "refund", "arguments": {"order": 10482, "amount": 39.95, "currency": "EUR", "reason": "damaged"}}',
)
_MEASURED_TOKENS = 64  # of each text


def logprob_gaps(plain: LanguageModel, params: Params, quantised: Params, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """How far the log-prob of each next token is from that of unquantised weights, under the mesh in use.

    Args:
      plain: the model without quantisation.
      params, quantised: what `plain` and the same model with `int8` placed.
      texts: token ids of each, two or more; `_MEASURED_TOKENS` of each are used.

    Returns:
      f32[tokens], in nats, none negative.
    """
    models = (plain, params), (dataclasses.replace(plain, int8=True), quantised)
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
    tables = jax.reshard(jnp.ones((count, 1 + model.keeps_memories), jnp.int32), jax.P(*ROWS, None))
    hidden, _ = model.extend(params, model.init_cache(2, count, 2), jax.reshard(tokens, ROWS), at, tables)
    logprobs = jax.reshard(jax.nn.log_softmax(model.logits(params, hidden)), jax.P(None, None))
    return jnp.take_along_axis(logprobs[:-1], tokens[1:, None], axis=1)[:, 0]
