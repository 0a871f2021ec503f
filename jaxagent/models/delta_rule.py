"""The gated delta rule, a memory of fixed size that is read, corrected and faded token by token, in two forms.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T        o_t = S_t^T q_t

`step` says just this. `chunked` computes the same for whole sequences with matrix products, for training: inside a
chunk the corrections of its tokens solve one triangular system (the WY form), and only chunks follow one another.
See Yang et al., Gated Delta Networks (https://arxiv.org/abs/2412.06464), section 3.3. All in float32.

Axis letters: B packed rows, T tokens, n chunks, C tokens of a chunk, H heads, K and V dimensions of a key and a value.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64
SPAN = 64 * CHUNK  # tokens of a row that lie in chunks at once
_NEVER = -1e30  # the logarithm of a decay that leaves nothing; finite, so that its gradient is 0 and not NaN


class Inputs(NamedTuple):
    """What the rule takes of tokens [...]; q and k are normed, and q scaled."""

    q: jax.Array  # f32[..., H, K]
    k: jax.Array  # f32[..., H, K]
    v: jax.Array  # f32[..., H, V]
    log_decay: jax.Array  # g, f32[..., H], not above 0
    beta: jax.Array  # f32[..., H]


def step(state: jax.Array, token: Inputs) -> tuple[jax.Array, jax.Array]:
    """One token: (S, o) = (f32[H, K, V], f32[H, V]) from the memory f32[H, K, V] before it."""
    chex.assert_rank([state, token.q], [3, 2])
    decay = jnp.exp(token.log_decay)[:, None]
    correction = (token.v - decay * _product("hkv,hk->hv", state, token.k)) * token.beta[:, None]
    state = state * decay[:, :, None] + token.k[:, :, None] * correction[:, None, :]
    return state, _product("hkv,hk->hv", state, token.q)


@jax.named_scope("delta_rule")
def chunked(tokens: Inputs, segments: jax.Array) -> jax.Array:
    """o f32[B, T, H, V] of packed rows; every segment begins with an empty memory. Call it on one device.

    No exponent is above 0: decays between two tokens are sums of what lies between them, not differences of running
    sums, so large gates neither overflow nor cancel.

    Args:
      tokens: `Inputs` of [B, T]. Of long rows backward computes span after span again: what their chunks are made of
        would take ten times the memory of the tokens.
      segments: i32[B, T], equal where tokens belong together, and those lie side by side.
    """
    b, t = segments.shape
    chex.assert_rank(tokens.q, 4)
    empty = jnp.zeros_like(tokens.k, shape=(b, *tokens.k.shape[2:], tokens.v.shape[-1]))
    start = empty, segments[:, :1] - 1
    if t <= SPAN:
        return _span(start, (tokens, segments))[1]
    spans = -(-t // SPAN)

    def cut(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [spans, B, SPAN, ...]."""
        x = jnp.pad(x, ((0, 0), (0, spans * SPAN - t), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(b, spans, SPAN, *x.shape[2:]), 1, 0)

    _, out = lax.scan(jax.checkpoint(_span), start, jax.tree.map(cut, (tokens, segments)))
    return jnp.moveaxis(out, 0, 1).reshape(b, spans * SPAN, *out.shape[3:])[:, :t]


def _span(
    start: tuple[jax.Array, jax.Array], rows: tuple[Inputs, jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """((the memory behind the last token, its segment [B, 1]), o), from those before the first token."""
    (state, last), (tokens, segments) = start, rows
    b, t = segments.shape
    chunks = -(-t // CHUNK)

    def cut(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [n, B, C, ...]."""
        x = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - t), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(b, chunks, CHUNK, *x.shape[2:]), 1, 0)

    q, k, v, g, beta = (jnp.moveaxis(cut(x), 3, 2) for x in tokens)  # [n, B, H, C, ...]
    of_chunk = cut(segments)
    before = jnp.concatenate([last[None], of_chunk[:-1, :, -1:]])  # segment of the token before the chunk
    inside, strictly = (jnp.tril(jnp.ones((CHUNK, CHUNK), bool), diagonal) for diagonal in (0, -1))
    same = of_chunk[:, :, None, :, None] == of_chunk[:, :, None, None, :]
    # [.., i, j]: the logarithm of what is left at token i of what token j has written.
    between = jnp.cumsum(jnp.where(strictly, g[..., :, None], 0.0), axis=-2)
    decay = jnp.exp(jnp.where(same & inside, between, _NEVER))
    total = jnp.cumsum(g, axis=-1)
    goes_on = (of_chunk == before)[:, :, None, :]  # the token's memory is the one from before the chunk
    since = jnp.exp(jnp.where(goes_on, total, _NEVER))  # what is left of that memory at each token
    until = decay[..., -1, :]  # what is left of each token at the end; 0 of other segments than the last token's

    beta = beta[..., None]
    system = jnp.where(strictly, _product("...ik,...jk->...ij", k * beta, k) * decay, 0.0)
    right = jnp.concatenate([v * beta, k * (beta * since[..., None])], axis=-1)
    solved = _product("...ij,...jk->...ik", inverse(system), right)
    values, keys = jnp.split(
        solved, [v.shape[-1]], axis=-1
    )  # corrections: of an empty memory, and what a full one takes
    scores = _product("...ik,...jk->...ij", q, k) * decay
    xs = values, keys, scores, q * since[..., None], k * until[..., None], since[..., -1]

    def chunk(state: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, keys, scores, queries, written, left = xs
        corrections = values - _product("bhck,bhkv->bhcv", keys, state)
        out = _product("bhck,bhkv->bhcv", queries, state) + _product("bhij,bhjv->bhiv", scores, corrections)
        return state * left[..., None, None] + _product("bhck,bhcv->bhkv", written, corrections), out

    state, out = lax.scan(chunk, state, xs)
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)  # [B, n, C, H, V]
    return (state, segments[:, -1:]), out.reshape(b, chunks * CHUNK, *out.shape[3:])[:, :t]


@jax.custom_vjp
def inverse(lower: jax.Array) -> jax.Array:
    """(1 + lower)^-1 of strictly lower matrices f32[..., C, C], row after row from the first.

    By hand, since XLA solves many small triangular systems slowly, and their derivatives forty times as slowly.
    """

    def row(i: jax.Array, known: jax.Array) -> jax.Array:
        return known.at[..., i, :].add(-_product("...j,...jk->...k", lower[..., i, :], known))

    return lax.fori_loop(1, lower.shape[-1], row, jnp.zeros_like(lower) + jnp.eye(lower.shape[-1]))


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (result := inverse(lower)), result


def _inverse_backward(result: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    left = _product("...ji,...jk->...ik", result, gradient)
    return (-jnp.tril(_product("...ij,...kj->...ik", left, result), -1),)


inverse.defvjp(_inverse_forward, _inverse_backward)


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, precision=lax.Precision.HIGHEST)
