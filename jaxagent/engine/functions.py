"""prefill / insert / begin / generate / free: the engine as pure functions over an explicit decode state.

The life of a turn: the host cuts the tokens the engine has not seen into context[:-1] and the last one. `prefill`
and `insert` put the former into the cache; `begin` gives the slot its last token and its settings; `generate` feeds the
last token, samples the next, and so on. So prefill needs no vocabulary head, every log-prob comes from `generate`,
and a sampled token is cached only when generation goes on from it: at the end of a turn the last one waits, and is
prefilled with the observation that follows it.

Axis letters: S slots, K steps of one dispatch, V vocabulary, b prefill rows, C tokens per row.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.engine import automaton, sampling
from jaxagent.engine.model import SLOTS, Cache, Model, Params, Prefix

RUNNING, STOP, EOS, LENGTH = range(4)  # finish codes
FINISH_NAMES = ("", "stop", "eos", "length")


@flax.struct.dataclass
class StopTables:
    """The stop automaton on the device, replicated."""

    table: jax.Array  # i16|i32[states, V]
    eos: jax.Array  # bool[V]


@flax.struct.dataclass
class DecodeState:
    """Everything `generate` carries from dispatch to dispatch. Slot axis first everywhere."""

    cache: Cache
    token: jax.Array  # i32[S] last token of the sequence, not cached yet
    position: jax.Array  # i32[S] its index in the sequence
    active: jax.Array  # bool[S] generating
    automaton: jax.Array  # i32[S] state of the stop automaton
    budget: jax.Array  # i32[S] tokens the turn may still sample
    keys: jax.Array  # u32[S,2] see sampling.request_key
    sampling: sampling.SamplingParams


@flax.struct.dataclass
class Requests:
    """New turns, one per slot where `mask`; elsewhere ignored. NumPy on the host, one transfer."""

    mask: np.ndarray  # bool[S]
    token: np.ndarray  # i32[S]
    position: np.ndarray  # i32[S]
    budget: np.ndarray  # i32[S], at least 1
    keys: np.ndarray  # u32[S,2]
    sampling: sampling.SamplingParams

    @classmethod
    def blank(cls, slots: int) -> Requests:
        """No request in any slot; whoever has some fills them in."""
        zeros = functools.partial(np.zeros, slots)
        return cls(
            mask=zeros(bool),
            token=zeros(np.int32),
            position=zeros(np.int32),
            budget=zeros(np.int32),
            keys=np.zeros((slots, 2), np.uint32),
            sampling=sampling.SamplingParams(
                temperature=zeros(np.float32),
                top_p=np.ones(slots, np.float32),
                top_k=zeros(np.int32),
                min_p=zeros(np.float32),
            ),
        )


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one `generate` did, on the host: views of one array, so that there is one device-to-host copy."""

    tokens: np.ndarray  # i32[S,K], the first count[s] of a row are valid
    logprobs: np.ndarray  # f32[S,K]
    count: np.ndarray  # i32[S] tokens sampled in this dispatch
    finish: np.ndarray  # i32[S] RUNNING or why the turn is over
    stop: np.ndarray  # i32[S] the automaton's negative entry when finish == STOP

    @classmethod
    def unpack(cls, packed: np.ndarray) -> StepResult:
        """From the i32[S, 2K+3] that `generate` returns."""
        steps = (packed.shape[1] - 3) // 2
        return cls(
            tokens=packed[:, :steps],
            logprobs=packed[:, steps : 2 * steps].view(np.float32),
            count=packed[:, -3],
            finish=packed[:, -2],
            stop=packed[:, -1],
        )


def init_state(model: Model, slots: int, context: int) -> DecodeState:
    """All slots empty and inactive."""
    zeros = functools.partial(jnp.zeros, (slots,), out_sharding=SLOTS)
    ones = functools.partial(jnp.ones, (slots,), out_sharding=SLOTS)
    return DecodeState(
        cache=model.init_cache(slots, context),
        token=zeros(dtype=jnp.int32),
        position=zeros(dtype=jnp.int32),
        active=zeros(dtype=bool),
        automaton=zeros(dtype=jnp.int32),
        budget=zeros(dtype=jnp.int32),
        keys=jnp.zeros((slots, 2), jnp.uint32, out_sharding=jax.P(*SLOTS, None)),
        sampling=sampling.SamplingParams(
            temperature=ones(dtype=jnp.float32),
            top_p=ones(dtype=jnp.float32),
            top_k=zeros(dtype=jnp.int32),
            min_p=zeros(dtype=jnp.float32),
        ),
    )


def prefill(
    model: Model,
    params: Params,
    state: DecodeState,
    tokens: jax.Array,
    start: jax.Array,
    slot: jax.Array,
    fresh: bool,
) -> Prefix:
    """Cache entries of tokens i32[b,C] at start i32[b] of the sequences in slot i32[b]. See `Model.prefill`."""
    tokens, start, slot = (jax.reshard(x, _rows(x)) for x in (tokens, start, slot))
    return model.prefill(params, state.cache, tokens, start, slot, fresh)


def insert(
    model: Model, state: DecodeState, prefix: Prefix, row: jax.Array, slot: jax.Array, start: jax.Array
) -> DecodeState:
    """Copies prefix rows into slots; several slots may take the same row (a group). slot i32[n] = S is no slot."""
    return state.replace(cache=model.insert(state.cache, prefix, row, slot, start))


def begin(state: DecodeState, requests: Requests) -> DecodeState:
    """Starts a turn in every slot of `requests.mask`."""
    requests = jax.tree.map(lambda x: jax.reshard(x, _rows(x)), requests)
    mask = requests.mask
    pick = lambda new, old: jnp.where(mask if new.ndim == 1 else mask[:, None], new, old)  # noqa: E731
    return state.replace(
        token=pick(requests.token, state.token),
        position=pick(requests.position, state.position),
        active=state.active | mask,
        automaton=jnp.where(mask, automaton.START, state.automaton),
        budget=pick(requests.budget, state.budget),
        keys=pick(requests.keys, state.keys),
        sampling=jax.tree.map(pick, requests.sampling, state.sampling),
    )


def free(state: DecodeState, mask: jax.Array) -> DecodeState:
    """Stops generation in the slots of mask bool[S]. Their cache needs no clearing: positions are overwritten before
    they are attended."""
    return state.replace(active=state.active & ~jax.reshard(mask, SLOTS))


def generate(
    model: Model,
    params: Params,
    tables: StopTables,
    state: DecodeState,
    steps: int,
    window: int,
    truncated: bool,
) -> tuple[DecodeState, jax.Array]:
    """Samples up to `steps` tokens in every active slot; a slot freezes when its turn ends.

    Args:
      model, steps, window, truncated: static. `window` exceeds every position reached; `truncated` is False when no
        active slot uses top-p, top-k or min-p.

    Returns:
      The new state, and i32[S, 2K+3] for `StepResult.unpack`.
    """
    slots = state.token.shape[0]
    blank = lambda dtype: jnp.zeros((slots, steps), dtype, out_sharding=jax.P(*SLOTS, None))  # noqa: E731
    zeros = jnp.zeros((slots,), jnp.int32, out_sharding=SLOTS)
    params = model.prepare(params)
    result = _Result(blank(jnp.int32), blank(jnp.float32), zeros, zeros, zeros)

    def more(carry: tuple[jax.Array, DecodeState, _Result]) -> jax.Array:
        step, state, _ = carry
        return (step < steps) & jnp.any(state.active)

    def advance(carry: tuple[jax.Array, DecodeState, _Result]) -> tuple[jax.Array, DecodeState, _Result]:
        step, state, result = carry
        logits, cache = model.decode(params, state.cache, state.token, state.position, window)
        state = state.replace(cache=cache)
        return step + 1, *_choose(logits, tables, state, result, step, truncated)

    _, state, result = jax.lax.while_loop(more, advance, (jnp.int32(0), state, result))
    logprobs = jax.lax.bitcast_convert_type(result.logprobs, jnp.int32)
    tail = jnp.stack([result.count, result.finish, result.stop], axis=1)
    return state, jnp.concatenate([result.tokens, logprobs, tail], axis=1)


@flax.struct.dataclass
class _Result:
    tokens: jax.Array  # i32[S,K]
    logprobs: jax.Array  # f32[S,K]
    count: jax.Array  # i32[S]
    finish: jax.Array  # i32[S]
    stop: jax.Array  # i32[S]


def _choose(
    logits: jax.Array, tables: StopTables, state: DecodeState, result: _Result, step: jax.Array, truncated: bool
) -> tuple[DecodeState, _Result]:
    """Samples, records, and ends the turns that are over. Each device does it for its own slots."""
    cache, host_free = state.cache, state.replace(cache=None)
    local = functools.partial(_choose_local, truncated=truncated)
    specs = (jax.P(*SLOTS, None), jax.P(), SLOTS, SLOTS, jax.P())
    state, result = jax.shard_map(local, in_specs=specs, out_specs=(SLOTS, SLOTS))(
        jax.reshard(logits, jax.P(*SLOTS, None)), tables, host_free, result, step
    )
    return state.replace(cache=cache), result


def _choose_local(
    logits: jax.Array, tables: StopTables, state: DecodeState, result: _Result, step: jax.Array, truncated: bool
) -> tuple[DecodeState, _Result]:
    position = state.position + 1  # of the token that is sampled now
    uniform = sampling.uniforms(state.keys, position)
    token, logprob = sampling.sample(logits, uniform, state.sampling, truncated)
    entry = tables.table[state.automaton, token].astype(jnp.int32)
    budget = state.budget - 1
    over = jnp.where(budget <= 0, LENGTH, RUNNING)
    over = jnp.where(tables.eos[token], EOS, over)
    over = jnp.where(entry < 0, STOP, over)
    live = state.active
    keep = lambda new, old: jnp.where(live, new, old)  # noqa: E731
    new_result = _Result(
        tokens=result.tokens.at[:, step].set(token),  # of a frozen slot: past its count, never read
        logprobs=result.logprobs.at[:, step].set(logprob),
        count=result.count + live,
        finish=keep(over, result.finish),
        stop=keep(jnp.minimum(entry, 0), result.stop),
    )
    new_state = state.replace(
        token=keep(token, state.token),
        position=keep(position, state.position),
        active=live & (over == RUNNING),
        automaton=keep(jnp.maximum(entry, 0), state.automaton),
        budget=keep(budget, state.budget),
    )
    return new_state, new_result


def _rows(x: jax.Array) -> jax.P:
    return jax.P(*SLOTS, *(None,) * (x.ndim - 1))
