"""The compiled programs of one engine and the device state they work on.

Owned and called by the driver's thread alone, inside `jax.set_mesh`. There is one program of each kind (of decode one
per tile size), whatever the number of turns and the lengths of their sequences; `warm_up` compiles them all. The decode
state is donated from call to call, so the cache is updated in place. Calls are issued in order; only
`generate` waits for its result.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent.config import ConfigError, EngineConfig
from jaxagent.engine import batching, functions
from jaxagent.engine.automaton import StopTable
from jaxagent.engine.model import ROWS, Model, Params
from jaxagent.engine.requests import EngineSetup, Request
from jaxagent.models import kernels

# The engine's functions as programs: what is static, and which state a call overwrites in place. Nothing compiles here:
# `Executor` runs them, and a dry run lowers them from abstract arrays.
init_state = jax.jit(functions.init_state, static_argnames=("model", "slots", "pages", "page_tokens", "memories"))
prefill = jax.jit(functions.prefill, static_argnames="model", donate_argnames="state")
copy_pages = jax.jit(functions.copy_pages, static_argnames=("model", "memories"), donate_argnames="state")
read_choices = jax.jit(functions.read_choices, static_argnames="model")
begin = jax.jit(functions.begin, donate_argnames="state")
free = jax.jit(functions.free, donate_argnames="state")
generate = jax.jit(functions.generate, static_argnames=("model", "steps", "truncated"), donate_argnames="state")

_COPIES = 64  # pages or memories copied by one call, per shard
_SHARE = 16  # rows of prefill that read their pages together, in fast numerics
_LEAST_TILE = 8  # rows of the smallest decode tile but that of one row, in fast numerics


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of the programs, from the config, the longest sequence and the mesh."""

    shards: int  # data * fsdp * context: each has its own slots and pages
    slots: int  # per shard, whole tiles
    usable: int  # of them, as many as the config has: the rest is padding
    tile_rows: int  # per shard
    decode_tiles: tuple[int, ...]  # rows of a decode tile, per shard: the smallest that holds all active slots
    share: int  # rows of prefill that belong to one sequence and read its pages together
    prefill_tiles: int  # of one prefill call, at most
    pages: int  # per shard, the unused page 0 included
    page_tokens: int
    table: int  # columns: pages of the longest sequence, and then its memory if the model keeps any
    memories: int  # per shard, the unused memory 0 included; 0: the model keeps none

    @classmethod
    def of(cls, cfg: EngineConfig, context: int, exact: bool, model: Model) -> Sizes:
        """Sizes under the mesh in use.

        In exact numerics every row is computed in a tile of one size and attends on its own. In fast numerics rows
        of prefill attend together, and on a CPU, whose time grows with the rows, few active slots take a small tile.

        Raises:
          ConfigError: slots or pages that the mesh cannot divide, or too few pages for one sequence.
        """
        mesh = jax.sharding.get_abstract_mesh()
        shards = math.prod(mesh.shape[axis] for axis in ROWS[0])
        memories = cfg.memory_count if model.keeps_memories else shards
        for name, size in (("slots", cfg.slots), ("pages", cfg.pages), ("memories", memories)):
            if size < 1 or size % shards:
                raise ConfigError(
                    f"config.engine.{name}: {size} does not divide over mesh.data x fsdp x expert x context = {shards}."
                )
        if cfg != cfg.for_platform("cpu", shards):
            raise ConfigError("config.engine: a size of 0 is by platform; Config.for_platform puts one in its place.")
        table = -(-context // cfg.page_tokens)
        if cfg.pages // shards < table:
            raise ConfigError(
                f"config.engine.pages: {cfg.pages} pages of {cfg.page_tokens} tokens over {shards} shards cannot hold "
                f"one sequence of {context} tokens; at least {table * shards} are needed."
            )
        tile = cfg.tile_rows
        small = [1, *(tile // f for f in (8, 4, 2) if tile // f >= _LEAST_TILE and tile % f == 0)]
        return cls(
            shards=shards,
            slots=-(-cfg.slots // shards // tile) * tile,
            usable=cfg.slots // shards,
            tile_rows=tile,
            decode_tiles=(tile,) if exact or tile == 1 or kernels.platform() != "cpu" else (*small, tile),
            share=1 if exact else math.gcd(tile, _SHARE),
            prefill_tiles=max(1, -(-cfg.prefill_tokens // (shards * tile))),
            pages=cfg.pages // shards + 1,
            page_tokens=cfg.page_tokens,
            table=table + model.keeps_memories,
            memories=memories // shards + 1 if model.keeps_memories else 0,
        )

    @property
    def all_slots(self) -> int:
        """S: slots of all shards, padding included."""
        return self.slots * self.shards

    @property
    def prefill_rows(self) -> int:
        """Tokens that one prefill call can cache, per shard."""
        return self.prefill_tiles * self.tile_rows


class Executor:
    """Device side of the driver.

    Args:
      model: what to run.
      setup: what its programs are compiled for.

    Raises:
      ConfigError: see `Sizes.of`.
    """

    def __init__(self, model: Model, setup: EngineSetup) -> None:
        self.model, self.truncation = model.pinned() if setup.exact else model, setup.truncation
        self.sizes = Sizes.of(setup.cfg, setup.context, setup.exact, model)
        self.steps = setup.cfg.steps_per_dispatch
        self.params: Params | None = None
        self._is_eos = np.zeros(model.vocab_size, bool)
        self._is_eos[list(setup.eos_ids)] = True
        self.set_stops(StopTable(setup.stops, setup.cfg.stop_states).table)
        s = self.sizes
        counts = s.all_slots, s.pages * s.shards, s.page_tokens, s.memories * s.shards
        self._state = init_state(model, *counts)

    def set_params(self, params: Params) -> None:
        """Takes new weights: laid out as generation wants them; what lies so already is shared."""
        self.params = jax.block_until_ready(self.model.place(params))

    def set_stops(self, table: np.ndarray) -> None:
        """Takes the stop strings of all requests, a `StopTable.table`; its shape and dtype stay the same."""
        self._stops = jax.device_put(functions.StopTables(table.copy(), self._is_eos), jax.P())

    def prefill(self, spans: Sequence[batching.Span], tables: np.ndarray) -> int:
        """Caches spans, at most `sizes.prefill_rows` tokens per shard; tables i32[S,Q]. Returns the rows computed."""
        s = self.sizes
        *rows, tiles = batching.lay_out(spans, s.shards, s.slots, s.prefill_tiles, s.tile_rows, s.share)
        self._state = _issue(prefill, self.model, self.params, self._state, tables, *rows, np.int32(tiles))
        return tiles * s.tile_rows * s.shards

    def copy_pages(self, copies: Sequence[tuple[int, int, int]], memories: bool = False) -> None:
        """Copies whole pages, or memories one after the other: (shard, source, target) each."""
        by_shard = [[c[1:] for c in copies if c[0] == shard] for shard in range(self.sizes.shards)]
        for start in range(0, max(map(len, by_shard)), _COPIES):
            pairs = np.zeros((self.sizes.shards, _COPIES, 2), np.int32)
            for shard, all_pairs in enumerate(by_shard):
                part = all_pairs[start : start + _COPIES]
                pairs[shard, : len(part)] = np.reshape(part, (-1, 2))
            source, target = np.ascontiguousarray(pairs.reshape(-1, 2).T)
            self._state = _issue(copy_pages, self.model, self._state, source, target, memories)

    def take_choices(self, ends: Sequence[tuple[Request, int]]) -> None:
        """Adds to `Request.choices` those of its tokens up to an end which nobody has been handed; all in one read.

        They are what the model chose for tokens, its experts, and lie where the keys lie, so a prefix that is shared,
        copied or kept over turns brings its own. Each token's are handed on once, as they were when a token was first
        sampled behind it.
        """
        size, wanted, spans = self.sizes.page_tokens, [], []
        if not self.model.choices:
            return
        for request, end in ends:
            session = request.session
            first, last = session.recorded // size, -(-end // size)
            spans.append((len(wanted) * size + session.recorded - first * size, end - session.recorded))
            wanted += [(session.shard, page) for page in session.pages.pages[first:last]]
        if not wanted:
            return
        rows = self._read_choices(wanted).reshape(-1, self.model.choices)
        for (request, end), (start, count) in zip(ends, spans, strict=True):
            request.choices.append(rows[start : start + count])
            request.session.recorded = end

    def _read_choices(self, pages: Sequence[tuple[int, int]]) -> np.ndarray:
        """What was chosen for the tokens of pages, (shard, page) each: [n, page_tokens, W]."""
        shards = self.sizes.shards
        by_shard = [[page for owner, page in pages if owner == shard] for shard in range(shards)]
        parts = []
        for start in range(0, max(map(len, by_shard)), _COPIES):
            rows = np.zeros((shards, _COPIES), np.int32)
            for shard, own in enumerate(by_shard):
                part = own[start : start + _COPIES]
                rows[shard, : len(part)] = part
            read = jax.device_get(_issue(read_choices, self.model, self._state, rows.reshape(-1)))
            parts.append(read.reshape(shards, _COPIES, *read.shape[1:]))
        all_of = np.concatenate(parts, axis=1)
        at = [itertools.count() for _ in range(shards)]
        return np.stack([all_of[shard, next(at[shard])] for shard, _ in pages])

    def begin(self, turns: functions.Slots) -> None:
        """Starts turns."""
        self._state = _issue(begin, self._state, turns)

    def wait(self) -> None:
        """Blocks until the device has done everything issued so far, so that prefill and decode can be timed apart."""
        jax.block_until_ready(self._state.slots.position)

    def generate(
        self, tables: np.ndarray, active: np.ndarray, lengths: np.ndarray, truncated: bool
    ) -> functions.StepResult:
        """One dispatch over the slots of active bool[S], at lengths i32[S] tokens, with pages tables i32[S,Q]."""
        lanes, tiles = batching.choose_lanes(active, lengths, self.sizes.shards, self.sizes.decode_tiles)
        return self._dispatch(tables, lanes, tiles, truncated)

    def _dispatch(self, tables: np.ndarray, lanes: np.ndarray, tiles: int, truncated: bool) -> functions.StepResult:
        own, rows = (self.model, self.params, self._stops, self._state), (tables, lanes, np.int32(tiles))
        self._state, packed = _issue(generate, *own, *rows, self.steps, truncated)
        return functions.StepResult.unpack(jax.device_get(packed))

    def free(self, mask: np.ndarray) -> None:
        """Stops the slots of mask bool[S]."""
        self._state = _issue(free, self._state, mask)

    def warm_up(self) -> None:
        """Runs every program once on padding: afterwards nothing compiles. Needs parameters."""
        none = np.zeros(self.sizes.all_slots, bool)
        tables = np.zeros((self.sizes.all_slots, self.sizes.table), np.int32)
        self.prefill([], tables)
        for memories in (False, True) if self.sizes.memories else (False,):
            self.copy_pages([(0, 0, 0)], memories)
        if self.model.choices:
            self._read_choices([(0, 0)])
        self.begin(functions.Slots.blank(self.sizes.all_slots))
        self.free(none)
        for truncated in (False, True) if self.truncation else (False,):
            for rows in self.sizes.decode_tiles:
                count = 1 if rows < self.sizes.tile_rows else self.sizes.slots // rows
                own = np.arange(count * rows, dtype=np.int32).reshape(count, rows)
                self._dispatch(tables, np.tile(own, (1, self.sizes.shards)), count, truncated)
        self.wait()


def _issue(program: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a compiled program, the one place where the thread moves host arrays to the device.

    They are tables and requests of a few kilobytes, and the call itself moves them ten times faster than `device_put`
    would before it (10 against 90 microseconds of a dispatch). Anything else that the thread moved is a mistake, and
    fails (`Driver._run`).
    """
    with jax.transfer_guard("allow"):
        return program(*arguments)


def count_compiles(stats: collections.Counter[str]) -> Callable[..., None]:
    """Counts what XLA compiles in the calling thread, as "compiles" and "compile_s"; returns the listener."""
    thread = threading.get_ident()

    def listen(event: str, duration_s: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == thread:
            stats.update(compiles=1, compile_s=duration_s)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return listen
