"""A tiny model, ragged trajectories and streams, and meshes for the learner tests."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms.streams import Streams
from jaxagent.config import BatchConfig, MeshConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.learner.batching import Packer, Sharing
from jaxagent.models import hf, sharding
from jaxagent.models import params as model_params
from jaxagent.models.spec import ModelSpec
from jaxagent.types import TokenKind, Trajectory
from tests.models import tiny

VOCAB = 61


@pytest.fixture(scope="session")
def cfg():
    return config.parse(get_config())


@pytest.fixture(scope="session")
def spec(cfg):
    model = dataclasses.replace(
        cfg.model, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32, vocab_multiple=8,
        logprob_chunk_tokens=24,
    )  # fmt: skip
    return ModelSpec.from_config(model, VOCAB)


@pytest.fixture(scope="session")
def make_mesh():
    def make(data=1, fsdp=1, tensor=1, context=1):
        return sharding.make_mesh(MeshConfig(data, fsdp, tensor, context))

    return make


@pytest.fixture(scope="session")
def make_params(spec):
    made = jax.device_get(tiny.init(spec, 3))

    def make(mesh):
        return jax.device_put(made, model_params.shardings(spec, mesh, sharding.TRAIN))

    return make


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory, spec):
    """A random model and a tokenizer, as a run exports them."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = Tokenizer.train(["a quick brown fox"] * 3, 300, ["<stop>"])
    tokenizer.save(folder)
    size = tokenizer.vocab_size
    spec = dataclasses.replace(spec, vocab_size=size, padded_vocab_size=-(-size // 64) * 64)
    hf.save(folder, tiny.random_params(spec), spec, "float32", folder)
    return folder


@pytest.fixture(scope="session")
def make_packer():
    def make(row_tokens=24, micro_rows=4, longest_targets=8, row_shards=1, share=0, context=1):
        config = BatchConfig(row_tokens, micro_rows, targets_multiple=4, share_prefix=share > 0)
        sharing = Sharing(share, row_tokens // 2) if share else None
        return Packer(config, longest_targets, row_shards, sharing, context)

    return make


def _trajectory(rng, length):
    kinds = rng.choice([TokenKind.ACTION, TokenKind.OBSERVATION, TokenKind.OBSERVATION], length).astype(np.uint8)
    kinds[:2] = TokenKind.PROMPT
    kinds[-1] = TokenKind.ACTION
    actions = kinds == TokenKind.ACTION
    return Trajectory(
        tokens=rng.integers(0, VOCAB, length).astype(np.int32),
        kinds=kinds,
        logprobs=np.where(actions, rng.normal(-3, 0.5, length), 0).astype(np.float32),
        policy_versions=np.where(actions, 0, -1).astype(np.int32),
        turns=np.zeros(length, np.int32),
    )


@pytest.fixture(scope="session")
def make_streams():
    """Returns n ragged sequences in which every stream is random on the action tokens, and 0 elsewhere."""

    def make(n, seed=0, low=5, high=20):
        rng = np.random.default_rng(seed)
        sequences = []
        for _ in range(n):
            trajectory = _trajectory(rng, int(rng.integers(low, high)))
            mask = trajectory.action_mask
            observed = trajectory.kinds == TokenKind.OBSERVATION

            def stream(where, scale=1.0):
                return np.where(where, scale * rng.uniform(0.1, 1.0, len(where)), 0.0)

            sequences.append(
                Streams.of(
                    trajectory,
                    advantages=np.where(mask, rng.normal(size=len(mask)), 0),
                    returns=stream(mask),
                    old_values=stream(mask),
                    reference_logprobs=-stream(mask, 3.0),
                    policy_weights=stream(mask),
                    kl_weights=stream(mask, 0.1),
                    entropy_weights=stream(mask, 0.1),
                    value_weights=stream(mask),
                    ce_weights=stream(observed, 0.3),
                )
            )
        return sequences

    return make


@pytest.fixture(scope="session")
def make_trees(make_streams):
    """As `make_streams`, but most sequences begin as an earlier one does: targets, too, lie in what they share."""

    def make(n, seed=0, low=5, high=20):
        rng = np.random.default_rng([seed, 1])
        sequences = make_streams(n, seed, low, high)
        for i in range(1, n):
            tokens, other = sequences[i].trajectory.tokens, sequences[rng.integers(i)].trajectory.tokens
            common = int(rng.integers(0, min(len(tokens), len(other)) + 1))
            tokens[:common] = other[:common]
        return sequences

    return make
