"""What holds for EVERY function that takes a mask: one table, the same checks for each.

What stands outside the mask is never read, in values or in gradients; results are 0 there; gradients are finite
everywhere, also where a whole row is masked or all values are equal; jit changes nothing; float32 is float64 to 1e-5
(functions that run on NumPy), and a function that has no reference of its own elsewhere has a loop here.
"""

import functools
import inspect
import pathlib
import pkgutil
import re
import statistics
import typing
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxagent import algorithms, config
from jaxagent.algorithms import distill, policy_loss
from jaxagent.algorithms.advantages import whiten, zero_signal
from jaxagent.algorithms.aggregate import SequenceMean
from jaxagent.algorithms.corrections import OPSM
from jaxagent.algorithms.estimators import TokenPath, TurnMeanStd
from jaxagent.algorithms.gae import turn_starts
from jaxagent.algorithms.objectives import OBJECTIVES
from jaxagent.algorithms.policy_loss import sequence_mean, tokens_of
from jaxagent.algorithms.teachers import JSD, ForwardKL, ReverseKL
from jaxagent.algorithms.value_losses import VALUE_LOSSES, Squared
from jaxagent.config.parse import hints, kind
from tests.algorithms.entries import BEST_OF_K, GROUP, TOKEN

SHAPE = (4, 6)
TURNS = np.array([0, 0, 1, 1, 3, 3], np.int32)
SEQUENCE = np.array([[0, 0, 0, 1, 1, 1]] * 4, np.int32)
KL_ESTIMATORS = typing.get_args(kind(hints(config.KLConfig)["estimator"]).value)
DIVERGENCES = {"reverse_kl": ReverseKL(), "forward_kl": ForwardKL(), "jsd": JSD(beta=0.3)}


class Case(NamedTuple):
    run: Callable  # mask bool[4, 6], inputs float[4, 6] -> tuple of float[4, 6]
    inputs: int
    numpy: bool = False  # of NumPy arrays: it has no gradient
    differentiable: bool = True
    reference: Callable | None = None  # the same on lists of what the mask keeps of one row, in float64


def grouped(function, *more):
    return lambda mask, r: (function(r, mask, *more),)


def along(entry):
    def one(mask, *inputs):
        estimate = entry(TokenPath(inputs[0], inputs[1], mask, jnp.asarray(TURNS), inputs[2]))
        return estimate.advantages, estimate.returns

    return jax.vmap(one)


def guarded(function):
    """As the learner calls a per-token loss (`learner/loss.py`): zeros go in where there is no weight."""

    def run(mask, *inputs):
        out = function(mask, *(jnp.where(mask, x, 0.0) for x in inputs))
        return (jnp.where(mask, out, 0.0),)

    return run


def tokens(mask, *inputs):
    reference = jnp.where(mask, inputs[1], 0.0)
    return tokens_of(
        *inputs, mask, jnp.asarray(SEQUENCE), turns=jnp.broadcast_to(TURNS, SHAPE), reference_logprobs=reference
    )


def discounted(r, v, log_rho):
    sums = [sum(0.9 ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]
    return sums, sums


def clipped_regression(v, old, g):
    near = [o + min(max(x - o, -0.5), 0.5) for x, o in zip(v, old, strict=True)]
    return ([max((x - y) ** 2, (n - y) ** 2) / 2 for x, n, y in zip(v, near, g, strict=True)],)


def divergence(name, p, q):
    d = [a - b for a, b in zip(p, q, strict=True)]
    k3 = [min(np.exp(-min(max(x, -20), 20)) - 1 + min(max(x, -20), 20), 10.0) for x in d]
    values = {"k1": d, "k2": [x * x / 2 for x in d], "k3": k3, "k3+": k3, "abs": [abs(x) for x in d]}
    return (values[name],)


def in_bins(name):
    def run(mask, value, returns):
        logits = value[..., None] * jnp.arange(4.0)
        return VALUE_LOSSES[name](low=-1.0, high=1.0, bins=4)(logits, returns, returns)[0]

    return run


CASES = {
    **{name: Case(grouped(function), 1, numpy=True) for name, function in GROUP.items()},
    **{name: Case(grouped(entry(k=3)), 1, numpy=True) for name, entry in BEST_OF_K.items()},
    "turn_mean_std": Case(
        lambda mask, r: (TurnMeanStd()(r.reshape(4, 2, 3), mask.reshape(4, 2, 3)).reshape(4, 6),), 1, numpy=True
    ),
    "whiten": Case(grouped(whiten), 1, numpy=True),
    "aggregate": Case(
        lambda m, x: (SequenceMean()(m.sum(1))[:, None] * np.where(m, x, 0.0),), 1, numpy=True
    ),
    **{name: Case(along(entry()), 3) for name, entry in TOKEN.items()},
    "return": Case(along(TOKEN["return"](gamma=0.9)), 3, reference=discounted),
    "sequence_mean": Case(
        lambda mask, x: (jnp.where(mask, sequence_mean(x, mask, jnp.zeros(SHAPE, int)), 0),), 1,
        reference=lambda x: ([statistics.fmean(x)] * len(x) if x else [],),
    ),
    **{
        name: Case(guarded(lambda m, *x, f=entry: f()(tokens(m, *x))[0]), 3)
        for name, entry in OBJECTIVES.items()
    },
    "opsm": Case(guarded(lambda m, *x: OPSM(0.1)(tokens(m, *x))), 3, differentiable=False),
    **{
        f"kl_{name}": Case(guarded(lambda m, p, q, name=name: policy_loss.kl_loss(p, q, name)), 2,
                           reference=functools.partial(divergence, name))
        for name in KL_ESTIMATORS
    },
    "clipped_value_loss": Case(
        guarded(lambda m, *x: Squared(0.5)(*x)[0]), 3, reference=clipped_regression
    ),
    "hl_gauss": Case(guarded(in_bins("hl_gauss")), 2),
    "two_hot": Case(guarded(in_bins("two_hot")), 2),
}  # fmt: skip

# Not the objectives (their own file does), and no associative scan: outside jit each of its operations compiles.
EAGER = [name for name, case in CASES.items() if case.reference and name != "sequence_mean"]
REGIMES = ("random", "empty", "full", "equal", "extreme")


def draw(regime: str, n: int) -> tuple[np.ndarray, ...]:
    """A mask and n inputs f32[4, 6], nan where it is False. Row 0 is masked whole, row 1 but for one element."""
    rng = np.random.default_rng(REGIMES.index(regime))
    mask = rng.random(SHAPE) < {"empty": 0.0, "full": 1.0}.get(regime, 0.6)
    if regime not in ("empty", "full"):
        mask[0], mask[1] = False, np.arange(6) == 2
    values = [np.full(SHAPE, 0.25) if regime == "equal" else rng.normal(size=SHAPE) for _ in range(n)]
    scale = 50.0 if regime == "extreme" else 1.0
    return mask, *(np.where(mask, scale * v, np.nan).astype(np.float32) for v in values)


@functools.cache
def program(name: str):
    """mask, inputs -> outputs and the gradients of a random sum of them."""
    case = CASES[name]
    weights = np.random.default_rng(7).normal(size=SHAPE).astype(np.float32)

    def total(inputs, mask):
        out = case.run(mask, *inputs)
        return sum(jnp.sum(weights * x) for x in out), out

    if case.numpy:
        return lambda mask, *inputs: (case.run(mask, *inputs), ())
    if not case.differentiable:
        return jax.jit(lambda mask, *inputs: (case.run(mask, *inputs), ()))
    return jax.jit(lambda mask, *inputs: jax.grad(total, has_aux=True)(inputs, mask)[::-1])


@pytest.mark.parametrize("name", CASES)
def test_what_is_masked_is_never_read_and_has_no_gradient(name):
    case = CASES[name]
    for regime in REGIMES:
        mask, *inputs = draw(regime, case.inputs)
        outputs, gradients = program(name)(mask, *inputs)
        for x in (*outputs, *gradients):
            assert np.all(np.isfinite(x)), regime
            assert not np.any(np.asarray(x)[~mask]), regime
        for poison in (np.inf, -1e30, 0.0):
            again = program(name)(mask, *(np.where(mask, x, np.float32(poison)) for x in inputs))
            jax.tree.map(np.testing.assert_array_equal, again, (outputs, gradients))
        if case.numpy and regime != "equal":  # equal values: rounding over 1e-6
            exact = case.run(mask, *(x.astype(np.float64) for x in inputs))
            for got, wanted in zip(outputs, exact, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
        if case.reference is not None:
            for row in range(4):
                kept = [[float(v) for v in x[row][mask[row]]] for x in inputs]
                for got, wanted in zip(outputs, case.reference(*kept), strict=True):
                    np.testing.assert_allclose(np.asarray(got)[row][mask[row]], wanted, rtol=1e-5, atol=1e-5)


class Variants(chex.TestCase, parameterized.TestCase):
    @chex.variants(without_jit=True)
    @parameterized.parameters(*EAGER)
    def test_jit_changes_nothing(self, name):
        mask, *inputs = draw("random", CASES[name].inputs)
        outputs = self.variant(lambda *x: CASES[name].run(*x))(jnp.asarray(mask), *map(jnp.asarray, inputs))
        for got, wanted in zip(outputs, program(name)(mask, *inputs)[0], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def inputs_that_are_numbers():
    """Every loss as a function of what is trained, and of what must have no gradient through it."""
    cases = {f"objective {name}": (lambda *x, f=entry: f()(tokens(jnp.ones(SHAPE, bool), *x))[0], 2)
             for name, entry in OBJECTIVES.items()}  # fmt: skip
    cases |= {f"kl {name}": (lambda p, q, name=name: policy_loss.kl_loss(p, q, name), 1) for name in KL_ESTIMATORS}
    cases["clipped value"] = (lambda *x: Squared(0.5)(*x)[0], 2)
    for name in ("hl_gauss", "two_hot"):
        cases[name] = (functools.partial(in_bins(name), None), 1)
    everything = jnp.ones(SHAPE, bool)
    for name, f in DIVERGENCES.items():
        cases[name] = (
            lambda p, q, f=f: f(*(distill.renormalise(x, everything, 1.0) for x in (p, q)), everything),
            1,
        )
    return cases


def test_gradients_flow_through_what_is_trained_alone():
    """Not through old log-probs, advantages, a reference, returns or a teacher, if they came from a parameter too."""
    cases = inputs_that_are_numbers()

    def gradients(*inputs):
        return {
            name: jax.grad(lambda *x, f=f: jnp.sum(f(*x)), tuple(range(1 + n)))(*inputs[: 1 + n])
            for name, (f, n) in cases.items()
        }

    rng = np.random.default_rng(3)
    inputs = [rng.normal(0, 0.5, SHAPE).astype(np.float32) for _ in range(3)]
    told = lambda p, q: distill.sampled_advantages(p, q, jnp.ones(SHAPE, bool)).sum()  # noqa: E731
    found, sampled = jax.jit(lambda *x: (gradients(*x), jax.grad(told, (0, 1))(*x[:2])))(*inputs)
    for name, (trained, *numbers) in found.items():
        assert np.any(trained) == (name != "objective none"), name
        assert not any(np.any(x) for x in numbers), name
    assert not any(np.any(x) for x in sampled)  # an advantage, and nothing but a number


def test_zero_signal_and_turn_starts_equal_loops():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        mask, rewards = rng.random(SHAPE) < 0.5, rng.integers(0, 2, SHAPE) / 2
        kept = [set(r[m]) for r, m in zip(np.where(mask, rewards, np.nan), mask, strict=True)]
        np.testing.assert_array_equal(
            zero_signal(np.where(mask, rewards, np.nan), mask), [len(values) < 2 for values in kept]
        )
        turns = np.sort(rng.integers(0, 4, 6)).astype(np.int32)
        seen, expected = set(), []
        for is_action, turn in zip(mask[0], turns, strict=True):
            expected.append(bool(is_action) and int(turn) not in seen)
            seen |= {int(turn)} if is_action else set()
        np.testing.assert_array_equal(turn_starts(jnp.asarray(mask[0]), jnp.asarray(turns)), expected)


# Public functions that tests reach by another name: that of a choice, or of what calls them.
REACHED = {
    "group_std": "leave_one_out_std",
    "kl_penalty": "test_kl_is_taken_off_before_whitening_and_is_that_of_the_sampler",
    "signals": "streams",
    "walk": "trajectories",
}


def test_every_public_function_is_named_by_a_test():
    """A function of the family without a witness is found here, not by a reader."""
    folder = pathlib.Path(__file__).parent
    text = "\n".join(path.read_text() for path in (*folder.glob("*.py"), *folder.parent.glob("learner/*.py")))
    for module in pkgutil.iter_modules(algorithms.__path__):
        members = inspect.getmembers(import_module(f"jaxagent.algorithms.{module.name}"), inspect.isfunction)
        for name, function in members:
            if not name.startswith("_") and function.__module__ == f"jaxagent.algorithms.{module.name}":
                assert re.search(rf"\b{REACHED.get(name, name)}\b", text), f"{module.name}.{name}"
