"""A driver around the toy model, and the same model by hand in NumPy."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxagent.config import EngineConfig, MeshConfig, SamplingConfig
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.requests import EngineSetup
from jaxagent.engine.turns import Turns
from jaxagent.models import sharding
from tests.engine.toy_model import Toy, toy_bonus

VOCAB = 26  # token i is the letter i
CONTEXT = 40
GREEDY = SamplingConfig(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
SAMPLED = SamplingConfig(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0)


class Letters:
    """What a server asks of a tokenizer: token i is the letter i."""

    vocab_size, prefix_ids = VOCAB, ()

    def token_bytes(self) -> list[bytes]:
        return [bytes([ord("a") + i]) for i in range(VOCAB)]

    def encode(self, text: str) -> list[int]:
        return [(ord(letter) - ord("a")) % VOCAB for letter in text]

    def least_tokens(self, text: str) -> int:
        return len(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes()[i] for i in ids).decode()

    def digest(self) -> str:
        return "letters"


def mesh_of(data: int) -> jax.sharding.Mesh:
    return sharding.make_mesh(MeshConfig(data, 1, 1, 1))


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)


def config(slots: int = 4, **changes) -> EngineConfig:
    fields = dict(
        slots=slots,
        steps_per_dispatch=3,
        prefill_tokens=8,
        pages=48,
        page_tokens=4,
        tile_rows=4,
        kv_on_update="keep",
        cache_dtype="float32",
        request_timeout_s=20.0,
    )
    return EngineConfig(**{**fields, **changes})


def make(
    slots: int = 4,
    params=None,
    stops: Sequence[str] = ("xy",),
    eos: Sequence[int] = (),
    model=None,
    data: int = 1,
    exact: bool = True,
    max_waiting: int | None = None,
    truncation: bool = False,
    turns: Turns | None = None,
    context: int = CONTEXT,
    **changes,
) -> Driver:
    letters = [bytes([ord("a") + i]) for i in range(VOCAB)]
    setup = EngineSetup(
        cfg=config(slots, **changes),
        context=context,
        stops=automaton.build(stops, letters, VOCAB),
        eos_ids=tuple(eos),
        exact=exact,
        truncation=truncation,
        seed=3,
        max_waiting=max_waiting,
    )
    return Driver(model or Toy(VOCAB), weights() if params is None else params, 7, setup, mesh_of(data), turns)


@contextlib.contextmanager
def running(*args, **kwargs) -> Iterator[Driver]:
    with make(*args, **kwargs) as driver:
        driver.start(timeout_s=60)
        yield driver


def next_logits(params: np.ndarray, sequence: Sequence[int]) -> np.ndarray:
    checksum = sum((i + 1) * t for i, t in enumerate(sequence))
    return params[sequence[-1]] + toy_bonus(checksum, np.arange(VOCAB))


def greedy(params: np.ndarray, sequence: Sequence[int], count: int) -> list[int]:
    sequence = list(sequence)
    for _ in range(count):
        sequence.append(int(next_logits(params, sequence).argmax()))
    return sequence[-count:]


def logprob(params: np.ndarray, sequence: Sequence[int], token: int, temperature: float) -> float:
    scaled = next_logits(params, sequence).astype(np.float64) / temperature
    return float(scaled[token] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum()))


def walk(stops: automaton.Automaton, tokens: Sequence[int]) -> tuple[int, str | None, int]:
    """(tokens up to the one that completes a stop string, the stop string or None, overshoot bytes), on the host."""
    state = automaton.START
    for count, token in enumerate(tokens, start=1):
        state = int(stops.table[state, token])
        if state < 0:
            return count, *stops.decode(state)
    return len(tokens), None, 0
