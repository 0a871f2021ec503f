"""Recorded experts on their way into an update: packed rows, what is told of them, and who routes by himself."""

from __future__ import annotations

import asyncio
import dataclasses
import types

import jax
import numpy as np
import optax
import pytest

from jaxagent.algorithms.streams import Streams, action_mask
from jaxagent.config import BatchConfig, ConfigError, RoutingConfig, relations
from jaxagent.learner.batching import Packer, Sharing
from jaxagent.learner.forward import policy_forward
from jaxagent.learner.programs import Programs, replays_routing
from jaxagent.learner.score import policy_scorer
from jaxagent.learner.state import init_state
from jaxagent.learner.update import make_update
from jaxagent.models import choices, params, sharding
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.routing import Routing
from jaxagent.types import unrecorded
from tests.engine.test_lm import COOL, VOCAB, driver_for
from tests.engine.test_recorded import chosen, talks
from tests.models import tiny

MIXTURE = tiny.spec(family="qwen3_moe", num_layers=1)
WIDTH = choices.width(MIXTURE)


def packer(share=0, width=WIDTH):
    sizes = BatchConfig(24, 4, targets_multiple=4, share_prefix=share > 0)
    return Packer(sizes, 8, sharing=Sharing(share, 12) if share else None, experts=unrecorded(1, width, np.uint8))


def with_experts(streams, experts):
    return [
        dataclasses.replace(s, trajectory=dataclasses.replace(s.trajectory, experts=of))
        for s, of in zip(streams, experts, strict=True)
    ]


@pytest.mark.parametrize("share", [0, 1, 4])
def test_a_token_keeps_its_experts_wherever_it_lies_in_a_row(make_trees, share):
    """Of those that several sequences share, the first one's count; of a trajectory without any, nobody's."""
    streams = make_trees(30, 1)

    def marked(i, trajectory):
        length = len(trajectory)
        return np.stack([trajectory.tokens, np.arange(length), np.full(length, i)], axis=1).astype(np.uint8)

    experts = [None if i % 7 == 3 else marked(i, s.trajectory) for i, s in enumerate(streams)]
    streams = with_experts(streams, experts)
    batches = packer(share, width=3).pack(streams)
    for batch in batches:
        assert batch.experts.shape == (*batch.tokens.shape, 3) and batch.experts.dtype == np.uint8
        known = choices.recorded(batch.experts)
        np.testing.assert_array_equal(known & (batch.segments == 0), False)
        np.testing.assert_array_equal(batch.experts[known][:, 0], batch.tokens[known])
        np.testing.assert_array_equal(batch.experts[known][:, 1], batch.positions[known])
        own = np.take_along_axis(batch.experts[..., 2], batch.head_positions, axis=1)
        real = batch.sequence >= 0
        mine = np.where(batch.sequence % 7 == 3, 255, batch.sequence)
        assert share or (own == mine)[real].all()
        assert (own == mine)[real].mean() > 0.5


@pytest.fixture(scope="module")
def mesh(make_mesh):
    return make_mesh()


@pytest.fixture(scope="module")
def weights(mesh):
    with jax.set_mesh(mesh):
        return tiny.init(MIXTURE, 0, params.shardings(MIXTURE, mesh, sharding.TRAIN))


def half_wrong(streams):
    """Streams with experts: of every second token the router's own, of every fifth nobody's; and how many differ."""
    out, differs = [], []
    rng = np.random.default_rng(0)
    for s in streams:
        live = np.asarray(chosen(MIXTURE, tiny.init(MIXTURE), np.resize(s.trajectory.tokens, 32)))[: len(s.trajectory)]
        drawn = np.sort(np.argsort(rng.random((len(live), 8)), axis=1)[:, :WIDTH], axis=1)
        experts = np.where(np.arange(len(live))[:, None] % 2, drawn, live).astype(np.uint8)
        experts[::5] = 255
        part = np.array([np.isin(a, b, invert=True).mean() for a, b in zip(experts, live, strict=True)])
        at = np.flatnonzero(s.policy_weights) - 1
        differs.append(part[at][experts[at, 0] != 255])
        out.append(experts)
    return with_experts(streams, out), np.concatenate(differs), sum(np.count_nonzero(s.policy_weights) for s in streams)


@pytest.mark.slow
def test_an_update_tells_how_much_of_the_recorded_routing_it_would_not_choose(make_streams, mesh, weights):
    streams, differs, targets = half_wrong(make_streams(6))
    assert 0.1 < differs.mean() < 0.9
    with jax.set_mesh(mesh):
        state = init_state(weights, optax.sgd(0.1))
    update = make_update(policy_forward(MIXTURE, tells_routing=True), optax.sgd(0.1), mesh)
    _, metrics = update(state, packer().pack(streams))
    assert metrics["routing/replayed_frac"] == pytest.approx(len(differs) / targets)
    assert metrics["routing/replayed_differ_frac"] == pytest.approx(differs.mean(), rel=1e-5)
    with jax.set_mesh(mesh):
        state = init_state(weights, optax.sgd(0.1))
    _, metrics = update(state, packer().pack(with_experts(streams, [None] * len(streams))))
    assert metrics["routing/replayed_frac"] == 0 and np.isnan(metrics["routing/replayed_differ_frac"])
    assert update.policy.accumulate._cache_size() == 1


def test_scores_of_the_policy_are_of_the_recorded_routing(make_streams, mesh, weights):
    streams, *_ = half_wrong(make_streams(6))
    trajectories = [s.trajectory for s in streams]
    scorer = policy_scorer(policy_forward(MIXTURE), 1.0, packer(), mesh)
    replayed, _ = scorer(weights, trajectories)
    alone, _ = scorer(weights, [dataclasses.replace(t, experts=None) for t in trajectories])
    assert max(np.abs(a - b).max() for a, b in zip(replayed, alone, strict=True)) > 1e-3
    own = with_experts([Streams.of(t, policy_weights=action_mask(t)) for t in trajectories], [
        np.asarray(chosen(MIXTURE, tiny.init(MIXTURE), np.resize(t.tokens, 32)))[: len(t)].astype(np.uint8)
        for t in trajectories
    ])  # fmt: skip
    again, _ = scorer(weights, [s.trajectory for s in own])
    for a, b in zip(again, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_reference_routes_by_itself(make_streams):
    streams, *_ = half_wrong(make_streams(3))
    asked = {}

    def logprobs(weights, trajectories, temperature):
        asked[weights] = [t.experts is None for t in trajectories]
        return [[], []]

    rl = types.SimpleNamespace(kl=True, reads_old=True)
    state = types.SimpleNamespace(frozen=None, reference="reference", policy="policy")
    Programs(rl, None, None, logprobs).score(state, [s.trajectory for s in streams], 1.0)
    assert asked == {"reference": [True] * 3, "policy": [False] * 3}


def test_routing_is_replayed_by_mixtures_in_fast_numerics(cfg, spec):
    def replays(spec, **changes):
        rl = dataclasses.replace(cfg.rl, routing=RoutingConfig(replay=changes.pop("replay", "auto")))
        return replays_routing(dataclasses.replace(cfg, rl=rl, **changes), spec)

    assert replays(MIXTURE, numerics="fast") and replays(MIXTURE, numerics="fast", replay="always")
    assert not replays(MIXTURE, numerics="exact") and not replays(spec, numerics="fast")
    assert not replays(MIXTURE, numerics="fast", replay="never")
    with pytest.raises(ConfigError, match=r"routing\.replay=always: qwen3 has no experts"):
        replays(spec, numerics="fast", replay="always")
    always = dataclasses.replace(
        cfg, rl=dataclasses.replace(cfg.rl, routing=RoutingConfig(replay="always")), numerics="exact"
    )
    with pytest.raises(ConfigError, match=r"routing\.replay=always needs numerics=fast"):
        relations.check(always)


@pytest.mark.slow
def test_in_bfloat16_the_trainer_is_nearer_to_the_engine_with_its_routing(mesh):
    """Of 684 targets in 6 layers of 32 experts, 4 active: mean gap 0.0005 and not 0.0021, largest 0.05 and not 0.35."""
    block = Experts(Routing(count=32, active=4), mlp_dim=32)
    spec = dataclasses.replace(
        MIXTURE, num_layers=6, embed_dim=64, head_dim=16, compute_dtype="bfloat16", logprob_chunk_tokens=64,
        pattern=((MIXTURE.pattern[0][0], block),),
    )  # fmt: skip
    with driver_for(mesh, spec, records=True) as driver:
        driver.start(240)
        trajectories = asyncio.run(talks(driver, 24, 96, dataclasses.replace(COOL, temperature=1.0), VOCAB))
    with jax.set_mesh(mesh):
        weights = tiny.init(spec, 0, params.shardings(spec, mesh, sharding.TRAIN))
    sizes = BatchConfig(96, 4, targets_multiple=4, share_prefix=False)
    scorer = policy_scorer(
        policy_forward(spec), 1.0, Packer(sizes, 60, experts=unrecorded(1, choices.width(spec), np.uint8)), mesh
    )

    def mean_gap(trajectories):
        scores, _ = scorer(weights, trajectories)
        gaps = [np.abs(own - t.logprobs)[t.action_mask] for own, t in zip(scores, trajectories, strict=True)]
        return np.concatenate(gaps).mean()

    live = mean_gap([dataclasses.replace(t, experts=None) for t in trajectories])
    assert mean_gap(trajectories) < live / 2
