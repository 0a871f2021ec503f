"""The corpus tool: malformed lines are named, and the index is the retriever's own, interrupted or not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipelines import corpus
from jaxagent.config import ConfigError
from jaxagent.envs.search.retriever import dense
from jaxagent.envs.search.retriever.base import read_corpus

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared/data"


def write_corpus(path: Path, count: int) -> Path:
    rows = ({"id": str(i), "contents": f'"Title {i}"\nword{i} été {i % 3}'} for i in range(count))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def run(*arguments):
    return corpus.main([str(argument) for argument in arguments])


def test_the_index_is_the_one_the_retriever_would_write(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 7)
    path = write_corpus(tmp_path / "corpus.jsonl", 30)
    assert run(f"--corpus={path}", f"--index={tmp_path}/ours", "--encoder=hashing:16") == 0
    passages = read_corpus(path)
    ours, vectors = tmp_path / "ours", dense.open_encoder("hashing:16")([p.contents for p in passages], "passage")
    np.testing.assert_array_equal(np.load(ours / "vectors.npy"), vectors)
    facts = {"encoder": "hashing:16", "passages": 30, "corpus": dense.fingerprint(passages)}
    assert json.loads((ours / "index.json").read_text()) == facts
    assert sorted(p.name for p in ours.iterdir()) == ["index.json", "vectors.npy"]
    dense.Dense.load(ours, passages)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 7)
    passages = corpus.CorpusFile(write_corpus(tmp_path / "corpus.jsonl", 30))
    mark = dense.fingerprint(passages)

    class Interrupted(Exception):
        pass

    def interrupt(done):
        if done == 14:
            raise Interrupted

    with pytest.raises(Interrupted):
        corpus.write_index(tmp_path / "i", passages, mark, "hashing:16", interrupt)
    with pytest.raises(ConfigError, match="is not a dense index"):  # half an index is no index
        dense.Dense.load(tmp_path / "i", list(passages))
    with pytest.raises(ConfigError, match="unfinished index of another"):
        corpus.write_index(tmp_path / "i", passages, mark, "hashing:8", interrupt)
    seen = []
    corpus.write_index(tmp_path / "i", passages, mark, "hashing:16", seen.append)
    assert seen == [21, 28, 30]
    corpus.write_index(tmp_path / "straight", passages, mark, "hashing:16", lambda done: None)
    np.testing.assert_array_equal(np.load(tmp_path / "i/vectors.npy"), np.load(tmp_path / "straight/vectors.npy"))
    # Finished: nothing is done again, and no other index takes its place.
    corpus.write_index(tmp_path / "i", passages, mark, "hashing:16", seen.append)
    assert seen[3:] == [30]
    with pytest.raises(ConfigError, match="another corpus or encoder"):
        corpus.write_index(tmp_path / "i", passages, "1:0", "hashing:16", interrupt)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: a passage must be an object"),
        ('{"id": "1", "text": "x"}', "line 3: field 'contents' is missing; the line has id, text"),
        ('{"contents": "x"}', "line 3: field 'id' is missing"),
        ('{"id": null, "contents": "x"}', "line 3: field 'id'"),
        ('{"id": "1", "contents": " "}', "line 3: field 'contents'"),
        ('{"id": "1", "contents": ["x"]}', "line 3: field 'contents'"),
    ],
)
def test_malformed_lines_are_named(tmp_path, capsys, line, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "0", "contents": "x"}\n\n' + line + "\n")
    assert run(f"--corpus={path}") == 2
    assert f"corpus.jsonl, {message}" in capsys.readouterr().err


def test_other_mistakes(tmp_path, capsys):
    path = write_corpus(tmp_path / "corpus.jsonl", 3)
    assert run(f"--corpus={tmp_path}/none.jsonl") == 2
    assert "No corpus at" in capsys.readouterr().err
    assert run(f"--corpus={path}", f"--index={tmp_path}/i", f"--encoder={tmp_path}/no_model") == 2
    assert "no_model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(f"--corpus={path}", f"--index={tmp_path}/i")
    shutil.copy(path, tmp_path / "empty.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert run(f"--corpus={tmp_path}/empty.jsonl") == 2


@pytest.mark.skipif(not (SHARED / "search-r1-example").is_dir(), reason="needs shared/data/search-r1-example")
def test_search_r1s_example_corpus(tmp_path, capsys):
    path = SHARED / "search-r1-example/corpus.jsonl"
    assert run(f"--corpus={path}", f"--index={tmp_path}/i", "--encoder=hashing:64") == 0
    assert "10 passages" in capsys.readouterr().err
    passages = read_corpus(path)
    assert list(corpus.CorpusFile(path)) == passages
    dense.Dense.load(tmp_path / "i", passages)


def test_help_is_quick_to_import():
    code = (
        "import sys; from data_pipelines import corpus\n"
        "try: corpus.main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'tensorflow_datasets', 'jax', 'bm25s', 'grain', 'rich', 'torch'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--encoder" in done.stdout
