"""prefill / begin / generate / free: the engine as pure functions over an explicit decode state.

The life of a turn: the host cuts the tokens that are not cached into context[:-1] and the last one. `prefill` caches
the former; `begin` gives a slot the last token and its settings; `generate` feeds the last token, samples the next,
and so on. So prefill needs no vocabulary head, every log-prob comes from `generate`, and a sampled token is cached only
when generation goes on from it: at the end of a turn the last one waits, and is prefilled with what follows it.

Both run the model over tiles of a fixed number of rows, as many as are needed: the count is an argument, not a shape,
so there is one program of each, and what a row gets does not depend on how many others there are.

Axis letters: S slots, K steps of one dispatch, V vocabulary, n tiles, N rows of a tile, Q pages per sequence (and one
column more for its memory, of a model that keeps memories).
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxagent.engine import sampling
from jaxagent.engine.model import ROWS, Cache, Model, Params
from jaxagent.models import kernels
from jaxagent.models.sharding import tile_at

Tree = Any  # a pytree of arrays
Array = Any  # numpy.ndarray on the host, jax.Array on the device

RUNNING, STOP, EOS, LENGTH = range(4)  # finish codes
FINISH_NAMES = ("", "stop", "eos", "length")


@flax.struct.dataclass
class StopTables:
    """The stop automaton on the device, replicated."""

    table: jax.Array  # i16|i32[states, V]
    eos: jax.Array  # bool[V]


@flax.struct.dataclass
class Slots:
    """What a turn in progress needs, per slot; of NumPy arrays, new turns in the slots that are `active`."""

    token: Array  # i32[S] last token of the sequence, not cached yet
    position: Array  # i32[S] its index in the sequence
    active: Array  # bool[S] generating
    automaton: Array  # i32[S] state of the stop automaton: START, or where an interrupted turn stood
    budget: Array  # i32[S] tokens the turn may still sample
    keys: Array  # u32[S,2] see sampling.request_key
    sampling: sampling.SamplingParams

    @classmethod
    def blank(cls, slots: int) -> Slots:
        """No turn in any slot, in NumPy arrays: of new turns the caller fills in its own."""
        whole, real = (functools.partial(np.full, slots, dtype=dtype) for dtype in (np.int32, np.float32))
        return cls(
            token=whole(0),
            position=whole(0),
            active=np.zeros(slots, bool),
            automaton=whole(0),
            budget=whole(0),
            keys=np.zeros((slots, 2), np.uint32),
            sampling=sampling.SamplingParams(temperature=real(0), top_p=real(1), top_k=whole(0), min_p=real(0)),
        )


@flax.struct.dataclass
class DecodeState:
    """Everything the device keeps from call to call."""

    cache: Cache
    slots: Slots


@flax.struct.dataclass
class StepResult:
    """What one `generate` did; on the host views of one array, so that there is one device-to-host copy."""

    tokens: Array  # i32[S,K], the first count[s] of a row are valid
    logprobs: Array  # f32[S,K]
    count: Array  # i32[S] tokens sampled in this dispatch
    finish: Array  # i32[S] RUNNING or why the turn is over
    stop: Array  # i32[S] the automaton's negative entry when finish == STOP

    @classmethod
    def blank(cls, rows: int, steps: int) -> StepResult:
        """Nothing sampled, on the device."""
        many = lambda dtype: jnp.zeros((rows, steps), dtype, out_sharding=jax.P(*ROWS, None))  # noqa: E731
        zeros = jnp.zeros((rows,), jnp.int32, out_sharding=ROWS)
        return cls(many(jnp.int32), many(jnp.float32), zeros, zeros, zeros)

    def packed(self) -> jax.Array:
        """As one array i32[S, 2K+3]."""
        logprobs = jax.lax.bitcast_convert_type(self.logprobs, jnp.int32)
        tail = jnp.stack([self.count, self.finish, self.stop], axis=1)
        return jnp.concatenate([self.tokens, logprobs, tail], axis=1)

    @classmethod
    def unpack(cls, packed: np.ndarray) -> StepResult:
        """From what `packed` gave, which `generate` returns."""
        steps = (packed.shape[1] - 3) // 2
        logprobs = packed[:, steps : 2 * steps].view(np.float32)
        return cls(packed[:, :steps], logprobs, packed[:, -3], packed[:, -2], packed[:, -1])


def init_state(model: Model, slots: int, pages: int, page_tokens: int, memories: int = 0) -> DecodeState:
    """No turn in any slot, nothing cached."""
    return DecodeState(cache=model.init_cache(pages, page_tokens, memories), slots=_laid_out(Slots.blank(slots)))


def _laid_out(slots: Slots) -> Slots:
    """Each array split over the mesh by its slots."""
    return jax.tree.map(lambda x: jax.reshard(jnp.asarray(x), jax.P(*ROWS, *(None,) * (x.ndim - 1))), slots)


@jax.named_scope("prefill")
def prefill(
    model: Model,
    params: Params,
    state: DecodeState,
    tables: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    slot: jax.Array,
    tiles: jax.Array,
) -> DecodeState:
    """Caches rows of any sequences, a sequence's rows in ascending order.

    Args:
      model, params, state: the engine's.
      tables: i32[S,Q] pages of each slot's sequence.
      tokens, positions: i32[n,N] rows; N is split over the mesh.
      slot: i32[n,M] whose sequence, N / M rows in a row, counted in their shard; -1 is padding.
      tiles: i32[] how many of the n tiles hold rows.
    """
    rows = jax.P(None, *ROWS)
    tokens, positions, slot = (jax.reshard(x, rows) for x in (tokens, positions, slot))
    tables = jax.reshard(tables, jax.P(*ROWS, None))

    def local(tables: jax.Array, slot: jax.Array) -> jax.Array:
        return jnp.where(slot[:, None] >= 0, tables[slot], 0)  # padding writes to what is nobody's

    def tile(i: jax.Array, cache: Cache) -> Cache:
        own = jax.shard_map(local, in_specs=(jax.P(*ROWS, None), ROWS), out_specs=jax.P(*ROWS, None))
        _, cache = model.extend(params, cache, tile_at(tokens, i), tile_at(positions, i), own(tables, tile_at(slot, i)))
        return cache

    return state.replace(cache=jax.lax.fori_loop(0, tiles, tile, state.cache))


@jax.named_scope("begin")
def begin(state: DecodeState, turns: Slots) -> DecodeState:
    """Starts a turn in every slot that is active in `turns`."""
    turns = _laid_out(turns)
    pick = lambda new, old: jnp.where(turns.active if new.ndim == 1 else turns.active[:, None], new, old)  # noqa: E731
    return state.replace(slots=jax.tree.map(pick, turns, state.slots))


@jax.named_scope("free")
def free(state: DecodeState, mask: jax.Array) -> DecodeState:
    """Stops generation in the slots of mask bool[S]."""
    active = state.slots.active & ~jax.reshard(mask, ROWS)
    return state.replace(slots=state.slots.replace(active=active))


@jax.named_scope("copy_pages")
def copy_pages(
    model: Model, state: DecodeState, source: jax.Array, target: jax.Array, memories: bool = False
) -> DecodeState:
    """Copies page, or memory, source[i] to target[i], i32[n] each; n is split over the mesh, (0, 0) copies nothing."""
    source, target = (jax.reshard(x, ROWS) for x in (source, target))
    copied = model.copy_memories if memories else model.copy_pages
    return state.replace(cache=copied(state.cache, source, target))


def read_choices(model: Model, state: DecodeState, pages: jax.Array) -> jax.Array:
    """What was chosen for the tokens of pages i32[n], n split over the mesh (`Model.read_choices`)."""
    return model.read_choices(state.cache, jax.reshard(pages, ROWS))


@jax.named_scope("generate")
def generate(
    model: Model,
    params: Params,
    stops: StopTables,
    state: DecodeState,
    tables: jax.Array,
    lanes: jax.Array,
    tiles: jax.Array,
    steps: int,
    truncated: bool,
) -> tuple[DecodeState, jax.Array]:
    """Samples up to `steps` tokens in every active slot of some tiles; a slot freezes when its turn ends.

    Args:
      model, params, stops, state: the engine's.
      tables: i32[S,Q] pages of each slot's sequence, enough for the positions reached.
      lanes: i32[n,N] slots of each tile, counted in their shard, none twice; N is split over the mesh.
      tiles: i32[] the first tiles of `lanes` hold all slots that are active.
      steps, truncated: static. `truncated` is False when no active slot uses top-p, top-k or min-p.

    Returns:
      The new state, and `StepResult.packed`, i32[S, 2K+3].
    """
    count = state.slots.token.shape[0]
    tables, lanes = jax.reshard(tables, jax.P(*ROWS, None)), jax.reshard(lanes, jax.P(None, *ROWS))
    results = jnp.zeros((count, 2 * steps + 3), jnp.int32, out_sharding=jax.P(*ROWS, None))
    choose = functools.partial(_choose, truncated=truncated)
    choose = jax.shard_map(choose, in_specs=(jax.P(*ROWS, None), jax.P(), ROWS, ROWS, jax.P()), out_specs=ROWS)

    def tile(i: jax.Array, carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, results = carry
        own_lanes = tile_at(lanes, i)
        slots, pages = _cut((state.slots, tables), own_lanes)

        def more(carry: tuple[jax.Array, Cache, Slots, StepResult]) -> jax.Array:
            step, _, slots, _ = carry
            return (step < steps) & jnp.any(slots.active)

        def advance(carry: tuple[jax.Array, Cache, Slots, StepResult]) -> tuple[jax.Array, Cache, Slots, StepResult]:
            step, cache, slots, result = carry
            position = jnp.where(slots.active, slots.position, 0)
            own = jnp.where(slots.active[:, None], pages, 0)  # a frozen slot writes to what is nobody's
            hidden, cache = model.extend(params, cache, slots.token, position, own)
            return step + 1, cache, *choose(model.logits(params, hidden), stops, slots, result, step)

        blank = StepResult.blank(lanes.shape[1], steps)
        start = (jnp.int32(0), state.cache, slots, blank)
        if kernels.on_gpu():  # whose host would have to read after each token whether to go on
            _, cache, slots, result = jax.lax.fori_loop(0, steps, lambda _, carry: advance(carry), start)
        else:
            _, cache, slots, result = jax.lax.while_loop(more, advance, start)
        new_slots, results = _paste((state.slots, results), (slots, result.packed()), own_lanes)
        return DecodeState(cache, new_slots), results

    return jax.lax.fori_loop(0, tiles, tile, (state, results))


def _cut(tree: Tree, lanes: jax.Array) -> Tree:
    """The slots `lanes` of every shard."""
    local = lambda tree, lanes: jax.tree.map(lambda x: x[lanes], tree)  # noqa: E731
    return jax.shard_map(local, in_specs=(ROWS, ROWS), out_specs=ROWS)(tree, lanes)


def _paste(tree: Tree, part: Tree, lanes: jax.Array) -> Tree:
    """The inverse of `_cut`."""
    local = lambda tree, part, lanes: jax.tree.map(lambda x, y: x.at[lanes].set(y), tree, part)  # noqa: E731
    return jax.shard_map(local, in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS)(tree, part, lanes)


def _choose(
    logits: jax.Array, stops: StopTables, slots: Slots, result: StepResult, step: jax.Array, truncated: bool
) -> tuple[Slots, StepResult]:
    """Samples, records, and ends the turns that are over. Each device does it for its own slots."""
    position = slots.position + 1  # of the token that is sampled now
    uniform = sampling.uniforms(slots.keys, position)
    token, logprob = sampling.sample(logits, uniform, slots.sampling, truncated)
    entry = stops.table[slots.automaton, token].astype(jnp.int32)
    budget = slots.budget - 1
    over = jnp.where(budget <= 0, LENGTH, RUNNING)
    over = jnp.where(stops.eos[token], EOS, over)
    over = jnp.where(entry < 0, STOP, over)
    live = slots.active
    keep = lambda new, old: jnp.where(live, new, old)  # noqa: E731
    new_result = StepResult(
        tokens=result.tokens.at[:, step].set(token),  # of a frozen slot: past its count, never read
        logprobs=result.logprobs.at[:, step].set(logprob),
        count=result.count + live,
        finish=keep(over, result.finish),
        stop=keep(jnp.minimum(entry, 0), result.stop),
    )
    new_slots = slots.replace(
        token=keep(token, slots.token),
        position=keep(position, slots.position),
        active=live & (over == RUNNING),
        automaton=keep(jnp.maximum(entry, 0), slots.automaton),
        budget=keep(budget, slots.budget),
    )
    return new_slots, new_result
