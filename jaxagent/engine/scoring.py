"""Scoring token ids that somebody else sampled: the teacher's side of on-policy distillation, behind `POST /v1/score`.

    {"sequences": [[ids], ...], "positions": [[i, ...], ...], "top_k": 1, "temperature": 1.0,
     "candidates": [[[ids], ...], ...]}                                                           (the last is optional)
    -> {"scores": [{"logprobs": [n], "top_ids": [n][k], "top_logprobs": [n][k], "candidate_logprobs": [n][C]}, ...]}

For each of a sequence's n positions i (1 or more: nothing predicts the first token): the log-prob of token i given
those before it, of the k most likely tokens in its place, and of its C candidates, all at the temperature. One forward
pass of the model over whole sequences, without the engine's cache or slots; shapes, K and C are powers of two: few
programs.
Axis letters: B rows, T tokens, R positions per row, K top-k tokens, C candidates.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxagent.config import LEAST_TEMPERATURE
from jaxagent.models import scores, sharding
from jaxagent.models.params import Params
from jaxagent.models.spec import ModelSpec
from jaxagent.models.transformer import forward_packed

MOST_TEMPERATURE = 1000.0
MOST_SEQUENCES = 4096
MOST_K = 256  # top_k, and candidates per position
ROWS = 8  # sequences of one forward pass, at most
ROW_TOKENS = 16_384  # and their tokens
LEAST_TOKENS, LEAST_POSITIONS = 64, 16  # smallest shapes
FIELDS = ("sequences", "positions", "top_k", "temperature", "candidates")
OUTPUTS = scores.TopLogprobs._fields
AnswerScores = Callable[..., list[dict[str, Any]]]  # (params, request, given_up) -> answers, see `scorer`


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """A checked request; its lists run over sequences."""

    sequences: list[np.ndarray]  # i32[T]
    positions: list[np.ndarray]  # i32[n]
    candidates: list[np.ndarray]  # i32[n, C]
    top_k: int
    temperature: float


def parse(text: str, vocab: int, context: int) -> ScoreRequest:
    """Reads a body.

    Raises:
      ValueError: a mistake of the client's, described in one line.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict) or not {"sequences", "positions"} <= body.keys():
        raise ValueError("the body must be an object with 'sequences' and 'positions'")
    if unknown := [name for name in body if name not in FIELDS]:
        raise ValueError(f"unknown field '{unknown[0]}'; known: {', '.join(FIELDS)}")
    top_k, temperature = body.get("top_k", 1), body.get("temperature", 1.0)
    if type(top_k) is not int or not 1 <= top_k <= min(MOST_K, vocab):
        raise ValueError(f"'top_k' must be a number from 1 to {min(MOST_K, vocab)}")
    if type(temperature) not in (int, float) or not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        raise ValueError(f"'temperature' must be from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}")
    sequences = [_ids(s, 1, "a sequence", vocab) for s in _list(body["sequences"], "sequences")]
    positions = [_ids(p, 1, "a sequence's positions", 2**31) for p in _list(body["positions"], "positions")]
    rows = body.get("candidates")
    if rows is None:
        candidates = [np.zeros((len(p), 0), np.int32) for p in positions]
    else:
        candidates = [_ids(c, 2, "a sequence's candidates", vocab) for c in _list(rows, "candidates")]
    if len(sequences) > MOST_SEQUENCES:
        raise ValueError(f"there are {len(sequences)} sequences, a request may have {MOST_SEQUENCES}")
    if not len(sequences) == len(positions) == len(candidates):
        raise ValueError("'sequences', 'positions' and 'candidates' must be of the same length")
    widths = set()
    for tokens, at, some in zip(sequences, positions, candidates, strict=True):
        if not 0 < len(tokens) <= context:
            raise ValueError(f"a sequence has {len(tokens)} tokens, it must have 1 to {context}")
        if len(at) and (at.min() < 1 or at.max() >= len(tokens) or (np.diff(at) <= 0).any()):
            raise ValueError("positions must grow, from 1 to below their sequence's length")
        if len(some) != len(at):
            raise ValueError("there must be a list of candidates for every position")
        if len(at):
            widths.add(some.shape[1])
    if len(widths) > 1 or max(widths, default=0) > MOST_K:
        raise ValueError(f"every position must have as many candidates as the others, {MOST_K} at most")
    return ScoreRequest(sequences, positions, candidates, top_k, float(temperature))


def scorer(spec: ModelSpec, mesh: jax.sharding.Mesh) -> AnswerScores:
    """Scores requests under any parameters of the model, one request at a time; holds a compiled program per shape."""
    return functools.partial(_answers, spec, mesh, threading.Lock())


def _answers(
    spec: ModelSpec,
    mesh: jax.sharding.Mesh,
    lock: threading.Lock,
    params: Params,
    request: ScoreRequest,
    given_up: threading.Event | None = None,
) -> list[dict[str, Any]]:
    """The answer for each sequence, ready for JSON. Blocks while the device works, or until the client is gone."""
    answers: list[dict[str, Any]] = [{name: [] for name in OUTPUTS} for _ in request.sequences]
    with lock, jax.set_mesh(mesh):
        for part in _parts(request):
            if given_up is not None and given_up.is_set():
                break
            arrays = _rows(request, part)
            where = [sharding.rows(mesh, a.ndim) for a in arrays]
            k = min(_power(request.top_k, 1), spec.vocab_size)
            top = _score(spec, k, params, request.temperature, *jax.device_put(arrays, where))
            # Asked for as many as the program has; answered as many as were asked for.
            top = jax.device_get(top)
            width = request.candidates[part[0]].shape[1]
            top = top._replace(
                top_ids=top.top_ids[..., : request.top_k],
                top_logprobs=top.top_logprobs[..., : request.top_k],
                candidate_logprobs=top.candidate_logprobs[..., :width],
            )
            for name, values in zip(OUTPUTS, top, strict=True):
                for row, i in enumerate(part):
                    answers[i][name] = values[row, : len(request.positions[i])].tolist()
    return answers


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(
    spec: ModelSpec,
    k: int,
    params: Params,
    temperature: float,
    tokens: jax.Array,
    segments: jax.Array,
    at: jax.Array,
    targets: jax.Array,
    candidates: jax.Array,
) -> scores.TopLogprobs:
    """[B, R, ...] for tokens, segments i32[B, T], at, targets i32[B, R] and candidates i32[B, R, C]."""
    b, t = tokens.shape
    positions = sharding.constrain(jax.numpy.broadcast_to(jax.numpy.arange(t), (b, t)), jax.P(sharding.ROWS, None))
    x, *_ = forward_packed(params, spec, tokens, positions, segments, at)
    flat = [sharding.merge_rows(a) for a in (x, targets, candidates)]
    of_targets = scores.top_logprobs(params, spec, *flat, k, temperature)
    return jax.tree.map(lambda a: sharding.split_rows(a, b, at.shape[1]), of_targets)


def _parts(request: ScoreRequest) -> Iterator[list[int]]:
    """Sequences of similar length, as many as one forward pass takes."""
    order = sorted((i for i, at in enumerate(request.positions) if len(at)), key=lambda i: -len(request.sequences[i]))
    while order:
        rows = _row_count(_power(len(request.sequences[order[0]]), LEAST_TOKENS))
        yield order[:rows]
        order = order[rows:]


def _row_count(tokens: int) -> int:
    return max(1, min(ROWS, ROW_TOKENS // tokens))


def _rows(request: ScoreRequest, part: Sequence[int]) -> list[np.ndarray]:
    """tokens, segments [B, T], places before the targets, targets [B, R], candidates [B, R, C]; padding is 0."""
    t = _power(max(len(request.sequences[i]) for i in part), LEAST_TOKENS)
    r = _power(max(len(request.positions[i]) for i in part), LEAST_POSITIONS)
    width = request.candidates[part[0]].shape[1]
    b, c = _row_count(t), width and _power(width, 1)
    tokens, segments = np.zeros((b, t), np.int32), np.zeros((b, t), np.int32)
    at, targets, candidates = np.zeros((b, r), np.int32), np.zeros((b, r), np.int32), np.zeros((b, r, c), np.int32)
    for row, i in enumerate(part):
        sequence, positions = request.sequences[i], request.positions[i]
        n = len(positions)
        tokens[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
        at[row, :n], targets[row, :n] = positions - 1, sequence[positions]
        candidates[row, :n, :width] = request.candidates[i]
    return [tokens, segments, at, targets, candidates]


def _power(n: int, least: int) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def _list(value: Any, name: str) -> list:
    if not isinstance(value, list):
        raise ValueError(f"'{name}' must be a list")
    return value


def _ids(value: Any, ndim: int, what: str, bound: int) -> np.ndarray:
    """i32 array of `ndim` dimensions, or ValueError."""
    flat = itertools.chain.from_iterable(_list(v, what) for v in _list(value, what)) if ndim > 1 else _list(value, what)
    if not all(type(i) is int for i in flat):  # before NumPy makes an array of them, whatever they are
        raise ValueError(f"{what} must be {'lists' if ndim > 1 else 'a list'} of numbers from 0 to {bound - 1}")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # ragged
        array = np.zeros((), object)
    if array.size == 0 and array.ndim <= ndim:
        return np.zeros((0,) * ndim, np.int32)
    if array.ndim != ndim or array.dtype.kind != "i" or array.min() < 0 or array.max() >= bound:
        raise ValueError(f"{what} must be {'lists' if ndim > 1 else 'a list'} of numbers from 0 to {bound - 1}")
    return array.astype(np.int32)
