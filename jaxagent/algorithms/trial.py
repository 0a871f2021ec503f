"""Every choice of an algorithm is called once with made-up numbers, so that a wrong one is told before any training.

Beside what `contract.py` looks at, whatever moves weights must have a gradient, finite numbers also at targets without
weight, and no number of one sequence in another's. A group reward judges real episodes: its first group tells.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
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
from jaxagent.algorithms.estimate import compared, estimated
from jaxagent.algorithms.estimators import TokenAdvantage, TokenPath, TurnAdvantage
from jaxagent.algorithms.objectives import NoObjective
from jaxagent.algorithms.policy_loss import READABLE, reads_of, tokens_of
from jaxagent.algorithms.teachers import Divergence
from jaxagent.config import ConfigError, RLConfig

_ROWS, _TARGETS = 5, 128
Flow = Callable[..., tuple[jax.Array, jax.Array]]  # the gradient of the sum, and the loss of each target


def check_answers(rl: RLConfig) -> None:
    """Refuses with a ConfigError what raises, or gives back what nothing could be trained with; names its class."""
    draw, rl = np.random.default_rng(0), copy.copy(rl)
    for field in dataclasses.fields(rl):  # one that keeps a state learns nothing from made-up numbers
        with contextlib.suppress(Exception):  # some can't be copied
            object.__setattr__(rl, field.name, copy.deepcopy(getattr(rl, field.name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a group in which all failed has no mean
        if not isinstance(rl.advantage, TokenAdvantage):
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
            values = distill.divergences(rl.distill.loss, *sides, support)
            return jnp.sum(values), values

        _check_flow(rl.distill.loss, _flow(divergence), "the student's log-probs", student)


def _try_comparison(advantage: Any, group_size: int) -> None:
    """Of more groups than attempts, or fewer: where both are as many a forgotten `keepdims` would broadcast.

    Then of the same ones in another order: that of groups, and that of a group's attempts, are chance.
    """
    groups, draw = 4 if group_size != 4 else 5, np.random.default_rng(0)
    shape = (groups, group_size, *((3,) if isinstance(advantage, TurnAdvantage) else ()))
    rewards, mask = draw.random(shape), np.ones(shape, bool)
    mask[1, 0], mask[2] = group_size < 2, False  # an attempt that failed, and a group of which all have
    rewards[3] = 0.0  # no signal
    more = [np.resize([0, 1, 0, 2], shape)] if getattr(advantage, "reads_states", False) else []
    if getattr(advantage, "reads_branches", False):
        more = [np.full(shape[:2], -1), np.zeros(shape[:2], np.int64)]  # no forks
    silent = zero_signal(rewards.reshape(groups, -1), mask.reshape(groups, -1)).reshape(-1, *(1,) * (len(shape) - 1))
    read = mask & ~(silent & advantage.drop_zero_signal)
    first, again = (compared(advantage, rewards, mask, read, *more) for _ in range(2))
    where = mask & ~silent  # among equal rewards places may count
    for _ in range(4 * _equal(first[where], again[where])):  # no chance and no state is part of it
        order = draw.permutation(groups)[:, None], draw.permuted([np.arange(group_size)] * groups, axis=1)
        other = compared(advantage, *(x[order] for x in (rewards, mask, read, *more)))
        if not _equal(other[where[order]], first[order][where[order]]):
            raise ConfigError(
                f"{contract.name_of(advantage)} depends on the order of groups, or of the attempts of a group, which "
                "is chance: compare an attempt with those of its own group, along axis 1 of [N, G]."
            )


def _try_objective(objective: Any, opsm: corrections.OPSM | None) -> None:
    """Of sequences of all lengths, near the old policy and far from it, with numbers of several orders and both signs.

    An objective may learn from few of them: only if it learns from none, it has no gradient. Each is compared with
    itself at another place beside other ones, and alone.
    """
    draw, unread = np.random.default_rng(1), set(READABLE) - set(reads_of(objective))
    placed = [(0, 0, _sequence(draw, _TARGETS))]  # row, first target, sequence
    for row in range(1, _ROWS):
        at = 0
        while at < _TARGETS - 1:
            placed.append((row, at, _sequence(draw, int(np.ceil((_TARGETS - at) ** draw.random())))))
            at += len(placed[-1][2])

    def loss(logprobs: jax.Array, more: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens = tokens_of(logprobs=logprobs, **more)
        surrogate, _ = contract.loss_and_clipped(objective, tokens, like=logprobs)
        if opsm is not None:
            contract.array(opsm, contract.call(opsm, tokens), contract.per_target(logprobs, "a factor"))
        return jnp.sum(jnp.where(tokens.mask, surrogate, 0.0)), surrogate

    flow = _flow(loss)

    def of_each(placed: list[tuple[int, int, np.ndarray]], to: str = "") -> list[np.ndarray]:
        """The loss of each trained token of each sequence, and the gradient with respect to it: float[2, n]."""
        packed = np.zeros((_ROWS, _TARGETS), placed[0][2].dtype)
        packed["sequence"] = -1
        for number, (row, at, tokens) in enumerate(placed):
            packed[row, at : at + len(tokens)] = tokens
            packed["sequence"][row, at : at + len(tokens)] = number
        more = {name: packed[name] for name in packed.dtype.names if name not in unread}
        both = np.stack(_check_flow(objective, flow, to, more.pop("logprobs"), more, mask=packed["mask"]))
        return [both[:, row, at : at + len(tokens)][:, tokens["mask"]] for row, at, tokens in placed]

    first = of_each(placed, "tokens.logprobs")
    turned = [(-1 - row, _TARGETS - at - len(tokens), _sequence(draw, len(tokens))) for row, at, tokens in placed]
    turned[1::2] = [(row, at, tokens) for (row, at, _), (*_, tokens) in zip(turned[1::2], placed[1::2], strict=True)]
    pairs = [*zip(of_each(turned), first, strict=True)][1::2]  # every other sequence is another one now
    pairs += [(*of_each([(0, 0, tokens)]), own) for (*_, tokens), own in zip(placed, first, strict=True)]
    if not all(_equal(*pair) for pair in pairs):
        raise ConfigError(
            f"{contract.name_of(objective)} mixes sequences: its losses of one must not depend on what is packed beside"
            " it, so reduce over one with tokens.sequence_sum or tokens.sequence_mean, over all with rl.aggregation."
        )


def _sequence(draw: np.random.Generator, length: int) -> np.ndarray:
    """Made-up numbers of one, with names as `tokens_of` has them. Of a long one no ratio of probabilities overflows."""
    sign, mask = draw.choice([-1, 1], length), draw.random(length) < 0.9
    old, step = -(10 ** draw.uniform(-3, 1, length)), draw.choice([0, 1e-5, 1e-3, 0.1, 1, 3], length)
    numbers = {
        "logprobs": np.minimum(old + sign * np.minimum(step, 10 / length), -1e-3),
        "old_logprobs": old,
        "advantages": np.full(length, draw.choice([-1, 1]) * 10 ** draw.uniform(-3, 3)),
        "behaviour_logprobs": old + draw.normal(0, 0.1, length),
        "entropy": 10 ** draw.uniform(-2, 1.1, length),
        "rewards": np.full(length, draw.choice([-1, 0, 0.5, 1, *10 ** draw.uniform(0, 4, 2), -100])),
        "ages": 10 ** draw.uniform(0, 4, length) // 1 - 1,
        "turns": np.arange(length) // 5,
        "reference_logprobs": np.minimum(old + 0.1 * sign, -1e-3),
    }
    columns = [np.where(mask, x, 0.0).astype(np.float32) for x in numbers.values()]
    return np.rec.fromarrays([*columns, mask, np.zeros(length, np.int32)], names=[*numbers, "mask", "sequence"])


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """To the rounding of bfloat16 and of sums in another order."""
    return np.allclose(a, b, rtol=1e-2, atol=1e-3 * np.abs(b).max(-1, keepdims=True, initial=0.0))


def _try_critic(loss: Any, draw: np.random.Generator) -> None:
    if type(loss.heads) is not int or loss.heads < 0:
        raise contract.wrong(loss, f"{loss.heads!r:.100}", "a whole number of 0 or more", "heads")
    old, returns = draw.uniform(0, 1, (2, 2, 6)).astype(np.float32)

    def total(outputs: jax.Array, old: jax.Array, returns: jax.Array) -> tuple[jax.Array, jax.Array]:
        per_token, _ = contract.loss_and_clipped(loss, outputs, old, returns, like=returns)
        values = contract.call(loss, outputs, method="values")
        contract.array(loss, values, contract.per_target(returns, "values"), "values")
        return jnp.sum(per_token), per_token

    shape = (*returns.shape, loss.heads) if loss.heads else returns.shape
    arrays, flow = (draw.normal(size=shape).astype(np.float32), old, returns), _flow(total)
    first = _check_flow(loss, flow, "the outputs", *arrays)
    for other in (3 - 5 * x[:, 1:] for x in arrays), (0 * x[:, 1:] for x in arrays):  # turned, beside other numbers
        turned = [np.concatenate([x[:, :1], y], axis=1)[::-1, ::-1] for x, y in zip(arrays, other, strict=True)]
        again = _check_flow(loss, flow, "", *turned)
        if not all(_equal(x[::-1, -1], y[:, 0]) for x, y in zip(again, first, strict=True)):
            name = contract.name_of(loss)
            raise ConfigError(f"{name} mixes targets: its loss of one must not depend on what is packed beside it.")


def _flow(loss: Callable[..., tuple[jax.Array, jax.Array]]) -> Flow:
    # It runs a few times: half of the second that sums over sequences take to compile is saved.
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(jax.grad(loss, has_aux=True), compiler_options=quick)


def _check_flow(chosen: Any, flow: Flow, to: str, *at: Any, mask: np.ndarray | bool = True) -> tuple[np.ndarray, ...]:
    """The loss of each target, and the gradient of its sum with respect to the first argument; else a ConfigError.

    Where all of that gradient is 0, too: then the class trains nothing `to`, if that is not "".
    """
    gradient, values = (np.asarray(numbers, np.float32) for numbers in flow(*at))
    for what, numbers in (("a loss", values), ("a gradient", gradient)):
        if (bad := ~np.isfinite(numbers)).any():
            where = "for ordinary numbers" if (bad & mask).any() else "at targets without weight, where all is 0,"
            raise contract.wrong(chosen, f"{what} of {numbers[bad][0]} {where}", "a finite number")
    if to and not gradient.any():
        raise ConfigError(
            f"{contract.name_of(chosen)} trains nothing: its loss has no gradient with respect to {to}, whatever they "
            "are. Is it made of stop_gradient, of whole numbers or of comparisons?"
        )
    return values, gradient
