"""The embedded BM25 against the formula written out by hand, its ties, and the corpus file's errors."""

import asyncio
import json
import math
import subprocess
import sys
from collections import Counter

import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.search.retriever.base import Passage, read_corpus
from jaxagent.envs.search.retriever.bm25 import K1, B, Bm25, words

CORPUS = [
    Passage("a", '"Kumasi"', "Kumasi is a city in Ghana. Another city there is Tema."),
    Passage("b", '"Ghana"', "The capital of Ghana is Accra."),
    Passage("c", '"Ghana"', "The calling code of Ghana is 233. The domain of Ghana is .gh."),
    Passage("d", '"Togo"', "The capital of Togo is Lomé."),
]


def reference_score(query: str, passage: Passage) -> float:
    """Robertson's BM25 with Lucene's idf, a query word counted as often as it is written."""
    documents = [Counter(words(p.contents)) for p in CORPUS]
    mean = sum(d.total() for d in documents) / len(documents)
    counts = Counter(words(passage.contents))
    score = 0.0
    for word in words(query):
        containing = sum(word in d for d in documents)
        idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
        score += idf * counts[word] / (counts[word] + K1 * (1 - B + B * counts.total() / mean))
    return score


@pytest.mark.parametrize("query", ["capital of Ghana", "calling code of ghana", "Lomé", "city", "ghana ghana capital"])
def test_scores_and_order_equal_the_formula(query):
    found = Bm25(CORPUS).lookup(query, 4)
    expected = sorted(CORPUS, key=lambda p: -reference_score(query, p))
    assert [p.id for p in found] == [p.id for p in expected if reference_score(query, p) > 0]
    for passage in found:
        assert passage.score == pytest.approx(reference_score(query, passage), rel=1e-5)


def test_ties_are_in_corpus_order_and_cut_at_topk():
    texts = ["beta", "gamma", "beta gamma gamma", "beta beta"]  # four scores, each many times
    index = Bm25([Passage(str(i), "x", texts[i % 4]) for i in range(400)])
    found = index.lookup("beta", 1000)
    assert [p.id for p in found] == [p.id for p in sorted(found, key=lambda p: (-p.score, int(p.id)))]
    assert len(found) == 300 and len({p.score for p in found}) == 3
    assert [p.id for p in index.lookup("beta", 3)] == ["3", "7", "11"]


@pytest.mark.parametrize("query", ["", "?!", "zanzibar"])
def test_nothing_in_common_finds_nothing(query):
    assert Bm25(CORPUS).lookup(query, 3) == []
    assert Bm25([]).lookup("ghana", 3) == []


def test_async_search_equals_lookup():
    index = Bm25(CORPUS)
    assert asyncio.run(index.search(["Ghana", "Togo"], 2)) == [index.lookup("Ghana", 2), index.lookup("Togo", 2)]


def test_read_corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": 7, "contents": '"Ghana"\nline 1\nline 2'}) + "\n\n")
    (passage,) = read_corpus(path)
    assert (passage.id, passage.title, passage.text) == ("7", '"Ghana"', "line 1\nline 2")
    assert passage.contents == '"Ghana"\nline 1\nline 2'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 1}', r"corpus\.jsonl, row 2: column 'contents': missing"),
        ('\n\n{"id": 1}', r"row 4: column 'contents'"),  # blank lines are counted
        ("{", r"corpus\.jsonl, row 2: not JSON"),
        ('{"id": 1, "contents": 3}', "must be text"),
        ("[1]", "must be an object"),
    ],
)
def test_malformed_rows_are_named(tmp_path, line, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": 0, "contents": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_corpus(path)


@pytest.mark.parametrize("before", ["", "import jax"])
def test_importing_it_starts_no_jax(before):
    """bm25s runs a JAX computation when it is imported; that would take the accelerator in every worker process."""
    after = "jax.config.update('jax_num_cpu_devices', 3)" if before else "assert 'jax' not in sys.modules"
    # That setting fails once jax has started.
    code = f"import sys\n{before}\nimport jaxagent.envs.search.retriever.bm25\n{after}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
