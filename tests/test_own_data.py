"""A user's own tasks and passages with a model from scratch: Search-R1's parquet files, nothing beside them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxagent.config import ConfigError, flags
from jaxagent.data import tokenizer
from jaxagent.data_pipelines import nq_hotpotqa
from jaxagent.runs.parts import open_parts
from jaxagent.runs.stages import warm_start
from jaxagent.types import Task
from tests import tiny_run

NAME = "Zwolfenbrixia"  # in no prompt and no answer: only the passages can teach it


def _row(split, index):
    index += 100 * (split == "test")  # other questions than the training ones
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Answer the given question. Question: where is tower {index}?\n"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": [f"Town {index}"]}},
        "extra_info": {"split": split, "index": index},
    }


@pytest.fixture
def own(tmp_path):
    """The flags of a run on data that the documented pipeline wrote."""
    for split, count in (("train", 12), ("test", 4)):
        rows = [_row(split, i) for i in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    out = tmp_path / "nq"
    assert (
        nq_hotpotqa.main([f"--train={tmp_path}/train.parquet", f"--test={tmp_path}/test.parquet", f"--out={out}"]) == 0
    )
    passages = [{"id": str(i), "contents": f'"Tower {i}"\nIn {NAME} stands tower {i}.'} for i in range(30)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages))
    return [f"--config.data.source={out}", f"--config.env.retriever.corpus={tmp_path}/corpus.jsonl"]


def _open(workdir, *extra, note=lambda line: None):
    cfg = flags.parse_argv(tiny_run.argv(workdir, *extra)).config
    return open_parts(cfg, note)


def test_a_tokenizer_is_trained_on_prompts_answers_and_passages(own, tmp_path):
    told = []
    with _open(tmp_path / "run", *own, "--config.stages=rl", note=told.append) as parts:
        encode = parts.tokenizer.encode
        assert len(encode(f" {NAME}")) == 1
        assert len(encode(" tower")) == 1
        assert len(encode(" Town")) == 1
    assert any(line.startswith("12 of 12 training and 4 of 4 held-out tasks are not proven") for line in told)
    with (
        pytest.raises(ConfigError, match=r"data\.unchecked=refuse: 12 of 12"),
        _open(tmp_path / "run", *own, "--config.data.only_proven=True"),
    ):
        pass


def test_without_demonstrations_the_error_says_what_to_do(own, tmp_path):
    with (
        _open(tmp_path / "run", *own) as parts,
        pytest.raises(ConfigError, match=r"nq/curriculum\.jsonl'\. Leave the stage out \(--config\.stages=rl\)"),
    ):
        warm_start.check(parts)


def _texts(dataset, corpus=None):
    return list(
        tokenizer.texts_of_dataset(dataset, [Task("0", "q", ("a", "b"))], lambda prompt: [f"<{prompt}>"], corpus)
    )


def test_the_datasets_own_texts_are_the_only_ones(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"id": "0", "contents": "c"}\n')
    assert _texts(tmp_path, tmp_path / "corpus.jsonl") == ["<q>", " a", " b", "c"]
    (tmp_path / "texts.jsonl").write_text('{"text": "t"}\n\n{"text": "u"}\n')
    assert _texts(tmp_path, tmp_path / "corpus.jsonl") == ["t", "u"]


@pytest.mark.parametrize(
    "line", [b"{", b'{"txt": "t"}', b'{"text": 1}', b"[]", b'{"text": "\xff"}', rb'{"text": "\ud800"}']
)
def test_a_malformed_text_is_named_by_its_row(tmp_path, line):
    (tmp_path / "texts.jsonl").write_bytes(b'{"text": "t"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"texts\.jsonl, row 2: "):
        _texts(tmp_path)
