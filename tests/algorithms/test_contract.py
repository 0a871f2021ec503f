"""Every door x every kind of wrong answer: one sentence that names the class, before or at the first step."""

import asyncio
import contextlib
import dataclasses
import decimal
import functools
import threading
import types
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config, contract
from jaxagent.algorithms import (
    advantages,
    aggregate,
    corrections,
    distill,
    echo,
    estimate,
    estimators,
    policy_loss,
    streams,
    trial,
    value_losses,
)
from jaxagent.algorithms import objectives as objectives_
from jaxagent.algorithms.teachers import LOSSES, Divergence, Folder, ReverseKL
from jaxagent.config import ConfigError, DistillConfig, EchoConfig
from jaxagent.data import curriculum
from jaxagent.envs.base import Message, Observation, Step, Verdict
from jaxagent.envs.search.retriever import base as retrievers
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.learner import loss as losses
from jaxagent.rollout import episode
from jaxagent.types import StopReason
from tests.learner.test_loss import random_batch

RL = config.parse(get_config()).rl
HOST = dataclasses.replace(RL, objective=objectives_.NoObjective())  # compiles nothing


def own(base: type, method: str, change) -> object:
    """A user's class: as `base`, but that `change` is what it gives back for what `base` does."""

    def wrong(self, *arguments):
        return change(getattr(base, method)(self, *arguments))

    async def of_async(self, *arguments):
        return getattr(base, method)(self, *arguments)

    made = type("Bad", (base,), {method: of_async if change is a_coroutine else wrong, "__module__": "mine"})
    return made()


def a_coroutine(right): ...


def a_generator(right):
    yield right


def raises(right):
    raise KeyError("gamma")


# Of one array, of NumPy or traced.
ARRAYS = {
    "a scalar": lambda right: right.mean(),
    "an axis forgotten": lambda right: right.mean(axis=-1),
    "an axis kept": lambda right: right[..., None],
    "broadcast": lambda right: right[:1] if right.shape[0] > 1 else right[..., :1],
    "a list": lambda right: [right],
    "a text": lambda right: "0.5",
    "None": lambda right: None,
    "ints": lambda right: right.astype(np.int32),
    "bools": lambda right: right > 0,
    "complex numbers": lambda right: right.astype(np.complex64),
    "too many": lambda right: (right, right, right, right),
    "a coroutine": a_coroutine,
    "a generator": a_generator,
    "an exception": raises,
}
NUMBERS = {
    "nan": lambda right: right * np.float32(np.nan),
    "inf": lambda right: right + np.float32(np.inf),
}
SIGNS = {"negative numbers": lambda right: -1.0 - right}
# Of one number.
NUMBER = {
    "None": lambda right: None,
    "nan": lambda right: float("nan"),
    "inf": lambda right: float("inf"),
    "a text": lambda right: "1.0",
    "a list": lambda right: [1.0],
    "an array": lambda right: np.ones(3),
    "an int that no float is": lambda right: 10**400,
    "an int that no text is": lambda right: -(10**5000),
    "a decimal that no float is": lambda right: decimal.Decimal("sNaN"),
    "a table": lambda right: type("DataFrame", (), {"shape": (2, 2)})(),
    "a shape of another kind": lambda right: type("Tensor", (), {"shape": None, "dtype": "int8"})(),
    "a complex number": lambda right: 1j,
    "a coroutine": a_coroutine,
    "a generator": a_generator,
    "an exception": raises,
}


def first_of(changes: dict) -> dict:
    """The same wrongs of the first of several results, and wrong numbers of results."""
    inner = {what: (lambda right, c=change: (c(right[0]), *right[1:])) for what, change in changes.items()
             if change not in (a_coroutine, a_generator, raises)}  # fmt: skip
    outer = {"one result": lambda right: right[0], "one too many": lambda right: (*right, right[0]),
             "a list of them": list, "None for all": lambda right: None, "a coroutine": a_coroutine,
             "a generator": a_generator, "an exception": raises}  # fmt: skip
    return inner | outer


def tried(field: str, rl=HOST):
    return lambda bad: trial.check_answers(dataclasses.replace(rl, **{field: bad}))


def in_critic(bad):
    trial.check_answers(dataclasses.replace(HOST, advantage=estimators.GAE(critic=estimators.CriticConfig(loss=bad))))


def in_echo(bad):
    trial.check_answers(dataclasses.replace(HOST, echo=EchoConfig(denominator=bad)))


def in_distill(bad):
    trial.check_answers(dataclasses.replace(HOST, distill=DistillConfig(Folder("x"), loss=bad)))


def in_estimates(bad):
    path = estimators.TokenPath(*(np.ones(4, dtype) for dtype in (np.float32, np.float32, bool, np.int32, np.float32)))
    estimate.estimates([path], dataclasses.replace(RL, advantage=bad))


def in_loss(bad):
    batch, logprobs, entropy = random_batch(np.random.default_rng(0), 2, 5, 1.0)
    jax.eval_shape(functools.partial(losses.policy_loss, objective=bad), logprobs, entropy, batch)


def in_value_loss(bad):
    batch, logprobs, _ = random_batch(np.random.default_rng(0), 2, 5, 1.0)
    jax.eval_shape(functools.partial(losses.value_loss, loss_of=bad), logprobs, batch)


def in_curriculum(bad):
    curriculum.weights(np.linspace(0.1, 1.0, 5), bad)


class Right:
    """A reward, a retriever and an attempt that are right."""

    counters: ClassVar = {"calls": 1.0}

    def __call__(self, view):
        return 0.5

    def open(self, own):
        return self

    async def search(self, queries, topk):
        return [[Passage("0", "title", "text")]]

    async def close(self): ...

    def start(self):
        return [Message("user", "hello")]

    def step(self, action):
        return Step(stop_reason=StopReason.ANSWER)

    def verify(self, ended):
        return Verdict(1.0)


def opened(bad):
    """Opens a retriever where no question is asked and nothing runs."""
    here = types.SimpleNamespace(tasks=(), run=lambda work, timeout_s: work.close())
    with retrievers.opened_by(bad, here, None):
        pass


GROUP, TURN = estimators.GroupMeanStd, estimators.TurnMeanStd
# door -> (the built-in class, its method, what calls it, what may be wrong)
DOORS = {
    "objective": (objectives_.PPOClip, "__call__", tried("objective", RL), first_of(ARRAYS | NUMBERS)),
    "objective, when the loss is traced": (objectives_.PPOClip, "__call__", in_loss, first_of(ARRAYS)),
    "group advantage": (GROUP, "__call__", tried("advantage"), ARRAYS | NUMBERS),
    "turn advantage": (TURN, "__call__", tried("advantage"), ARRAYS | NUMBERS),
    "token advantage": (estimators.Return, "__call__", tried("advantage"), first_of(ARRAYS)),
    "token advantage's numbers": (estimators.Return, "__call__", in_estimates, first_of(NUMBERS)),
    "correction": (corrections.Importance, "__call__", tried("correction"), ARRAYS | NUMBERS | SIGNS),
    "a correction's veto": (corrections.Importance, "vetoes", tried("correction"), NUMBER),
    "a correction's mean": (corrections.Importance, "mean", tried("correction"), NUMBER | {"0": lambda right: 0.0}),
    "opsm": (corrections.OPSM, "__call__", tried("correction", RL), ARRAYS),
    "aggregation": (aggregate.SequenceMean, "__call__", tried("aggregation"), ARRAYS | NUMBERS | SIGNS),
    "a divisor": (aggregate.SequenceMean, "divisor", tried("aggregation"), {
        **{k: v for k, v in ARRAYS.items() if k != "ints"}, **SIGNS, "nan": NUMBERS["nan"],
        "zeros": lambda right: 0.0 * right}),
    "ECHO's denominator": (echo.Targets, "__call__", in_echo, ARRAYS | NUMBERS | SIGNS),
    "critic's loss": (value_losses.Squared, "__call__", in_critic, first_of(ARRAYS | NUMBERS)),
    "critic's loss, when it is traced": (value_losses.Squared, "__call__", in_value_loss, first_of(ARRAYS)),
    "critic's values": (value_losses.Squared, "values", in_critic, ARRAYS),
    "divergence": (ReverseKL, "__call__", in_distill, ARRAYS | NUMBERS),
    "curriculum": (curriculum.Failed, "__call__", in_curriculum, ARRAYS | NUMBERS | SIGNS),
    "reward": (Right, "__call__", lambda bad: contract.scores(bad, None), NUMBER),
    "a reward's components": (Right, "__call__", lambda bad: contract.scores(bad, None), {
        "no reward": lambda right: {"em": 1.0}, "no text": lambda right: {"reward": 1.0, 3: 1.0},
        "None": lambda right: {"reward": 1.0, "em": None}, "nan": lambda right: {"reward": float("nan")}}),
    "retriever, opened": (Right, "open", opened, NUMBER),
}  # fmt: skip
CASES = [(door, what) for door, (*_, wrong) in DOORS.items() for what in wrong]


@pytest.mark.parametrize("door", DOORS)
def test_what_is_right_passes(door):
    base, _, check, _ = DOORS[door]
    check(type("Good", (base,), {"__module__": "mine"})())


@pytest.mark.parametrize(("door", "what"), CASES, ids=[f"{door}-{what}".replace(" ", "_") for door, what in CASES])
def test_a_wrong_answer_is_one_sentence_that_names_the_class(door, what):
    base, method, check, wrong = DOORS[door]
    with pytest.raises(ConfigError) as error:
        check(own(base, method, wrong[what]))
    said = str(error.value)
    assert said.startswith("mine:Bad") and "\n" not in said and len(said) < 400, said
    assert " wanted." in said or (what == "an exception" and "KeyError: 'gamma' (test_contract.py, line " in said), said


BUILT_IN = [
    *(dict(objective=entry()) for entry in objectives_.OBJECTIVES.values()),
    *(dict(advantage=entry()) for entry in estimators.ADVANTAGES.values()),
    *(dict(correction=entry()) for entry in corrections.CORRECTIONS.values()),
    *(dict(aggregation=entry()) for entry in aggregate.AGGREGATIONS.values()),
    *(dict(echo=EchoConfig(denominator=entry())) for entry in echo.DENOMINATORS.values()),
    *(dict(advantage=estimators.GAE(critic=estimators.CriticConfig(loss=entry())))
      for entry in value_losses.VALUE_LOSSES.values()),
    *(dict(distill=DistillConfig(Folder("x"), loss=entry())) for entry in LOSSES.values()),
]  # fmt: skip


@pytest.mark.parametrize("change", BUILT_IN, ids=lambda change: str(next(iter(change.values())))[:60])
def test_every_built_in_choice_passes(change):
    trial.check_answers(dataclasses.replace(RL if "objective" in change else HOST, **change))


def test_every_curriculum_passes():
    for entry in curriculum.CURRICULA.values():
        in_curriculum(entry())


def test_a_broadcast_advantage_is_told_whatever_the_size_of_a_group():
    """`rewards - rewards.mean(axis=1)` of as many groups as attempts has the right shape, and wrong numbers."""
    forgotten = own(GROUP, "__call__", lambda right: right)
    type(forgotten).__call__ = lambda self, rewards, mask: rewards - rewards.mean(axis=1)
    for size in (1, 2, 4, 8):
        with pytest.raises(ConfigError, match=r"^mine:Bad"):
            trial.check_answers(dataclasses.replace(HOST, advantage=forgotten, group_size=size))


def test_numbers_are_not_the_class_fault_where_they_were_none_before():
    rewards, mask = np.array([[np.inf, 1.0]]), np.ones((1, 2), bool)
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(estimate.compared(GROUP(), rewards, mask, mask)).all()
    with pytest.raises(ConfigError, match="returned advantages with nan at"), np.errstate(invalid="ignore"):
        estimate.compared(own(GROUP, "__call__", NUMBERS["nan"]), np.ones((1, 2)), mask, mask)
    estimate.compared(own(GROUP, "__call__", NUMBERS["nan"]), np.ones((1, 2)), mask, ~mask)  # read nowhere


ORDERS = {
    "the others' mean": lambda r: r - r.mean(0),
    "the others' best": lambda r: r - r.max(0),
    "the first attempt": lambda r: r - r[:, :1],
    "the first group": lambda r: r - r[:1],
    "the attempts before": lambda r: r - np.cumsum(r, axis=1),
    "the groups before": lambda r: r - np.cumsum(r, axis=0),
    "the next attempt": lambda r: r - np.roll(r, 1, axis=1),
    "the next group": lambda r: r - np.roll(r, 1, axis=0),
    "the place": lambda r: r * (1 + np.arange(r.shape[1])).reshape(-1, *[1] * (r.ndim - 2)),
}
UNORDERED = {
    "all of them": lambda r: r - r.mean(),
    "ranks": lambda r: r.argsort(1).argsort(1) - r.shape[1] / 2,
    "chance": lambda r: r + np.random.default_rng().normal(size=r.shape),
    "jax": lambda r: jnp.asarray(r - r.mean(1, keepdims=True), jnp.bfloat16),
}


@pytest.mark.parametrize("what", [*ORDERS, *UNORDERED])
def test_the_order_of_groups_and_of_attempts_is_chance(what):
    for base in (GROUP, TURN):
        bad = type(
            "Bad", (base,), {"__call__": lambda self, r, mask: (ORDERS | UNORDERED)[what](r), "__module__": "mine"}
        )
        for size in (3, 4, 8):
            with (
                pytest.raises(ConfigError, match=r"^mine:Bad depends on the order of groups, or of the attempts")
                if what in ORDERS
                else contextlib.nullcontext()
            ):
                trial.check_answers(dataclasses.replace(HOST, advantage=bad(), group_size=size))


def test_every_comparison_passes_with_groups_of_all_sizes():
    for entry in estimators.ADVANTAGES.values():
        if not issubclass(entry, estimators.TokenAdvantage):
            for size in (1, 2, 3, 4, 8):
                of_k = {"k": 1} if issubclass(entry, advantages.BestOfK) and size < 4 else {}
                for drop in (False, True):
                    advantage = entry(drop_zero_signal=drop, **of_k)
                    trial.check_answers(dataclasses.replace(HOST, advantage=advantage, group_size=size))


@pytest.mark.parametrize("kept", [None, threading.Lock()], ids=["copied", "with_a_lock"])
def test_a_choice_that_keeps_a_state_learns_nothing_from_the_trial(kept):
    class Running(GROUP):
        def __init__(self):
            vars(self).update(drop_zero_signal=False, multi_trajectory="full", means=[], kept=kept)

        def __call__(self, rewards, mask):
            self.means.append(rewards.mean())
            return rewards - np.mean(self.means)

    running = Running()
    trial.check_answers(dataclasses.replace(HOST, advantage=running))
    assert bool(running.means) == bool(kept)  # what cannot be copied is called itself
    rewards, mask = np.eye(4), np.ones((4, 4), bool)
    running.means.clear()
    estimate.compared(running, rewards, mask, mask)
    assert running.means == [0.25]  # once, as many groups as attempts or not


def in_place(base: type, function) -> object:
    """A user's class that writes to what it is given."""

    def call(self, values, *mask):
        values -= values.mean(-1, keepdims=True)
        return function(values)

    return type("Bad", (base,), {"__call__": call, "__module__": "mine"})()


def test_what_works_in_place_changes_nothing_of_the_callers_and_is_checked():
    rewards, mask = np.array([[1.0, 1.0], [1.0, 0.0]]), np.ones((2, 2), bool)
    given = estimate.compared(in_place(GROUP, lambda x: x), rewards, mask, mask)
    assert rewards.tolist() == [[1.0, 1.0], [1.0, 0.0]] and given.tolist() == [[0.0, 0.0], [0.5, -0.5]]
    given[0] = 1.0  # as estimate.py writes to it, also where the class gave an array of JAX
    estimate.compared(in_place(GROUP, jnp.asarray), rewards, mask, mask)[0] = 1.0
    with np.errstate(all="ignore"):
        bad = in_place(GROUP, lambda x: x.__itruediv__(x.std(1, keepdims=True)))
        with pytest.raises(ConfigError, match=r"^mine:Bad returned advantages with nan at \[0, 0\]"):
            estimate.compared(bad, rewards, mask, mask)
        with pytest.raises(ConfigError, match=r"^mine:Bad returned factors with -?inf at"):
            in_curriculum(in_place(curriculum.Failed, lambda x: x.__itruediv__(0.0 * x)))


# What an objective can do wrong that no shape tells.
FROZEN = {
    "stopped": lambda t: -jnp.exp(jax.lax.stop_gradient(t.logprobs) - t.old_logprobs) * t.advantages,
    "compared": lambda t: (t.logprobs > t.old_logprobs) * -t.advantages,
    "rounded": lambda t: -jnp.round(t.logprobs) * t.advantages,
    "of others": lambda t: -t.old_logprobs * t.advantages,
}
MIXING = {
    "a mean for all": lambda t: jnp.mean(-t.logprobs * t.advantages) * jnp.ones_like(t.logprobs),
    "a mean of the row": lambda t: jnp.mean(-t.logprobs * t.advantages, axis=1, keepdims=True) + 0 * t.logprobs,
    "whitened": lambda t: -t.logprobs * (t.advantages - t.advantages.mean()) / (t.advantages.std() + 1e-6),
    "without the median": lambda t: -t.logprobs * (t.advantages - jnp.median(t.advantages)),
    "by the largest": lambda t: -t.logprobs * t.advantages / (jnp.abs(t.advantages).max() + 1e-6),
    "by whether any is bad": lambda t: -t.logprobs * t.advantages * jnp.where((t.advantages < 0).any(), 1.0, 0.5),
    "by all tokens": lambda t: -t.logprobs * t.advantages / t.mask.sum(),
    "by the row's tokens": lambda t: -t.logprobs * t.advantages / jnp.maximum(t.mask.sum(-1, keepdims=True), 1),
    "by the row's sequences": lambda t: (
        -t.logprobs * t.advantages / (1 + (t.lengths[:, 1:] != t.lengths[:, :-1]).sum())
    ),
    "by the place in the row": lambda t: -t.logprobs * t.advantages * 0.99 ** jnp.arange(t.mask.shape[1]),
    "by the row": lambda t: -t.logprobs * t.advantages * (1.0 + jnp.arange(len(t.mask))[:, None]),
    "of what follows": lambda t: -jnp.cumsum(t.logprobs[:, ::-1], axis=1)[:, ::-1] * t.advantages,
    "of what came before": lambda t: -jnp.cumsum(t.logprobs, axis=1) * t.advantages,
    "of the next": lambda t: -t.logprobs * t.advantages * jnp.roll(t.entropy, -1, axis=1),
    "of the one before": lambda t: -t.logprobs * t.advantages * jnp.roll(t.entropy, 1, axis=1),
    "of the row below": lambda t: -t.logprobs * t.advantages * (1 + jnp.roll(t.entropy, 1, axis=0)),
    "in its gradient alone": lambda t: -t.logprobs * t.advantages + (s := t.logprobs.sum()) - jax.lax.stop_gradient(s),
}
NOT_FINITE = {
    "nan where nothing is": lambda t: -t.logprobs * t.advantages / jnp.abs(t.advantages),
    "an infinite gradient": lambda t: -jnp.sqrt(jnp.abs(t.logprobs)) * t.advantages,
    "a logarithm": lambda t: -jnp.log(t.logprobs) * t.advantages,
}
# What learns from few tokens, or in a way of its own, and is right.
UNUSUAL = {
    "only good ones": lambda t: -jnp.where(t.advantages > 0, t.logprobs * t.advantages, 0.0),
    "only large ones": lambda t: -jnp.where(jnp.abs(t.advantages) > 5, t.logprobs * t.advantages, 0.0),
    "only far ones": lambda t: -jnp.where(jnp.abs(t.logprobs - t.old_logprobs) > 0.5, t.logprobs * t.advantages, 0.0),
    "only uncertain ones": lambda t: -jnp.where(t.entropy > 4, t.logprobs * t.advantages, 0.0),
    "of sums": lambda t: -t.sequence_sum(t.logprobs) * t.advantages / jnp.maximum(t.lengths, 1.0),
    "without advantages": lambda t: -t.logprobs,
    "only long ones": lambda t: -jnp.where(t.lengths >= 100, t.logprobs * t.advantages, 0.0),
    "only single ones": lambda t: -jnp.where(t.lengths == 1, t.logprobs * t.advantages, 0.0),
    "only huge ones": lambda t: -jnp.where(t.advantages > 100, t.logprobs * t.advantages, 0.0),
    "only tiny ones": lambda t: -jnp.where(jnp.abs(t.advantages) < 0.01, t.logprobs * t.advantages, 0.0),
    "only likely ones": lambda t: -jnp.where(t.old_logprobs > -0.01, t.logprobs, 0.0) * t.advantages,
    "only well paid ones": lambda t: -jnp.where(t.rewards > 5, t.logprobs, 0.0) * t.advantages,
    "only very well paid ones": lambda t: -jnp.where(t.rewards > 100, t.logprobs, 0.0) * t.advantages,
    "only badly paid ones": lambda t: -jnp.where(t.rewards < -5, t.logprobs, 0.0) * t.advantages,
    "only old ones": lambda t: -jnp.where(t.ages > 16, t.logprobs, 0.0) * t.advantages,
    "only very old ones": lambda t: -jnp.where(t.ages > 1000, t.logprobs, 0.0) * t.advantages,
    "the ratio of a whole sequence": lambda t: -jnp.exp(t.sequence_sum(t.logprobs - t.old_logprobs)) * t.advantages,
    "in bfloat16": lambda t: (-t.logprobs * t.advantages).astype(jnp.bfloat16),
    "whitened in a sequence": lambda t: -t.logprobs * (t.advantages - t.sequence_mean(t.advantages) + 1),
}


def objective(function) -> object:
    call = lambda self, tokens: (function(tokens), jnp.zeros_like(tokens.logprobs))  # noqa: E731
    return type("Mine", (), {"__call__": call, "__module__": "mine", "reads": policy_loss.READABLE})()


@pytest.mark.parametrize(
    ("function", "message"),
    [(f, "^mine:Mine trains nothing: its loss has no gradient") for f in FROZEN.values()]
    + [(f, "^mine:Mine mixes sequences: ") for f in MIXING.values()]
    + [(f, "^mine:Mine returned a (loss|gradient) of (nan|inf|-inf) ") for f in NOT_FINITE.values()],
    ids=[*FROZEN, *MIXING, *NOT_FINITE],
)
def test_an_objective_must_train_its_own_tokens_and_no_others(function, message):
    with pytest.raises(ConfigError, match=message):
        trial.check_answers(dataclasses.replace(RL, objective=objective(function)))


@pytest.mark.parametrize(
    "of_error",
    [
        lambda e: e - e.mean(),
        lambda e: e / jnp.abs(e).max(),
        lambda e: jnp.cumsum(e, axis=1),
        lambda e: e * jnp.roll(e, 1, axis=1),
        lambda e: e * (1 + jnp.arange(len(e))[:, None]),
        lambda e: e * jnp.sqrt((e != 0).sum()),
    ],
)
def test_a_critics_loss_of_one_target_is_of_it_alone(of_error):
    mixing = type("Mine", (value_losses.Squared,), {"__module__": "mine"})
    mixing.__call__ = lambda self, outputs, old, returns: (of_error(outputs - returns) ** 2, jnp.zeros_like(outputs))
    with pytest.raises(ConfigError, match=r"^mine:Mine mixes targets: "):
        in_critic(mixing())


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_objective_may_learn_from_few_tokens(name):
    trial.check_answers(dataclasses.replace(RL, objective=objective(UNUSUAL[name])))


def test_what_an_objective_reads_must_be_there():
    class Greedy(objectives_.Reinforce):
        reads = ("rewards", "gold")

    with pytest.raises(ConfigError, match=r"Greedy.reads is \('rewards', 'gold'\): a tuple of rewards, ages, turns\."):
        trial.check_answers(dataclasses.replace(RL, objective=Greedy()))
    assert policy_loss.reads_of(objectives_.PPOClip()) == () and policy_loss.READABLE == ("rewards", "ages", "turns")


@pytest.mark.parametrize("what", [*NUMBER, "too few", "a set"])
def test_a_group_reward_is_checked_for_every_episode(what, make_group):
    change = {"too few": lambda right: [1.0], "a set": lambda right: {1.0, 0.0}} | {
        name: (lambda right, c=change: [0.0, c(1.0)]) for name, change in NUMBER.items()
        if change not in (a_coroutine, a_generator, raises)
    }  # fmt: skip
    wrong = own(
        type("Base", (), {"__call__": lambda self, group: [0.0, 1.0]}), "__call__", change.get(what, NUMBER.get(what))
    )
    with pytest.raises(ConfigError, match=r"^mine:Bad"):
        streams.shaped(make_group(("pa", 1.0), ("pa", 0.0)), dataclasses.replace(RL, group_reward=wrong))


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        [[], []],
        [["text"]],
        ["text"],
        [[Passage("0", "a", "b")] * 3],
        {"passages": []},
        Passage("0", "a", "b"),
    ],
    ids=str,
)
def test_a_retriever_is_checked(found):
    class Wrong(Right):
        async def search(self, queries, topk):
            return found

    Wrong.__module__ = "mine"
    with pytest.raises(ConfigError, match=r"Wrong.search returned .* where a list of one list of at most 2 Passage"):
        asyncio.run(retrievers.passages_of(Wrong(), "q", 2))
    assert asyncio.run(retrievers.passages_of(Right(), "q", 2)) == [Passage("0", "title", "text")]


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (None, "a result that is None"),
        (1.0, "a result that is the float 1.0 where a Verdict is wanted"),
        (Verdict(None), "a reward that is None"),
        (Verdict(float("nan")), "a reward of nan"),
        (Verdict("1"), "a reward that is the str '1'"),
        (Verdict(1j), "a reward that is the complex 1j"),
        (Verdict(np.ones(2)), r"a reward of shape \(2,\)"),
        (Verdict(1.0, {"em": None}), "'em' that is None"),
        (Verdict(1.0, ["em"]), "components that is a list"),
        (Verdict(1.0, {}, (1.0, 2.0)), "2 turn rewards for 3 turns"),
        (Verdict(1.0, {}, (1.0, 2.0, 0.0, 0.0)), "4 turn rewards for 3 turns"),
        (Verdict(1.0, {}, (1.0, float("inf"), 0.0)), r"turn_rewards\[1\] of inf"),
        (Verdict(1.0, {}, 2.0), "turn_rewards that is the float 2.0"),
    ],
    ids=str,
)
def test_a_verdict_is_checked(verdict, message):
    class Judging(Right):
        async def verify(self, ended):
            return verdict

    with pytest.raises(ConfigError, match=f"Judging.verify returned {message}"):
        asyncio.run(episode.verdict_of(Judging(), 3, None))


@pytest.mark.parametrize("parts", ["text", ("text", 2), (("text",),), ((None, 2),), [["text", 2]]], ids=str)
def test_an_observation_has_parts(parts):
    with pytest.raises(ValueError, match="an Observation has pairs of"):
        Observation(parts)


def test_what_must_be_async_is_told_by_name():
    for method in ("start", "step", "verify"):
        with pytest.raises(ConfigError, match=rf"Right.{method} must be `async def`: it returned a result that is a "):
            asyncio.run(contract.awaited(Right(), method, *([None] if method != "start" else [])))
    names = ("start", "step", "verify", "close", "search")
    assert contract.check_methods(Right(), Right(), "open", *names) == ["start", "step", "verify"]


def test_what_passes_is_what_the_class_gave():
    counts, episodes = np.array([3.0, 0.0, 1.0]), np.array([0, 0, 1])
    np.testing.assert_allclose(contract.factors(aggregate.TokenMean(), counts, episodes), [0.25, 0.0, 0.25])
    np.testing.assert_allclose(contract.factors(echo.ConstantSum(2.0), counts, counts), [0.5] * 3)
    old, sampled = np.log([0.5, 0.5]), np.log([0.25, 0.0625])
    np.testing.assert_allclose(corrections.factors_of(corrections.Importance(high=3.0), old, sampled), [2.0, 3.0])
    assert corrections.mean_of(corrections.Importance(high=3.0, normalise=True), [old], [sampled]) == pytest.approx(2.5)
    assert corrections.factors_of_samples([], corrections.Importance())[0] == []  # of others compose's tests say what
    path = estimators.TokenPath(*(np.ones(2, dtype) for dtype in (np.float32, np.float32, bool, np.int32, np.float32)))
    np.testing.assert_allclose(estimate.estimated(estimators.Return(), path).advantages, [2.0, 1.0])


def test_divergences_are_one_number_per_target():
    logprobs = jnp.log(jnp.full((2, 3, 5), 0.2))
    assert distill.divergences(ReverseKL(), logprobs, logprobs, jnp.ones((2, 3, 5), bool)).shape == (2, 3)
    assert issubclass(ReverseKL, Divergence)
