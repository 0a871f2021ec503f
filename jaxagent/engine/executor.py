"""The compiled programs of one engine and the device state they work on.

Owned and called by the driver's thread alone, inside `jax.set_mesh`. Every shape it will ever use is compiled by
`warm_up`; the decode state is donated from call to call, so the cache is updated in place.
"""

from __future__ import annotations

import bisect
import collections
import threading
from collections.abc import Callable

import jax
import numpy as np

from jaxagent.config import ConfigError, EngineConfig
from jaxagent.engine import automaton, batching, functions
from jaxagent.engine.model import Model, Params

# Every program costs a second or more of compilation: these say when a specialised one is worth it.
_WINDOW_MULTIPLE = 64  # decode windows are multiples of this many cached tokens
_WINDOW_SHARES = (16, 4, 1)  # one decode program each, for slots filled to a sixteenth, a quarter, all of the context
_FRESH_SHARE = 8  # a prefill that does not read the cache, where the cache is so many times longer than the row


class Executor:
    """Device side of the driver.

    Args:
      model: what to run.
      stops: the stop automaton, for the model's vocabulary.
      eos_ids: tokens that end a turn by themselves.
      cfg: slots, steps per dispatch and buckets.
      context: tokens a slot can cache.
      truncation: whether requests may use top-p, top-k or min-p; the programs for it are compiled only then.

    Raises:
      ConfigError: slots or prefill rows that the mesh cannot divide; slots fewer than a prefill needs.
    """

    def __init__(
        self,
        model: Model,
        stops: automaton.Automaton,
        eos_ids: tuple[int, ...],
        cfg: EngineConfig,
        context: int,
        truncation: bool,
    ) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        for name, sizes in (("slots", (cfg.slots,)), ("prefill_rows", cfg.prefill_rows)):
            if bad := [n for n in sizes if n < 1 or n % shards]:
                raise ConfigError(
                    f"config.engine.{name}: {bad[0]} does not divide over mesh.data x mesh.fsdp = {shards}."
                )
        self.model, self.cfg, self.context, self.truncation = model, cfg, context, truncation
        self.lengths = tuple(sorted({min(n, context) for n in cfg.prefill_buckets}))
        self.rows = tuple(sorted(cfg.prefill_rows))
        self.fresh_lengths = tuple(n for n in self.lengths if n * _FRESH_SHARE <= context)
        self.windows = decode_windows(context)
        self.params: Params | None = None
        is_eos = np.zeros(model.vocab_size, bool)
        is_eos[list(eos_ids)] = True
        self._tables = jax.device_put(functions.StopTables(stops.table, is_eos), jax.P())
        self._place = jax.jit(model.place)
        self._init_state = jax.jit(functions.init_state, static_argnums=(0, 1, 2))
        self._prefill = jax.jit(functions.prefill, static_argnums=(0, 6))
        self._insert = jax.jit(functions.insert, static_argnums=0, donate_argnums=1)
        self._begin = jax.jit(functions.begin, donate_argnums=0)
        self._free = jax.jit(functions.free, donate_argnums=0)
        self._generate = jax.jit(functions.generate, static_argnums=(0, 4, 5, 6), donate_argnums=3)
        self._state = self._init_state(model, cfg.slots, context)

    def set_params(self, params: Params) -> None:
        """Takes new weights: a pointer swap, or one jitted reshard where generation wants them elsewhere."""
        self.params = self._place(params)

    def prefill(self, calls: list[batching.PrefillCall]) -> None:
        """Computes and inserts one round of prefills."""
        for call in calls:
            fresh = call.fresh and call.tokens.shape[1] in self.fresh_lengths
            prefix = self._prefill(self.model, self.params, self._state, call.tokens, call.start, call.slot, fresh)
            for row, slot, start in call.inserts:
                self._state = self._insert(self.model, self._state, prefix, row, slot, start)

    def begin(self, requests: functions.Requests) -> None:
        """Starts turns, and waits for the device so that prefill and decode can be timed apart."""
        self._state = self._begin(self._state, requests)
        jax.block_until_ready(self._state.position)

    def generate(self, cached: int, truncated: bool) -> functions.StepResult:
        """One dispatch. `cached`: the largest number of tokens cached in an active slot before it."""
        needed = min(cached + self.cfg.steps_per_dispatch, self.context)
        window = self.windows[bisect.bisect_left(self.windows, needed)]
        self._state, packed = self._generate(
            self.model,
            self.params,
            self._tables,
            self._state,
            self.cfg.steps_per_dispatch,
            window,
            truncated,
        )
        return functions.StepResult.unpack(np.asarray(packed))

    def free(self, mask: np.ndarray) -> None:
        """Stops the slots of mask bool[S]."""
        self._state = self._free(self._state, mask)

    def warm_up(self) -> None:
        """Runs every program once on padding: afterwards nothing compiles. Needs parameters."""
        slots = self.cfg.slots
        for rows in self.rows:
            index = np.zeros(rows, np.int32)
            nowhere = np.full(rows, slots, np.int32)
            for length in self.lengths:
                tokens = np.zeros((rows, length), np.int32)
                for fresh in (True, False) if length in self.fresh_lengths else (False,):
                    call = batching.PrefillCall(tokens, index, index, fresh, ((index, nowhere, index),), 0)
                    self.prefill([call])
        self.begin(functions.Requests.blank(slots))
        self.free(np.zeros(slots, bool))
        for window in self.windows:
            for truncated in (False, True) if self.truncation else (False,):
                self.generate(window - self.cfg.steps_per_dispatch, truncated)


def decode_windows(context: int) -> tuple[int, ...]:
    """How many cached tokens the decode programs look at, ascending; the last is the whole context."""
    parts = (-(-context // (share * _WINDOW_MULTIPLE)) * _WINDOW_MULTIPLE for share in _WINDOW_SHARES)
    return tuple(sorted({min(part, context) for part in parts}))


def count_compiles(stats: collections.Counter[str]) -> Callable[..., None]:
    """Counts what XLA compiles in the calling thread, as "compiles" and "compile_s"; returns the listener."""
    thread = threading.get_ident()

    def listen(event: str, duration_s: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == thread:
            stats.update(compiles=1, compile_s=duration_s)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return listen
