"""The pipeline on Search-R1-shaped parquet, FlashRAG-shaped jsonl and the real HotpotQA and Bamboogle files."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipelines import nq_hotpotqa
from jaxagent.data import sources

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared/data"


def search_r1_row(source, split, index):
    return {
        "id": f"{split}_{index}",
        "question": f"who is {index}",
        "golden_answers": [f"a{index}"],
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Instructions. Question: who is {index}?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [f"a{index}"]}},
        "extra_info": {"split": split, "index": index},
    }


def run(*arguments):
    return nq_hotpotqa.main([str(argument) for argument in arguments])


def test_search_r1_parquet_becomes_a_dataset(tmp_path, capsys):
    train = [search_r1_row(source, "train", i) for source in ("nq", "hotpotqa") for i in range(4)]
    pq.write_table(pa.Table.from_pylist(train), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist([search_r1_row("nq", "test", i) for i in range(5)]), tmp_path / "test.parquet")
    out = tmp_path / "out"
    assert run(f"--train={tmp_path}/train.parquet", f"--test={tmp_path}/test.parquet", f"--out={out}") == 0
    tasks = list(sources.load_tasks(out, "train"))
    assert [t.id for t in tasks] == [f"{s}/train/{i}" for s in ("nq", "hotpotqa") for i in range(4)]
    assert (tasks[5].prompt, tasks[5].answers, tasks[5].kind) == ("who is 1?", ("a1",), "hotpotqa")
    # The dataset is what the parquet itself would have given.
    assert tasks == list(sources.load_tasks(tmp_path / "train.parquet"))
    assert "train: 8 rows (hotpotqa 4, nq 4)" in capsys.readouterr().err


def test_flashrag_jsonl_takes_its_name_from_the_argument_and_test_sets_are_capped(tmp_path):
    for name in ("nq", "hotpotqa"):
        lines = [json.dumps({"id": f"t_{i}", "question": "q", "golden_answers": ["a"]}) for i in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    inputs = [f"nq={tmp_path}/nq.jsonl", f"hotpotqa={tmp_path}/hotpotqa.jsonl"]
    arguments = [*(f"--train={i}" for i in inputs), *(f"--test={i}" for i in inputs[::-1])]
    # One id in both splits would make a question's two copies sample alike.
    assert run(*arguments, f"--out={tmp_path}/out") == 2
    (tmp_path / "test.jsonl").write_text((tmp_path / "nq.jsonl").read_text().replace("t_", "test_"))
    tests = [f"--test=nq={tmp_path}/test.jsonl", "--max_test_rows_per_source=2"]
    assert run(*(f"--train={i}" for i in inputs), *tests, f"--out={tmp_path}/out") == 0
    assert [t.id for t in sources.load_tasks(tmp_path / "out", "test")] == ["nq/test_0", "nq/test_1"]
    assert len(sources.load_tasks(tmp_path / "out", "train")) == 10


def test_malformed_rows_stop_it_or_are_counted(tmp_path, capsys):
    lines = [{"id": "0", "question": "q", "golden_answers": ["a"]}, {"id": "1", "question": "q", "golden_answers": []}]
    file = tmp_path / "raw.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"id": "2", "question": "q"}]))
    assert run(f"--train=nq={file}", f"--out={tmp_path}/out") == 2
    assert "raw.jsonl, line 2: column 'golden_answers': no gold answer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(f"--train=nq={file}", f"--out={tmp_path}/out", "--skip_malformed") == 0
    told = capsys.readouterr().err
    assert "train: 1 rows (nq 1)" in told and "2 malformed rows left out" in told and "line 2" in told


def test_json_lists_as_hotpotqa_and_agentflow_have_them(tmp_path):
    lists = {
        "hotpotqa": [
            {"_id": "5a", "question": "q one", "answer": "yes", "type": "bridge", "context": [["T", ["long"]]]},
            {"question": "q?", "answer": "no"},
        ],
        "agentflow": [
            {"idx": 0, "question": "q two?When ready, output the final answer enclosed in x.", "answer": ["a", "b"]}
        ],
    }
    for name, content in lists.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    inputs = [f"--train={name}={tmp_path}/{name}.json" for name in lists]
    assert run(*inputs, f"--out={tmp_path}/out") == 0
    tasks = sources.load_tasks(tmp_path / "out", "train")
    assert [(t.id, t.prompt, t.answers) for t in tasks] == [
        ("hotpotqa/5a", "q one?", ("yes",)),
        ("hotpotqa/train_1", "q?", ("no",)),
        ("agentflow/train_0", "q two?", ("a", "b")),
    ]
    assert not any(task.metadata for task in tasks)  # paragraphs stay where they are


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ('{"a": 1}', "column 'prompt': missing"),
        ('[{"question": 3, "answer": "x"}]', "row 0: column 'question'"),
    ],
)
def test_malformed_json_lists(tmp_path, capsys, content, message):
    (tmp_path / "raw.json").write_text(content)
    assert run(f"--train={tmp_path}/raw.json", f"--out={tmp_path}/out") == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path, capsys):
    assert run(f"--train={tmp_path}/train.parquet", f"--out={tmp_path}/out") == 2
    assert "No data at" in capsys.readouterr().err


@pytest.mark.skipif(not (SHARED / "hotpotqa-react").is_dir(), reason="needs shared/data/hotpotqa-react and qa-bench")
def test_the_real_hotpotqa_and_bamboogle_files(tmp_path):
    train = SHARED / "hotpotqa-react/hotpot_dev_v1_simplified.json"
    tests = [f"--test={name}={SHARED}/qa-bench/{name}.json" for name in ("bamboogle", "hotpotqa")]
    assert run(f"--train=hotpotqa={train}", *tests, f"--out={tmp_path}/out") == 0
    tasks = sources.load_tasks(tmp_path / "out", "train")
    raw = json.loads(train.read_text())
    assert len(tasks) == len(raw) == 7405
    assert (tasks[0].prompt, tasks[0].answers) == (raw[0]["question"], (raw[0]["answer"],))
    held_out = list(sources.load_tasks(tmp_path / "out", "test"))
    assert [t.kind for t in held_out] == ["bamboogle"] * 125 + ["hotpotqa"] * 100
    assert all(t.prompt.endswith("?") and "<answer>" not in t.prompt for t in held_out)


def test_help_is_quick_to_import():
    code = (
        "import sys; from data_pipelines import nq_hotpotqa\n"
        "try: nq_hotpotqa.main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'tensorflow_datasets', 'jax', 'pyarrow', 'grain', 'rich'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--max_test_rows_per_source" in done.stdout
