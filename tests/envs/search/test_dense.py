"""Dense retrieval against brute force, with FAISS and without, and its index folder."""

import asyncio
import json

import numpy as np
import pytest

from data_pipelines.corpus import write_index
from jaxagent.config import ConfigError
from jaxagent.envs.search.retriever import dense
from jaxagent.envs.search.retriever.base import Passage
from jaxagent.envs.search.retriever.dense import hashing_encoder, open_encoder

PASSAGES = [Passage(str(i), f"t{i}", text) for i, text in enumerate(["red fox", "blue whale", "red whale", "red fox"])]


@pytest.fixture(params=["faiss", "numpy"])
def back_end(request, monkeypatch):
    if request.param == "faiss":
        pytest.importorskip("faiss")
    else:
        monkeypatch.setattr(dense, "_faiss_topk", lambda vectors: None)


def search(retriever, queries, topk):
    return asyncio.run(retriever.search(queries, topk))


def test_equals_brute_force(back_end):
    random = np.random.default_rng(0)
    vectors = random.normal(size=(50, 8)).astype(np.float32)
    queries = {f"q{i}": random.normal(size=8).astype(np.float32) for i in range(5)}
    passages = [Passage(str(i), "", "") for i in range(50)]
    retriever = dense.Dense(passages, vectors, lambda texts, kind: np.stack([queries[t] for t in texts]))
    for (_, query), found in zip(queries.items(), search(retriever, list(queries), 7), strict=True):
        products = [float(np.dot(query, v)) for v in vectors]
        expected = sorted(range(50), key=lambda i: -products[i])[:7]
        assert [int(p.id) for p in found] == expected
        assert [p.score for p in found] == pytest.approx([products[i] for i in expected], rel=1e-5)


def test_index_folder_with_the_hashing_encoder(back_end, tmp_path):
    write_index(tmp_path, PASSAGES, dense.fingerprint(PASSAGES), "hashing:256", lambda done: None)
    found, nothing = search(dense.Dense.load(tmp_path, PASSAGES), ["red fox", ""], 10)
    assert [p.id for p in found[:2]] == ["0", "3"]  # equal up to their titles; no dependence on anything else
    assert len(found) == 4 and found[0].score > found[2].score
    assert all(p.score == 0 for p in nothing)
    assert search(dense.Dense.load(tmp_path, PASSAGES), [], 3) == []


def test_unfit_index_folders(tmp_path):
    with pytest.raises(ConfigError, match="not a dense index"):
        dense.Dense.load(tmp_path, PASSAGES)
    write_index(tmp_path, PASSAGES, dense.fingerprint(PASSAGES), "hashing:16", lambda done: None)
    with pytest.raises(ConfigError, match="another corpus"):
        dense.Dense.load(tmp_path, PASSAGES[:3])
    facts = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(facts | {"encoder": "no/such/model"}))
    with pytest.raises(ConfigError, match="no/such/model"):
        dense.Dense.load(tmp_path, PASSAGES)


def test_hashing_encoder():
    vectors = hashing_encoder(64)(["Red fox", "red FOX!", "fox red", "whale", ""], "query")
    assert vectors.dtype == np.float32 and vectors.shape == (5, 64)
    np.testing.assert_array_equal(vectors[0], vectors[1])
    np.testing.assert_array_equal(vectors[0], vectors[2])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1, 1, 0])
    assert open_encoder("hashing:8")(["fox"], "query").shape == (1, 8)


def test_transformers_encoder_pools_over_real_tokens_only(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", "red", "fox", "whale"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab))
    config = transformers.BertConfig(
        vocab_size=len(vocab), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    encoder = open_encoder(str(tmp_path))
    together = encoder(["fox", "red fox red fox whale"], "query")
    np.testing.assert_allclose(together[0], encoder(["fox"], "query")[0], atol=1e-5)  # padding does not matter
    assert np.linalg.norm(together, axis=1) == pytest.approx([1, 1])
    assert not np.allclose(together[0], encoder(["fox"], "passage")[0], atol=1e-3)  # the prefix does
