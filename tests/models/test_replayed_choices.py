"""Recorded choices are replayed: the selection alone, by torch's own router; what a record is made of."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxagent.config import MeshConfig
from jaxagent.models import attention, choices, hf, logprobs, params, sharding, transformer
from jaxagent.models.blocks.experts import Experts
from jaxagent.models.blocks.mlp import SwiGLU
from jaxagent.models.blocks.routing import Routing
from jaxagent.types import unrecorded
from tests.models import tiny

PLACES = "tokens", "positions", "segments", "head_positions"


def loss(weights, spec, batch):
    """Mean negative log-prob of some targets, and how many choices differ."""
    x, differing, _ = transformer.forward_packed(weights, spec, *map(batch.get, PLACES), recorded=batch["recorded"])
    x, differing, targets = map(sharding.whole_rows, (x, differing, jnp.asarray(batch["targets"])))
    values, *_ = logprobs.token_scores(weights, spec, *map(sharding.merge_rows, (x, targets)), 1.0)
    return -values.mean(), differing


with_gradients = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)


def random_choices(spec, shape, seed=0):
    """u8[..., W] ascending numbers of each block."""
    rng = np.random.default_rng(seed)
    drawn = [
        np.sort(rng.permuted(np.tile(np.arange(count, dtype=np.uint8), (*shape, 1)), axis=-1)[..., :k], axis=-1)
        for i in range(spec.num_layers)
        for k, count in [block.choices for block in spec.pattern[i % len(spec.pattern)] if block.choices[0]]
    ]
    return np.concatenate(drawn, axis=-1)


def batch_of(spec, b=2, t=20):
    """Rows of one sequence each, whose tokens' choices are recorded but for every fifth."""
    batch = tiny.batch(b, t, 8, spec.vocab_size)
    batch["segments"][:], batch["positions"][:] = 1, np.arange(t)
    batch["recorded"] = random_choices(spec, (b, t))
    batch["recorded"][:, ::5] = 255
    return batch


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "layer"])
def test_the_selection_is_replayed_and_all_else_is_torchs(remat, tmp_path, monkeypatch):
    """Also where nobody recorded it, and in the gradients: the router's own are among them."""
    torch = pytest.importorskip("torch")
    from tests.models import hf_cases

    model = hf_cases.build("moe")
    model.save_pretrained(tmp_path / "model")
    spec = dataclasses.replace(hf.read_spec(tmp_path / "model", tiny.model_config()), remat=remat)
    weights, batch = hf.load(tmp_path / "model", spec, None), batch_of(spec)
    (value, differing), gradients = with_gradients(weights, spec, batch)

    k, topk, own = spec.pattern[0][1].routing.active, torch.topk, []

    def forced(probabilities, *args, **named):
        _, live = topk(probabilities, *args, **named)
        part = batch["recorded"].reshape(-1, choices.width(spec))[:, len(own) * k : (len(own) + 1) * k]
        own.append(live)
        ids = torch.where(torch.as_tensor(part[:, :1] == 255), live, torch.as_tensor(part.astype(np.int64)))
        return probabilities.gather(-1, ids), ids

    monkeypatch.setattr(torch, "topk", forced)
    tokens, heads, targets = (torch.as_tensor(batch[name]).long() for name in ("tokens", "head_positions", "targets"))
    scores = torch.log_softmax(model(input_ids=tokens).logits, -1)[torch.arange(2)[:, None], heads]
    expected = -scores.gather(-1, targets[..., None]).mean()
    expected.backward()
    assert abs(float(value) - expected.item()) < 1e-4
    live = torch.cat([torch.sort(ids).values for ids in own], -1).reshape(*batch["recorded"].shape).numpy()
    wrong = np.zeros(tokens.shape, int)
    for layer in np.split(np.arange(live.shape[-1]), spec.num_layers):
        for at in np.ndindex(*wrong.shape):
            wrong[at] += len(set(batch["recorded"][at][layer].tolist()) - {255} - set(live[at][layer].tolist()))
    assert wrong.max() > 1
    np.testing.assert_array_equal(differing, np.take_along_axis(wrong, batch["head_positions"], axis=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "theirs")
    hf.save(tmp_path / "ours", gradients, spec, "float32")
    theirs, ours = (safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert np.abs(ours["model.layers.0.mlp.gate.weight"]).max() > 1e-4
    assert tiny.worst_relative(theirs, ours) < 1e-3


@pytest.mark.parametrize("kinds", ["deee", *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in ("de", "edee"))])
def test_what_a_token_would_choose_itself_changes_nothing(kinds):
    """Layers repeat, or begin with some that do not; d: dense, e: of experts."""
    of_kind = {"d": SwiGLU(), "e": Experts(Routing(count=5, active=2), mlp_dim=12)}
    pattern = tuple((tiny.spec().pattern[0][0], of_kind[kind]) for kind in kinds)
    spec = tiny.spec(family="qwen3_moe", num_layers=4, pattern=pattern)
    assert choices.width(spec) == 2 * (kinds * 4)[:4].count("e")
    weights, batch = tiny.init(spec), batch_of(spec)
    batch["recorded"][:] = 255
    (expected, _), gradients = with_gradients(weights, spec, batch)

    seen = []

    def note(state, scores, chosen):
        seen.append(chosen)
        return chosen, state

    def hidden(weights, tokens, positions):
        seen.clear()
        transformer.hidden(
            weights, spec, tokens, positions, attention.packed(batch["segments"]), None, True, choose=note
        )
        return jnp.concatenate(seen, axis=-1)

    live = jax.jit(hidden)(weights, batch["tokens"].reshape(-1), batch["positions"].reshape(-1))
    batch["recorded"] = np.asarray(live, np.uint8).reshape(batch["recorded"].shape)
    for remat in ("none", "layer"):
        (value, differing), others = with_gradients(weights, dataclasses.replace(spec, remat=remat), batch)
        assert abs(float(value - expected)) < 1e-6 and not np.asarray(differing).any()
        assert tiny.worst_relative(gradients, others) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(fsdp=2, tensor=2), dict(tensor=2, expert=2), dict(tensor=2, context=2)])
def test_a_mesh_replays_as_one_device_does(sizes):
    first = tiny.spec().pattern[0][0]
    spec = tiny.spec(family="qwen3_moe", pattern=((first, Experts(Routing(count=6, active=2), mlp_dim=12)),))
    batch = batch_of(spec, 4, 24)
    (expected, counts), gradients = with_gradients(tiny.init(spec), spec, batch)
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 (virtual) devices")
    mesh = sharding.make_mesh(MeshConfig(**dict(data=2, fsdp=1, context=1) | sizes))
    with jax.set_mesh(mesh):
        weights = tiny.init(spec, 0, params.shardings(spec, mesh, sharding.TRAIN))
        placed = {name: jax.device_put(x, sharding.rows(mesh, x.ndim)) for name, x in batch.items()}
        placed = jax.tree.map(sharding.over_context, placed)
        (value, differing), others = with_gradients(weights, spec, placed)
    np.testing.assert_array_equal(differing, counts)
    assert abs(float(value - expected)) < 1e-5
    assert tiny.worst_relative(gradients, others) < 1e-5


@pytest.mark.parametrize(
    ("count", "k", "dtype"), [(8, 2, "uint8"), (256, 8, "uint8"), (256, 1, "uint16"), (512, 8, "uint16")]
)
def test_one_byte_as_long_as_no_choice_can_begin_like_none(count, k, dtype):
    spec = tiny.spec(pattern=((tiny.spec().pattern[0][0], Experts(Routing(count=count, active=k))),))
    assert choices.dtype(spec) == dtype
    assert count - k < np.iinfo(dtype).max
    last = np.arange(count - k, count).astype(dtype)  # whose last may be the largest number
    assert choices.recorded(last) and not choices.recorded(unrecorded(1, k, dtype)[0])
