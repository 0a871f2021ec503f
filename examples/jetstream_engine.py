"""Our engine as google-jetstream's abstract `Engine`, for users of that package's orchestrator or clients.

    pip install 'jaxagent[jetstream]'

JetStream asks for prefill, insert and generate as functions of a decode state that it holds itself, so the scheduler
and the prefix tree stay out of it: each slot owns the pages of one sequence of full length, and a prefix is the pages
of a single sequence, which `insert` copies into a slot's. Its interface has no room for sampling settings, so decoding
is greedy, and it ends a request by comparing lengths after every call, so a call is one token.

Axis letters: S slots, Q pages per sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

from jaxagent.config import EngineConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import batching, functions
from jaxagent.engine.automaton import Automaton
from jaxagent.engine.executor import Sizes
from jaxagent.engine.model import ROWS, Cache, Model, Params


@flax.struct.dataclass
class Prefix:
    """A prefilled sequence: all its tokens but the last are cached."""

    cache: Cache  # page 0 is nobody's, pages 1..Q are the sequence's in order
    token: jax.Array  # i32[] the last one
    length: jax.Array  # i32[] tokens


@flax.struct.dataclass
class State:
    """JetStream's decode state: ours, and how many tokens each slot's turn has sampled."""

    decode: functions.DecodeState
    sampled: jax.Array  # i32[S]


class JetStreamEngine(engine_api.Engine):
    """One mesh with a single data shard; `tensor` may be split.

    Args:
      model: an `engine.model.Model`.
      stops: the stop automaton.
      eos_ids: tokens that end a turn.
      cfg: sizes; there are always pages for every slot at full length.
      context: tokens of the longest sequence, prompt and everything after it.
      mesh: with axes data, fsdp and tensor.
      tokenizer_path: folder of the model's tokenizer.

    Raises:
      ValueError: the mesh splits the slots.
    """

    def __init__(
        self,
        model: Model,
        stops: Automaton,
        eos_ids: Iterable[int],
        cfg: EngineConfig,
        context: int,
        mesh: jax.sharding.Mesh,
        tokenizer_path: str,
    ) -> None:
        if math.prod(mesh.shape[axis] for axis in ROWS[0]) != 1:
            raise ValueError("JetStream's slots are not split: the mesh must have data = fsdp = context = 1.")
        self._model, self._context, self._mesh, self._tokenizer_path = model, context, mesh, tokenizer_path
        is_eos = np.zeros(model.vocab_size, bool)
        is_eos[list(eos_ids)] = True
        with jax.set_mesh(mesh):
            if model.keeps_memories:
                raise ValueError("JetStream's prefixes are pages here: recurrent blocks are not supported.")
            self._sizes = sizes = Sizes.of(cfg, context, exact=False, model=model)
            self._stops = jax.device_put(functions.StopTables(stops.table, is_eos), jax.P())
            self._blank = jax.jit(lambda: model.init_cache(sizes.table + 1, sizes.page_tokens))()
        # Page 0 is nobody's; slot s has pages 1 + s * Q and on.
        self._tables = 1 + np.arange(sizes.slots * sizes.table, dtype=np.int32).reshape(sizes.slots, sizes.table)
        self._place = jax.jit(model.place)
        self._prefill = jax.jit(functions.prefill, static_argnums=0)
        self._insert = jax.jit(functools.partial(_insert, context=context), donate_argnums=1)
        lanes = np.arange(sizes.slots, dtype=np.int32).reshape(-1, sizes.tile_rows)
        self._generate = jax.jit(functools.partial(_generate, model, lanes=lanes), donate_argnums=2)

    def load_params(self, params: Params) -> Params:
        """A trainer's parameters as generation wants them."""
        with jax.set_mesh(self._mesh):
            return self._place(params)

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
    ) -> Prefix:
        """Caches the first `true_length` of `padded_tokens`, after an existing prefix, which stays as it is.

        Raises:
          ValueError: no token, or no room for one more.
        """
        tokens = np.asarray(padded_tokens, np.int32)[: int(true_length)]
        cache, start = self._blank, 0
        if existing_prefix is not None:  # its last token is still to be cached
            tokens = np.concatenate([np.asarray(existing_prefix.token)[None], tokens])
            cache, start = existing_prefix.cache, int(existing_prefix.length) - 1
        if not 0 < start + len(tokens) < self._context:
            raise ValueError(f"A prefix has 1 to {self._context - 1} tokens, not {start + len(tokens)}.")
        sizes = self._sizes
        spans = [batching.Span(tokens[:-1], start, 0)] if len(tokens) > 1 else []
        tiles = -(-self._context // sizes.tile_rows)
        call = batching.lay_out(spans, 1, 1, tiles, sizes.tile_rows, sizes.share)
        with jax.set_mesh(self._mesh):
            decode = self._prefill(
                self._model, params, functions.DecodeState(cache, slots=None), self._tables[:1],
                call.tokens, call.positions, call.slot, np.int32(call.tiles),
            )  # fmt: skip
            last = jax.device_put((tokens[-1], np.int32(start + len(tokens))), jax.P())
        return Prefix(decode.cache, *last)

    def insert(self, prefix: Prefix, decode_state: State, slot: int) -> State:
        """Starts a turn in a slot, whatever was in it; the old state is donated, the prefix may be used again."""
        with jax.set_mesh(self._mesh):
            return self._insert(prefix, decode_state, np.int32(slot))

    def generate(self, params: Params, decode_state: State) -> tuple[State, engine_api.ResultTokens]:
        """The next token of every slot; not valid where the turn is over. The old state is donated."""
        with jax.set_mesh(self._mesh):
            state, data = self._generate(params, self._stops, decode_state, self._tables)
        return state, engine_api.ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )

    def init_decode_state(self) -> State:
        """The decode state in which no slot has a turn."""
        sizes = self._sizes

        def make() -> State:
            pages = sizes.slots * sizes.table + 1
            decode = functions.init_state(self._model, sizes.slots, pages, sizes.page_tokens)
            return State(decode, jnp.zeros(sizes.slots, jnp.int32, out_sharding=ROWS))

        with jax.set_mesh(self._mesh):
            return jax.jit(make)()

    def get_prefix_destination_sharding(self) -> Prefix:
        """Where `insert` wants a prefix that comes from another engine."""
        whole = jax.sharding.NamedSharding(self._mesh, jax.P())
        return Prefix(jax.tree.map(lambda x: x.sharding, self._blank), whole, whole)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """The tokenizer's folder."""
        return tokenizer_pb2.TokenizerParameters(path=self._tokenizer_path, extra_ids=0)

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> TextTokenizer:
        """This project's tokenizer, since JetStream's own reads only SentencePiece models."""
        return TextTokenizer(Tokenizer.load(metadata.path))

    @property
    def max_concurrent_decodes(self) -> int:
        """S, the number of slots: every slot can generate at once."""
        return self._sizes.slots

    @property
    def samples_per_slot(self) -> int:
        """Always one: a request is sampled once."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The largest power of two that leaves room for a token: JetStream pads prompts to powers of two."""
        return 1 << (self._context - 1).bit_length() - 1

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh that the engine was made with."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None: no CPU devices are used beside the mesh."""
        return None


class TextTokenizer(tokenizer_api.Tokenizer):
    """Our tokenizer behind JetStream's interface."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, s: str, **options: Any) -> tuple[np.ndarray, int]:
        """Token ids, padded to a power of two, and how many of them are the text's."""
        ids = [*(self._tokenizer.prefix_ids if options.get("is_bos", True) else ()), *self._tokenizer.encode(s)]
        padded = np.zeros(1 << max(len(ids) - 1, 0).bit_length(), np.int32)
        padded[: len(ids)] = ids
        return padded, len(ids)

    def decode(self, token_ids: list[int], **_: Any) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """The id of padding. Any id will do, since lengths say which tokens are padding."""
        return 0

    @property
    def bos_id(self) -> int:
        """The token put before a text, or -1: `encode` does it."""
        return self._tokenizer.prefix_ids[0] if self._tokenizer.prefix_ids else -1

    @property
    def eos_id(self) -> int:
        """The first of the tokens that end a turn, or -1."""
        return min(self._tokenizer.eos_ids, default=-1)

    @property
    def stop_tokens(self) -> set[int]:
        """All tokens that end a turn. The id of padding is not added to them, as it is an ordinary token's."""
        return set(self._tokenizer.eos_ids)


def _insert(prefix: Prefix, state: State, slot: jax.Array, context: int) -> State:
    cache, slots = state.decode.cache, state.sampled.shape[0]
    specs = jax.tree.map(lambda pages: jax.typeof(pages).sharding.spec, cache)

    def local(cache: Cache, new: Cache, slot: jax.Array) -> Cache:
        def put(pages: jax.Array, own: jax.Array) -> jax.Array:
            own = own[1:]
            return jax.lax.dynamic_update_slice_in_dim(pages, own, 1 + slot * own.shape[0], 0)

        return jax.tree.map(put, cache, new)

    cache = jax.shard_map(local, in_specs=(specs, specs, jax.P()), out_specs=specs)(cache, prefix.cache, slot)
    here = np.arange(slots) == slot
    every = functools.partial(jnp.broadcast_to, shape=(slots,))
    requests = functions.Slots.blank(slots).replace(
        active=here, token=every(prefix.token), position=every(prefix.length - 1), budget=every(context - prefix.length)
    )
    decode = functions.begin(state.decode.replace(cache=cache), requests)
    return State(decode, jnp.where(jax.reshard(here, ROWS), 0, state.sampled))


def _generate(
    model: Model,
    params: Params,
    stops: functions.StopTables,
    state: State,
    tables: jax.Array,
    lanes: np.ndarray,
) -> tuple[State, jax.Array]:
    """The new state, and i32[S, 3]: token, whether it is valid, tokens sampled so far."""
    decode, packed = functions.generate(model, params, stops, state.decode, tables, lanes, len(lanes), 1, False)
    token, valid = packed[:, 0], packed[:, -3]
    sampled = state.sampled + valid
    return State(decode, sampled), jnp.stack([token, valid, sampled], axis=1)
