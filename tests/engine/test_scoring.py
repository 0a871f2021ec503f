"""Scoring compiles few programs, whatever numbers of tokens clients ask for; their answers do not depend on it."""

import json
import threading

import jax
import numpy as np
import pytest

from jaxagent.engine import scoring
from jaxagent.models import params, sharding
from tests.engine.toys import mesh_of
from tests.models import tiny

VOCAB = 48


@pytest.fixture(scope="module")
def score():
    spec, mesh = tiny.spec(vocab_size=VOCAB), mesh_of(1)
    with jax.set_mesh(mesh):
        weights = tiny.init(spec, 0, params.shardings(spec, mesh, sharding.COMPUTE))
    scorer = scoring.scorer(spec, mesh)

    def score(given_up=None, **body):
        asked = {"sequences": [[5, 6, 7, 8]], "positions": [[1, 3]]} | body
        return scorer(weights, scoring.parse(json.dumps(asked), VOCAB, 64), given_up)[0]

    return score


def test_few_programs_and_the_same_answers(score):
    before = scoring._score._cache_size()
    answers = {(k, c): score(top_k=k, candidates=[[[*range(c)]] * 2]) for k in (33, 48, 40) for c in (5, 8, 7)}
    assert scoring._score._cache_size() == before + 1
    most = answers[48, 8]
    for (k, c), answer in answers.items():
        assert np.shape(answer["top_ids"]) == (2, k) and np.shape(answer["candidate_logprobs"]) == (2, c)
        assert answer["logprobs"] == most["logprobs"]
        for name, width in (("top_ids", k), ("top_logprobs", k), ("candidate_logprobs", c)):
            assert answer[name] == [row[:width] for row in most[name]]
    assert sorted(most["top_ids"][0]) == list(range(VOCAB))
    np.testing.assert_allclose(np.exp(most["top_logprobs"]).sum(axis=1), 1, rtol=1e-5)


def test_who_has_gone_is_not_scored_for(score):
    gone = threading.Event()
    assert len(score(gone)["logprobs"]) == 2
    gone.set()
    assert score(gone)["logprobs"] == []


@pytest.mark.parametrize("temperature", ["1e-7", "1e-46", "0", "-1", "Infinity", "NaN", "1" + "0" * 400])
def test_a_temperature_without_finite_answers_is_refused(temperature):
    text = '{"sequences": [[1, 2]], "positions": [[1]], "temperature": ' + temperature + "}"
    with pytest.raises(ValueError, match="'temperature' must be from 1e-06 to 1000"):
        scoring.parse(text, VOCAB, 64)


@pytest.mark.parametrize("temperature", [1e-6, 1000.0])
def test_at_the_bounds_all_is_finite(score, temperature):
    answer = score(temperature=temperature, top_k=40, candidates=[[[1], [2]]])
    assert all(np.isfinite(answer[name]).all() for name in scoring.OUTPUTS)
