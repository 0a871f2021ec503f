"""GSM8K's rows: number, calculator annotations, errors by file, line and column; and the real files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipelines import gsm8k
from jaxagent.data import sources
from jaxagent.rewards import maths

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared/data/gsm8k"
ROW = {
    "question": " A pen costs $1,200. How much do 3 cost? ",
    "answer": "3 cost 3*1200=$<<3*1200=3600>>3600.\nThat is <<3600/1=3600.0>>it.\n#### 3,600",
}


def test_a_row_becomes_a_task_row():
    assert gsm8k.to_row(ROW, "train", 7) == {
        "id": "gsm8k/train/7",
        "prompt": "A pen costs $1,200. How much do 3 cost?",
        "answers": ["3600"],
        "kind": "gsm8k/2_calculations",
        "metadata": {
            "solution": "3 cost 3*1200=$3600.\nThat is it.",
            "calculations": ["3*1200=3600", "3600/1=3600.0"],
        },
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": ""}, "column 'question': must be text"),
        ({"question": None}, "column 'question': must be text, got 'None'"),
        ({"answer": 7}, "column 'answer': must be text"),
        ({"answer": "It is 7."}, "column 'answer': must end with '#### number', got 'It is 7.'"),
        ({"answer": "x\n#### seven"}, "must end with '#### number'"),
        ({"answer": "x\n#### 1,2,3"}, "must end with '#### number'"),
        ({"answer": "<<1+1=2>2\n#### 2"}, "a calculator annotation is not <<calculation=result>>"),
        ({"answer": "<<1+1>>2\n#### 2"}, "a calculator annotation is not"),
    ],
)
def test_malformed_rows_are_named_by_file_line_and_column(tmp_path, capsys, changes, message):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(json.dumps(ROW))
    bad.write_text(f"{json.dumps(ROW)}\n\n{json.dumps({**ROW, **changes})}\n")
    assert gsm8k.main([f"--train={good}", f"--test={bad}", f"--out={tmp_path / 'out'}"]) == 2
    said = capsys.readouterr().err
    assert f"{bad}, line 3: " in said and message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_line_says_where_the_dataset_is(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({**ROW, "question": f"{split}?"}))
    arguments = [f"--{split}={tmp_path}/{split}.jsonl" for split in ("train", "test")]
    command = [sys.executable, "-m", "data_pipelines.gsm8k", *arguments, f"--out={tmp_path}/out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "train: 1 problems, test: 1 problems" in done.stdout, done.stderr
    (task,) = sources.load_tasks(tmp_path / "out", "train")
    assert (task.prompt, task.answers, task.metadata["calculations"][0]) == ("train?", ("3600",), "3*1200=3600")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real GSM8K files are not in ../shared/data/gsm8k")
def test_the_real_files():
    """Every row is read, and its last calculation mostly gives the gold answer, which an answer equals exactly."""
    splits = {split: list(gsm8k.read(REAL / f"{split}.jsonl", split)) for split in ("train", "test")}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 7473, "test": 1319}
    rows = splits["train"] + splits["test"]
    assert rows[0]["answers"] == ["72"] and rows[0]["metadata"]["calculations"] == ["48/2=24", "48+24=72"]
    assert rows[345]["answers"] == ["1080"]  # written 1,080
    with_last = [row for row in rows if row["metadata"]["calculations"]]
    agree = [maths.equal(row["metadata"]["calculations"][-1].partition("=")[2], row["answers"][0]) for row in with_last]
    assert len(with_last) == 8792 - 113 and sum(agree) / len(agree) > 0.9
    assert not any("<<" in row["metadata"]["solution"] for row in rows)
