"""Every choice of an algorithm is called once with made-up numbers, so that a wrong one is told before any training.

Beside what `contract.py` looks at, whatever moves weights must have a gradient, finite numbers also at targets without
weight, and no number of one sequence in another's. A group reward judges real episodes: its first group tells.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxagent import contract
from jaxagent.algorithms import corrections, distill
from jaxagent.algorithms.advantages import zero_signal
from jaxagent.algorithms.estimators import Comparison, TokenPath, TurnAdvantage, compared, estimated
from jaxagent.algorithms.objectives import NoObjective
from jaxagent.algorithms.policy_loss import READABLE, reads_of, tokens_of
from jaxagent.algorithms.teachers import Divergence
from jaxagent.config import ConfigError, RLConfig

_ROWS, _TARGETS, _LONGEST = 4, 32, 9
Flow = Callable[..., tuple[jax.Array, jax.Array]]  # the gradient of the sum, and the loss of each target


def check_answers(rl: RLConfig) -> None:
    """Refuses with a ConfigError what raises, or gives back what nothing could be trained with; names its class."""
    draw = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a group in which all failed has no mean
        if isinstance(rl.advantage, Comparison):
            _try_comparison(rl.advantage, rl.group_size)
        else:
            number, flag, turn = (jax.ShapeDtypeStruct((7,), dtype) for dtype in (np.float32, bool, np.int32))
            path = TokenPath(number, number, flag, turn, number)
            jax.eval_shape(functools.partial(estimated, rl.advantage), path)
        if isinstance(rl.correction, corrections.Importance):
            old, behaviour = draw.uniform(-3, -0.1, (2, 5)).astype(np.float32)
            corrections.factors_of(rl.correction, old, behaviour)
            corrections.mean_of(rl.correction, [old], [behaviour])
        contract.factors(rl.aggregation, np.array([3.0, 0.0, 5.0]), np.array([0, 0, 1]))
        if rl.echo is not None:
            contract.factors(rl.echo.denominator, np.array([2.0, 0.0, 4.0]), np.array([3.0, 1.0, 4.0]))
    if not isinstance(rl.objective, NoObjective):
        _try_objective(rl.objective, rl.correction if isinstance(rl.correction, corrections.OPSM) else None)
    if rl.critic is not None:
        _try_critic(rl.critic.loss, draw)
    if rl.distill is not None and isinstance(rl.distill.loss, Divergence):
        support = jnp.ones((2, 3, 5), bool).at[..., -1].set(False)
        student, teacher = draw.normal(size=(2, 2, 3, 5)).astype(np.float32)

        def divergence(student: jax.Array) -> tuple[jax.Array, jax.Array]:
            sides = (distill.renormalise(logits, support, 1.0) for logits in (student, teacher))
            found = distill.divergences(rl.distill.loss, *sides, support)
            return jnp.sum(found), found

        _check_flow(rl.distill.loss, _flow(divergence), "the student's log-probs", student)


def _try_comparison(advantage: Any, group_size: int) -> None:
    """Of more groups than attempts, or fewer: where both are as many a forgotten `keepdims` would broadcast."""
    groups = 4 if group_size != 4 else 5
    shape = (groups, group_size, *((3,) if isinstance(advantage, TurnAdvantage) else ()))
    rewards, mask = np.resize([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.25], shape), np.ones(shape, bool)
    mask[1, 0], mask[2] = group_size < 2, False  # an attempt that failed, and a group of which all have
    rewards[3] = 1.0  # no signal
    silent = zero_signal(rewards.reshape(groups, -1), mask.reshape(groups, -1)) & advantage.drop_zero_signal
    states = [np.resize([0, 1, 0, 2], shape)] if getattr(advantage, "reads_states", False) else []
    compared(advantage, rewards, mask, mask & ~silent.reshape(-1, *(1,) * (len(shape) - 1)), *states)


def _try_objective(objective: Any, opsm: corrections.OPSM | None) -> None:
    """Of sequences of all lengths, near the old policy and far from it, with small and large advantages of both signs.

    An objective may learn from few of them: only if it learns from none, it has no gradient.
    """
    draw, shape = np.random.default_rng(1), (_ROWS, _TARGETS)
    sequence, count = np.full(shape, -1, np.int32), 0
    for row in sequence:
        at = 0
        while at < _TARGETS - _LONGEST:
            length = int(draw.integers(1, _LONGEST + 1))
            row[at : at + length], at, count = count, at + length, count + 1
    mask = (sequence >= 0) & (draw.random(shape) < 0.9)
    old = draw.uniform(-4, -0.1, shape)
    step = draw.choice([0, 1e-5, 1e-3, 0.1, 1], shape) * draw.choice([-1, 1], shape)
    numbers = {
        "logprobs": np.minimum(old + step, -0.01),
        "old_logprobs": old,
        "advantages": (draw.choice([-1, 1], count) * 10 ** draw.uniform(-2, 1.5, count))[sequence],
        "behaviour_logprobs": old + draw.normal(0, 0.1, shape),
        "entropy": draw.uniform(0, 6, shape),
        "rewards": draw.choice([-1.0, 0.0, 0.5, 1.0], count)[sequence],
        "ages": draw.integers(0, 9, shape),
    }
    unread = set(READABLE) - set(reads_of(objective))
    numbers = {name: np.where(mask, x, 0.0).astype(np.float32) for name, x in numbers.items() if name not in unread}

    def loss(logprobs: jax.Array, numbers: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens = tokens_of(**numbers | {"logprobs": logprobs}, mask=jnp.asarray(mask), sequence=jnp.asarray(sequence))
        surrogate, _ = contract.loss_and_clipped(objective, tokens, like=logprobs)
        if opsm is not None:
            contract.array(opsm, contract.call(opsm, tokens), contract.per_target(logprobs, "a factor"))
        return jnp.sum(jnp.where(mask, surrogate, 0.0)), surrogate

    first = sequence == sequence[:, :1]
    changed = np.where(first & mask, np.float32(0.1), np.float32(0.0))
    other = {name: values - i * changed for i, (name, values) in enumerate(numbers.items(), 1)}
    flow = _flow(loss)
    surrogate = _check_flow(objective, flow, "tokens.logprobs", numbers["logprobs"], numbers, mask=mask)
    again = _check_flow(objective, flow, "tokens.logprobs", other["logprobs"], other, mask=mask)
    if not np.allclose(surrogate[~first], again[~first], rtol=1e-3, atol=1e-6):
        raise ConfigError(
            f"{contract.name_of(objective)} mixes sequences: its loss of one changes with the numbers of another, so "
            "that it would depend on what is packed together. Reduce over a sequence with tokens.sequence_sum or "
            "tokens.sequence_mean, and over an update with rl.aggregation."
        )


def _try_critic(loss: Any, draw: np.random.Generator) -> None:
    if type(loss.heads) is not int or loss.heads < 0:
        raise contract.wrong(loss, f"{loss.heads!r:.100}", "a whole number of 0 or more", "heads")
    old, returns = draw.uniform(0, 1, (2, 2, 6)).astype(np.float32)

    def total(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        per_token, _ = contract.loss_and_clipped(loss, outputs, old, returns, like=returns)
        values = contract.call(loss, outputs, method="values")
        contract.array(loss, values, contract.per_target(returns, "values"), "values")
        return jnp.sum(per_token), per_token

    shape = (*returns.shape, loss.heads) if loss.heads else returns.shape
    _check_flow(loss, _flow(total), "the outputs", draw.normal(size=shape).astype(np.float32))


def _flow(loss: Callable[..., tuple[jax.Array, jax.Array]]) -> Flow:
    return jax.jit(jax.grad(loss, has_aux=True))


def _check_flow(chosen: Any, flow: Flow, to: str, *at: Any, mask: np.ndarray | bool = True) -> np.ndarray:
    """The loss of each target, where its sum has a gradient with respect to the first argument; else a ConfigError."""
    gradient, values = map(np.asarray, flow(*at))
    for what, found in (("a loss", values), ("a gradient", gradient)):
        if (bad := ~np.isfinite(found.astype(np.float32))).any():
            where = "for ordinary numbers" if (bad & mask).any() else "at targets without weight, where all is 0,"
            raise contract.wrong(chosen, f"{what} of {found[bad][0]} {where}", "a finite number")
    if not gradient.any():
        raise ConfigError(
            f"{contract.name_of(chosen)} trains nothing: its loss has no gradient with respect to {to}, whatever they "
            "are. Is it made of stop_gradient, of whole numbers or of comparisons?"
        )
    return values
