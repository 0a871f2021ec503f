"""Policies behind the gateway's benchmark: one that answers at once, and the engine with a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent.config import EngineConfig, MeshConfig, SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import automaton, scheduler
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup, SampledTokens
from jaxagent.models import params, sharding
from jaxagent.models.spec import ModelSpec, round_up
from jaxagent.types import Generation

SLOTS = 32
WARM_UP_TIMEOUT_S = 300.0
EMPTY_TIMEOUT_S = 30.0  # for an engine to see that its sessions are closed


@dataclasses.dataclass(eq=False)
class _Open:
    task_id: str
    count: int = 0  # tokens so far
    closed: bool = False


class Instant:
    """Says its session's word and a number, at once.

    Attributes:
      open_sequences: opened and not closed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_ids[0]
        self.open_sequences = 0

    async def open(self, task_id: str, sample: int, group_size: int, domain: str, conversation: int) -> _Open:
        """A new sequence."""
        self.open_sequences += 1
        return _Open(task_id)

    async def generate(
        self,
        session: _Open,
        new_tokens: Sequence[int],
        max_tokens: int,
        sampling: SamplingConfig,
        turn: int,
        deadline_s: float,
        on_tokens: Callable[[SampledTokens], None] | None,
        stop_strings: Sequence[str] | None,
    ) -> Generation:
        """The answer, after one turn of the event loop."""
        await asyncio.sleep(0)
        text = f"{session.task_id} says turn {turn} of {len(new_tokens)}"
        ids = [*self._tokenizer.encode(text), self._eos][:max_tokens]
        ended = "eos" if ids[-1] == self._eos else "length"
        arrays = np.asarray(ids, np.int32), np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32)
        if on_tokens is not None:
            on_tokens(SampledTokens(*arrays))
        cached, session.count = session.count, session.count + len(new_tokens) + len(ids)
        return Generation(*arrays, ended, cached_tokens=cached)

    def close(self, session: _Open) -> None:
        """Ends a sequence."""
        self.open_sequences -= not session.closed
        session.closed = True


_schedulers: list[scheduler.Scheduler] = []


def tiny_engine(tokenizer: Tokenizer) -> Driver:
    """A started driver with random weights of two small layers."""
    size = tokenizer.vocab_size
    spec = ModelSpec(
        family="qwen3",
        vocab_size=size,
        padded_vocab_size=round_up(size, 64),
        num_layers=2,
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=32,
        tie_embeddings=True,
        rope_theta=10_000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        max_position=0,
        embed_init_std=0.5,
        compute_dtype="float32",
        param_dtype="float32",
        remat="none",
        logprob_chunk_tokens=1024,
    )
    cfg = EngineConfig(
        slots=SLOTS,
        steps_per_dispatch=8,
        prefill_tokens=512,
        pages=512,
        page_tokens=16,
        tile_rows=32,
        kv_on_update="recompute",
        cache_dtype="float32",
        request_timeout_s=60.0,
    )
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1))
    with jax.set_mesh(mesh):
        weights = params.init(spec, jax.random.key(0), params.shardings(spec, mesh, sharding.COMPUTE))
    stops = automaton.build([], tokenizer.token_bytes(), spec.padded_vocab_size)
    setup = EngineSetup(cfg=cfg, context=2048, stops=stops, eos_ids=tokenizer.eos_ids, exact=False)
    init = scheduler.Scheduler.__init__

    def kept(self: scheduler.Scheduler, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        _schedulers.append(self)

    scheduler.Scheduler.__init__ = kept
    driver = Driver(LanguageModel(spec, cfg.cache_dtype), weights, 0, setup, mesh)
    driver.start(WARM_UP_TIMEOUT_S)
    return driver


def leaked(policy: Any) -> dict[str, int]:
    """What is still taken, by name."""
    if isinstance(policy, Instant):
        return {"sequences": policy.open_sequences}
    (held,) = _schedulers
    end = time.monotonic() + EMPTY_TIMEOUT_S
    while True:
        taken = SLOTS - sum(map(len, held._free_slots))
        left = {"turns": len(held.requests), "slots": taken, "pages": sum(s.used_pages for s in held.stores)}
        if not any(left.values()) or time.monotonic() > end:
            policy.stop(EMPTY_TIMEOUT_S)
            for store in held.stores:
                store.check()
            return left
        time.sleep(0.1)
