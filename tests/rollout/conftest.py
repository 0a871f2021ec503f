"""Tokenizers and a scripted policy for the rollout tests: no model, no engine, no JAX."""

import gzip
from pathlib import Path

import pytest

from jaxagent.data.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[2].parent / "shared/data"
TAGS = ["<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"]
TEXTS = ["Question: what is the calling code of Ghana? <search> calling code of Ghana</search> 233 café"] * 20


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400, TAGS)


@pytest.fixture(scope="session", params=["gpt2-tokenizer", "deepseek-r1-tokenizer", "trained"])
def tokenizer(request, tmp_path_factory, trained) -> Tokenizer:
    if request.param == "trained":
        return trained
    source = SHARED / request.param
    if not source.is_dir():
        pytest.skip(f"{request.param} is not beside this checkout")
    folder = tmp_path_factory.mktemp(request.param)
    for path in source.iterdir():
        if path.name == "tokenizer.json.gz":
            (folder / "tokenizer.json").write_bytes(gzip.decompress(path.read_bytes()))
        elif path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    return Tokenizer.load(folder)
