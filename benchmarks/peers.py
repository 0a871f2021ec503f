"""Transformers and Tunix, each at its best, doing the work of `workloads`.

A peer offers several ways to do the same work (`ways`); `best` times each once and keeps the fastest, so that what is
compared later is not our idea of how to use somebody else's library. Where a way has to know how long a turn will
be before it starts (to sort, to size its cache, to compile), it is told: no such way exists in earnest.

Ways of transformers:
  rounds/k      every live episode's whole context, left-padded, `generate` to the longest turn of the round, what lies
                past an episode's own turn thrown away; in k batches of similar turn lengths
  kept/k        the same, but the key-value cache is kept from round to round, with the padding and what was thrown
                away masked out inside it; k fixed batches of similar length
  static cache  `cache_implementation="static"`
  continuous    the library's continuous batching with block sharing: a turn is a request that sends its history again
Ways of Tunix: rounds/k with its vanilla sampler, prompt padding and cache cut to size for every call.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks import workloads
from benchmarks.tiny_model import TinyModel
from benchmarks.workloads import Episode

Way = Callable[[Sequence[Episode], float], float]  # episodes, deadline in seconds -> seconds of the work itself
PAD = 0
PAGE_TOKENS = 64
_PATIENCE = 2.0  # what takes so many times the best is stopped, or not tried again
_PROBE_TOKENS = 8  # sampled per turn when threads are chosen


class TooSlow(Exception):
    """A way was stopped at its deadline."""


class Peer(Protocol):
    """One library."""

    name: str

    def ways(self, ragged: bool) -> dict[str, Way]:
        """How it can do the work."""

    def prepare(self, way: Way, episodes: Sequence[Episode]) -> str:
        """Chooses settings (threads) and compiles; returns the settings in words."""


def best(
    peer: Peer,
    episodes: Sequence[Episode],
    ragged: bool,
    note: Callable[[str], None],
    only: Collection[tuple[str, str]] = (),
) -> tuple[str, Way] | None:
    """The fastest way and its description; None when none works. `only`: (peer, way) pairs to try; empty = all."""
    found: tuple[float, str, Way] | None = None
    for name, way in peer.ways(ragged).items():
        if only and (peer.name, name) not in only:
            continue
        try:
            settings = peer.prepare(way, episodes)
            seconds = way(episodes, found[0] * _PATIENCE if found else float("inf"))
        except TooSlow as slow:
            note(f"{peer.name}, {name}: {slow}")
            continue
        except Exception as error:  # a way that this version or machine cannot go
            note(f"{peer.name}, {name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        note(f"{peer.name}, {name}, {settings}: {seconds:.2f} s")
        if found is None or seconds < found[0]:
            found = seconds, f"{name}, {settings}", way
    return None if found is None else found[1:]


def fastest_threads(run: Callable[[int], float]) -> int:
    """One thread or all, whichever takes `run` fewer seconds; all of them crawl where other jobs hold some cores."""
    run(1)
    one = min(run(1), run(1))
    cores = os.cpu_count() or 1
    every = run(cores)
    if every < _PATIENCE * one:
        every = min(every, run(cores))
    return cores if every < one else 1


# -------------------------------------------------------------------- rounds, for every library with a batch `generate`


def rounds(
    generate: Callable[[list[np.ndarray], int], list[np.ndarray]], episodes: Sequence[Episode], batches: int
) -> None:
    """Plays all episodes round by round: contexts in, `new` tokens for each out, cut to the turn's own length."""
    contexts = [np.zeros(0, np.int32)] * len(episodes)
    for turn in range(max(map(len, episodes))):
        live = [i for i, episode in enumerate(episodes) if turn < len(episode)]
        live.sort(key=lambda i: (episodes[i][turn].sampled, len(contexts[i])))
        for i in live:
            contexts[i] = np.concatenate([contexts[i], episodes[i][turn].given])
        for batch in _split(live, batches):
            new = max(episodes[i][turn].sampled for i in batch)
            for i, tokens in zip(batch, generate([contexts[i] for i in batch], new), strict=True):
                assert len(tokens) == new
                contexts[i] = np.concatenate([contexts[i], tokens[: episodes[i][turn].sampled]])


def left_pad(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(ids i64[B, n], mask i64[B, n]) with every row at the right end."""
    width = max(map(len, rows))
    ids, mask = np.full((len(rows), width), PAD, np.int64), np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return ids, mask


def _split(items: list[int], batches: int) -> Iterator[list[int]]:
    for part in np.array_split(np.asarray(items), min(batches, len(items))):
        yield part.tolist()


# -------------------------------------------------------------------- transformers


class Transformers:
    """torch on the CPU."""

    name = "transformers"

    def __init__(self, model: TinyModel) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._torch, self._transformers = torch, transformers
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model, self._continuous_model = (
            load(model.folder, dtype=torch.float32, attn_implementation="sdpa").eval() for _ in range(2)
        )
        self._threads = 0  # not chosen yet

    def ways(self, ragged: bool) -> dict[str, Way]:
        """See the module's docstring."""
        if not ragged:
            ways = {"generate": self._rounds(1), "generate, static cache": self._rounds(1, "static")}
        else:
            ways = {f"rounds/{k}": self._rounds(k) for k in (1, 4, 8)}
            ways |= {f"kept/{k}": self._kept(k) for k in (1, 4, 8)}
        return ways | {"continuous": self._continuous}

    def prepare(self, way: Way, episodes: Sequence[Episode]) -> str:
        """Takes the number of threads that is fastest on short turns, once; one, as a rule, on a busy machine."""
        if not self._threads:
            turns = [t for e in episodes for t in e[:1]]
            short = [(dataclasses.replace(t, sampled=min(t.sampled, _PROBE_TOKENS)),) for t in turns]

            def run(threads: int) -> float:
                self._threads = threads
                return way(short, float("inf"))

            self._threads = fastest_threads(run)
        return f"{self._threads} thread(s)"

    def _settings(self, **changes: Any) -> Any:
        # top_k=0: the default of 50 would sort; no EOS: lengths are forced.
        return self._transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD, **changes
        )

    def _timed(self, play: Callable[[Sequence[Episode]], None]) -> Way:
        def way(episodes: Sequence[Episode], _: float) -> float:
            self._torch.set_num_threads(self._threads)
            began = time.perf_counter()
            with self._torch.inference_mode():
                play(episodes)
            return time.perf_counter() - began

        return way

    def _rounds(self, batches: int, cache: str | None = None) -> Way:
        def generate(contexts: list[np.ndarray], new: int) -> list[np.ndarray]:
            ids, mask = map(self._torch.from_numpy, left_pad(contexts))
            settings = self._settings(max_new_tokens=new, cache_implementation=cache)
            out = self._model.generate(ids, attention_mask=mask, generation_config=settings)
            return list(out[:, ids.shape[1] :].numpy())

        return self._timed(lambda episodes: rounds(generate, episodes, batches))

    def _kept(self, batches: int) -> Way:
        def play(episodes: Sequence[Episode]) -> None:
            order = sorted(range(len(episodes)), key=lambda i: workloads.sampled_tokens([episodes[i]]))
            for batch in _split(order, batches):
                self._play_kept([episodes[i] for i in batch])

        return self._timed(play)

    def _play_kept(self, episodes: Sequence[Episode]) -> None:
        torch = self._torch
        cache = self._transformers.DynamicCache(config=self._model.config)
        ids = mask = torch.zeros((len(episodes), 0), dtype=torch.int64)
        live = list(range(len(episodes)))
        for turn in range(max(map(len, episodes))):
            rows = [row for row, i in enumerate(live) if turn < len(episodes[i])]
            if len(rows) < len(live):
                live = [live[row] for row in rows]
                ids, mask = ids[rows], mask[rows]
                cache.batch_select_indices(torch.tensor(rows))
            given, given_mask = map(torch.from_numpy, left_pad([episodes[i][turn].given for i in live]))
            ids, mask = torch.cat([ids, given], 1), torch.cat([mask, given_mask], 1)
            own = torch.tensor([episodes[i][turn].sampled for i in live])
            settings = self._settings(max_new_tokens=int(own.max()), return_dict_in_generate=True)
            out = self._model.generate(ids, attention_mask=mask, past_key_values=cache, generation_config=settings)
            ids, cache = out.sequences, out.past_key_values
            mask = torch.cat([mask, (torch.arange(int(own.max())) < own[:, None]).long()], 1)

    def _continuous(self, episodes: Sequence[Episode], deadline_s: float) -> float:
        torch = self._torch
        torch.set_num_threads(self._threads)  # read by the manager's thread when it starts
        most = max(map(len, episodes))
        tokens = sum(workloads.lengths(episodes))
        manager = self._continuous_model.init_continuous_batching(
            self._settings(max_new_tokens=workloads.MAX_TURN, eos_token_id=-1),
            self._transformers.ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=tokens // PAGE_TOKENS + (most + 1) * len(episodes),
                max_batch_tokens=2048,
            ),
        )
        manager.warmup()
        manager.start()
        try:
            began = time.perf_counter()
            self._play_continuous(manager, episodes, began + deadline_s)
            return time.perf_counter() - began
        finally:
            manager.stop(block=True, hard_stop=True)  # without a limit: what is left of it would slow the others

    def _play_continuous(self, manager: Any, episodes: Sequence[Episode], until_s: float) -> None:
        contexts = [np.zeros(0, np.int32)] * len(episodes)

        def ask(i: int, turn: int) -> None:
            contexts[i] = np.concatenate([contexts[i], episodes[i][turn].given])
            manager.add_request(
                contexts[i].tolist(), f"{i}-{turn}", max_new_tokens=episodes[i][turn].sampled, eos_token_id=-1
            )

        for i in range(len(episodes)):
            ask(i, 0)
        left = sum(map(len, episodes))
        while left:
            if time.perf_counter() > until_s:
                raise TooSlow(f"stopped at {_PATIENCE:.0f} times the best")
            result = manager.get_result(timeout=1.0)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the manager's thread ended")
                continue
            if not result.is_finished():
                continue
            i, turn = map(int, result.request_id.split("-"))
            if result.error or len(result.generated_tokens) != episodes[i][turn].sampled:
                raise RuntimeError(result.error or "wrong number of tokens")
            left -= 1
            contexts[i] = np.concatenate([contexts[i], np.asarray(result.generated_tokens, np.int32)])
            if turn + 1 < len(episodes[i]):
                ask(i, turn + 1)


# -------------------------------------------------------------------- Tunix


class Tunix:
    """Google's Tunix: Flax NNX model and vanilla sampler (the one that runs on a CPU)."""

    name = "tunix"

    def __init__(self, model: TinyModel) -> None:
        import jax.numpy as jnp
        from flax import nnx
        from tunix.generate import sampler
        from tunix.models.qwen2 import model as qwen2
        from tunix.models.qwen2 import params

        spec = model.spec
        self._sampler, self._spec = sampler, spec
        config = qwen2.ModelConfig(
            num_layers=spec.num_layers,
            vocab_size=spec.vocab_size,
            embed_dim=spec.embed_dim,
            hidden_dim=spec.mlp_dim,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            num_kv_heads=spec.num_kv_heads,
            rope_theta=int(spec.rope_theta),
            norm_eps=spec.norm_eps,
            use_tied_embedding=spec.tie_embeddings,
        )
        with nnx.use_eager_sharding(False):  # its weights name mesh axes, and here is no mesh
            self._model = params.create_model_from_safe_tensors(str(model.folder), config, dtype=jnp.float32)
        self._samplers: dict[tuple[int, int, int], Any] = {}
        self._calls = 0

    def ways(self, ragged: bool) -> dict[str, Way]:
        """See the module's docstring."""
        return {f"rounds/{k}": self._rounds(k) for k in ((1, 2, 4) if ragged else (1,))}

    def prepare(self, way: Way, episodes: Sequence[Episode]) -> str:
        """Compiles every shape of the workload, uncounted."""
        way(episodes, float("inf"))
        return "compiled to size"

    def _rounds(self, batches: int) -> Way:
        def way(episodes: Sequence[Episode], _: float) -> float:
            began = time.perf_counter()
            rounds(self._generate, episodes, batches)
            return time.perf_counter() - began

        return way

    def _generate(self, contexts: list[np.ndarray], new: int) -> list[np.ndarray]:
        width = max(map(len, contexts))
        key = (len(contexts), width, new)
        if key not in self._samplers:
            spec = self._spec
            cache = self._sampler.CacheConfig(width + new, spec.num_layers, spec.num_kv_heads, spec.head_dim)
            self._samplers[key] = self._sampler.Sampler(self._model, _TokenIds(), cache)
        self._calls += 1
        out = self._samplers[key](
            contexts,
            max_generation_steps=new,
            max_prompt_length=width,
            eos_tokens=[-1],
            temperature=1.0,
            top_p=1.0,
            seed=self._calls,
        )
        return [np.asarray(tokens, np.int32) for tokens in out.tokens]


class _TokenIds:
    """A tokenizer whose text is token ids."""

    def encode(self, ids: np.ndarray) -> list[int]:
        return ids.tolist()

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return PAD

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids


PEERS: dict[str, type] = {"transformers": Transformers, "tunix": Tunix}


def open_peers(model: TinyModel) -> dict[str, Peer]:
    """The peers of this interpreter; says which are missing."""
    found = {}
    for name, make in PEERS.items():
        try:
            found[name] = make(model)
        except ImportError as error:
            print(f"{name} is not compared: {error}", file=sys.stderr)
    return found
