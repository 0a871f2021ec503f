"""A teacher's scores and the divergence in the loss, packed, against the unpacked models in float64; its mistakes."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from jaxagent.algorithms.distill import Scores, Support
from jaxagent.algorithms.streams import Streams
from jaxagent.algorithms.teachers import Folder, ForwardKL, ReverseKL
from jaxagent.config import ConfigError, DistillConfig, LoraConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.learner import programs, teacher
from jaxagent.learner.batching import unpack
from jaxagent.learner.forward import compare_to_teacher, policy_forward
from jaxagent.learner.state import Frozen, init_state
from jaxagent.learner.update import make_update
from jaxagent.models import params as model_params
from jaxagent.models import sharding
from jaxagent.models.attention import packed
from jaxagent.models.logprobs import logits
from jaxagent.models.transformer import hidden
from tests.models import tiny

TEMPERATURE, K = 0.7, 3


def table(params, spec, trajectory, mesh):
    """float64[T, V]: log-probs of every token's place (its predecessors seen); row 0 is 0. The model, unpacked."""
    n = len(trajectory)
    padded = np.zeros(24, np.int32)  # one shape: causal, so what follows changes nothing
    padded[:n] = trajectory.tokens
    with jax.set_mesh(mesh):
        z = np.asarray(_whole(params, spec, padded), np.float64)[:n, : spec.vocab_size] / TEMPERATURE
    z -= z.max(-1, keepdims=True)
    z -= np.log(np.exp(z).sum(-1, keepdims=True))
    return np.concatenate([np.zeros((1, spec.vocab_size)), z[:-1]])


@functools.partial(jax.jit, static_argnames="spec")
def _whole(params, spec, tokens):
    segments = np.ones((1, len(tokens)), np.int32)
    x, _ = hidden(params, spec, tokens, np.arange(len(tokens)), packed(segments), unroll=True)
    return logits(params, spec, x)


def kl(p, q):
    """sum exp(p) (p - q) of renormalised log-weights."""
    p, q = (x - np.log(np.exp(x).sum()) for x in (p, q))
    return float(np.sum(np.exp(p) * (p - q)))


@pytest.fixture(scope="module")
def both(spec, make_mesh, make_params):
    """(spec, params) of student and teacher, of other widths and depths, and their mesh."""
    mesh = make_mesh()
    large = dataclasses.replace(spec, embed_dim=32, num_layers=1, padded_vocab_size=72)
    where = model_params.shardings(large, mesh, sharding.TRAIN)
    return (spec, make_params(mesh)), (large, tiny.init(large, 4, where)), mesh


def test_scores_equal_the_unpacked_model(both, make_packer, make_streams):
    (_, _), (spec, params), mesh = both
    trajectories = [s.trajectory for s in make_streams(4)]
    rng = np.random.default_rng(0)
    candidates = [rng.integers(0, spec.vocab_size, (len(t), 2)).astype(np.int32) for t in trajectories]
    scorer = teacher.top_scorer(spec, make_packer(longest_targets=20), mesh, K, 2)
    scorer.warm_up(params)
    found = [Scores(*one) for one in zip(*scorer(params, trajectories, TEMPERATURE, candidates), strict=True)]
    assert scorer.program._cache_size() == 1 and scorer(params, [], TEMPERATURE, []) == ([],) * 4
    for t, c, got in zip(trajectories, candidates, found, strict=True):
        expected, at = table(params, spec, t, mesh), np.flatnonzero(t.action_mask)
        np.testing.assert_allclose(got.logprobs[at], expected[at, t.tokens[at]], atol=5e-6)
        np.testing.assert_array_equal(got.top_ids[at], np.argsort(-expected[at], axis=1)[:, :K])
        np.testing.assert_allclose(got.top_logprobs[at], -np.sort(-expected[at], axis=1)[:, :K], atol=5e-6)
        np.testing.assert_allclose(got.candidate_logprobs[at], expected[at[:, None], c[at]], atol=5e-6)
        assert not any(array[~t.action_mask].any() for array in got)


@pytest.mark.parametrize("support", ["vocabulary", "union"])
def test_the_divergence_in_the_loss_equals_the_sum_written_out(both, cfg, make_packer, make_streams, support):
    (spec, params), (teacher_spec, teacher_params), mesh = both
    trajectories = [s.trajectory for s in make_streams(4)]
    masks = [t.action_mask.astype(np.float32) for t in trajectories]
    whole = support == "vocabulary"
    tables = [(table(params, spec, t, mesh), table(teacher_params, teacher_spec, t, mesh)) for t in trajectories]
    supports, expected = [], []
    for (p, q), mask in zip(tables, masks, strict=True):
        ids = np.argsort(-q, axis=1)[:, :K].astype(np.int32)
        known = np.take_along_axis(q, ids, axis=1).astype(np.float32)
        known[::2, 1] = -np.inf  # every second token leaves one out
        supports.append(Support(ids, known))
        one = [
            kl(p[i], q[i]) if whole else kl(p[i, ids[i]][np.isfinite(known[i])], known[i][np.isfinite(known[i])])
            for i in range(len(mask))
        ]
        expected.append(np.where(mask > 0, one, 0))
    streams = [
        Streams.of(t, distill_weights=m, support=s) for t, m, s in zip(trajectories, masks, supports, strict=True)
    ]
    packer = make_packer(longest_targets=20)
    batches = packer.pack(streams)
    if not whole:
        batches = teacher.with_support(batches, supports, K)
        assert teacher.with_support([packer.empty()], [], K)[0].support.shape == batches[0].support.shape
    compare = compare_to_teacher(spec, ReverseKL(), teacher_spec if whole else None)
    forward = jax.jit(policy_forward(spec, compare=compare))
    with jax.set_mesh(mesh):
        outputs = [forward(params, b, TEMPERATURE, None, teacher_params if whole else None) for b in batches]
    found = unpack(batches, [np.asarray(extras["divergence"]) for _, _, extras in outputs], streams)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert np.any(want > 0.01)


@pytest.mark.slow
def test_adapters_are_distilled_as_the_weights_that_they_make(both, cfg, make_packer, make_streams):
    """LoRA beside its base has the divergence of the merged weights, and its update makes it smaller."""
    (spec, base), (teacher_spec, weights), mesh = both
    adapters = LoraConfig(rank=2, alpha=4.0, rank_stabilised=False, targets="q_proj,o_proj,down_proj")
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, lora=adapters))
    trained, merge = programs.adapters(cfg, spec, mesh), programs.merger(cfg)
    compare = compare_to_teacher(spec, ForwardKL(), teacher_spec)
    forward = policy_forward(spec, None, adapters, log_z=True, compare=compare)
    trajectories = [s.trajectory for s in make_streams(4)]
    count = sum(int(t.action_mask.sum()) for t in trajectories)
    streams = [Streams.of(t, distill_weights=t.action_mask / count) for t in trajectories]
    batches = make_packer(longest_targets=20).pack(streams)
    optimizer = optax.sgd(0.5)
    update = make_update(forward, optimizer, mesh, merge=merge)
    with jax.set_mesh(mesh):
        moved = jax.tree.map(lambda x: x + 0.05, trained)
        state = init_state(moved, optimizer).replace(frozen=Frozen(base, None))
        state = update.merged(state)
        merged = jax.jit(policy_forward(spec, compare=compare))
        extras = [merged(state.policy, batch, TEMPERATURE, None, weights)[2] for batch in batches]
        expected = sum(float((b.distill_weights * e["divergence"]).sum()) for b, e in zip(batches, extras, strict=True))
    state, first = update(state, batches, temperature=TEMPERATURE, teacher=weights)
    _, second = update(state, batches, temperature=TEMPERATURE, teacher=weights)
    np.testing.assert_allclose(first["loss/distill"], expected, rtol=1e-4)
    assert second["loss/distill"] < first["loss/distill"]


def test_what_is_replayed_travels_without_a_support(make_packer, make_streams):
    distilled, replayed = (s.trajectory for s in make_streams(2))
    ids = np.full((len(distilled), K), 7, np.int32)
    mask = distilled.action_mask.astype(np.float32)
    streams = [
        Streams.of(replayed, nll_weights=replayed.action_mask),
        Streams.of(distilled, distill_weights=mask, support=Support(ids, np.full(ids.shape, -1.0, np.float32))),
    ]
    judge = teacher.Distiller(None, None, None, None, None, K)
    (batch,) = judge.batches(make_packer(longest_targets=20).pack(streams), streams)
    np.testing.assert_array_equal(np.isfinite(batch.teacher_logprobs).all(-1), batch.sequence == 1)
    assert (batch.support[batch.sequence == 1] == 7).all() and not batch.support[batch.sequence != 1].any()


# ---------------------------------------------------------------- mistakes


def taught_by(cfg, folder):
    return dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, distill=DistillConfig(Folder(str(folder)))))


def test_a_teacher_is_opened_by_its_folder(cfg, teacher_folder, make_mesh):
    given = taught_by(cfg, teacher_folder)
    teacher.check_teacher(given, Tokenizer.load(teacher_folder))
    spec, weights = teacher.open_teacher(given, make_mesh())
    assert spec.embed_dim == 16 and weights.embed.dtype == cfg.model.compute_dtype
    assert teacher.open_teacher(cfg, make_mesh()) is None


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["zebra zebra zebra zebra"] * 3, "another tokenizer than the policy: token "),
        ([""], "Set tokenizer.path to the teacher's folder"),
    ],
)
def test_a_teacher_with_other_tokens_is_refused(cfg, teacher_folder, texts, message):
    other = Tokenizer.train(texts, 300, ["<stop>"])
    assert other.digest() != Tokenizer.load(teacher_folder).digest()
    with pytest.raises(ConfigError, match=message):
        teacher.check_teacher(taught_by(cfg, teacher_folder), other)


def test_a_teacher_that_is_none(cfg, tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        teacher.check_teacher(taught_by(cfg, tmp_path / "nothing"), None)
    with pytest.raises(ConfigError, match="does not exist"):
        teacher.check_teacher(taught_by(cfg, tmp_path), None)
