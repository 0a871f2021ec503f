"""Bad input reaches the user as one clear line and exit code 2, before any training."""

import fcntl
import json
import pathlib

import pytest

from jaxagent import main as cli
from jaxagent.observe import jsonl
from tests import tiny_run

GOLDEN = pathlib.Path(__file__).parent / "models" / "golden"


def refused(capsys, workdir: pathlib.Path, *flags: str) -> str:
    """The error line of a run that must not start."""
    assert cli.main(tiny_run.argv(workdir, *flags)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert not list(jsonl.read(workdir / "metrics.jsonl"))
    return line


def write(folder: pathlib.Path, split: str, rows: list) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def task(number: int, **changes) -> dict:
    return {"id": str(number), "prompt": "Who?", "answers": ["me"]} | changes


def test_missing_data(tmp_path, capsys):
    assert "nowhere" in refused(capsys, tmp_path / "run", f"--config.data.source={tmp_path / 'nowhere'}")


def test_malformed_row_names_file_row_and_column(tmp_path, capsys):
    write(tmp_path / "data", "train", [task(0), task(1, answers={"a": 3})])
    write(tmp_path / "data", "test", [task(2)])
    line = refused(capsys, tmp_path / "run", f"--config.data.source={tmp_path / 'data'}")
    assert "train.jsonl" in line and "line 2" in line and "'answers'" in line


def test_malformed_demonstration(tmp_path, capsys):
    for name in ("curriculum", "full"):
        write(tmp_path / "demos", name, [{"prompt": "x", "turns": [{"action": "<answer> y</answer>"}]}])
    line = refused(capsys, tmp_path / "run", f"--config.warm_start.demonstrations={tmp_path / 'demos'}")
    assert "curriculum.jsonl" in line and "row 1" in line and "turns[0].observation" in line


def test_one_file_of_demonstrations(tmp_path, capsys):
    """It holds whole episodes: without a curriculum it is read (and told where it is wrong), with one it is refused."""
    row = {"prompt": "x", "turns": [{"action": "", "observation": ""}]}
    (tmp_path / "demos.jsonl").write_text(json.dumps(row) + "\n")
    flags = (f"--config.warm_start.demonstrations={tmp_path / 'demos.jsonl'}", "--config.warm_start.curriculum_steps=")
    assert "curriculum=none" in refused(capsys, tmp_path / "run", flags[0], flags[1] + "1")
    line = refused(capsys, tmp_path / "run", flags[0], flags[1] + "0")
    assert "demos.jsonl, row 1: column 'turns[0].action' is empty" in line


def test_a_model_folder_that_is_not_there(tmp_path, capsys):
    line = refused(capsys, tmp_path / "run", f"--config.model.path={tmp_path / 'smollm2'}")
    assert f"'{tmp_path / 'smollm2'}' does not exist" in line
    assert "python -m jaxagent.data_pipelines.smollm2 --out=" in line


def test_a_stage_is_run_once(tmp_path, capsys):
    assert "names 'rl' twice" in refused(capsys, tmp_path / "run", "--config.stages=rl,warm_start,rl")


def test_adapters_are_trained_last(tmp_path, capsys):
    flags = ("--config.stages=warm_start,rl,rft", "--config.model.lora.rank=2")
    assert "'rl' must be the last stage" in refused(capsys, tmp_path / "run", *flags)


@pytest.mark.parametrize(
    ("env", "source", "own"),
    [("terminal", "search", ()), ("python", "search", ("--config.env.judge=tests",)), ("search", "coding", ())],
)
def test_tasks_of_another_family_are_refused(tmp_path, capsys, env, source, own):
    made = ["--config.data.source=fixes"] if source == "coding" else []
    line = refused(capsys, tmp_path / "run", f"--config.env={env}", *own, *made, "--config.stages=rl")
    assert f"makes tasks for the environment '{source}', and config.env is '{env}'" in line


def test_a_second_process_on_one_workdir_changes_nothing(tmp_path, capsys):
    """Least of all what the first is writing just now: a bundle without its final name."""
    half = tmp_path / "run/checkpoints/5.orbax-checkpoint-tmp-1"
    half.mkdir(parents=True)
    with open(tmp_path / "run/.lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "is being written by another process" in refused(capsys, tmp_path / "run")
    assert half.is_dir()


@pytest.mark.parametrize(
    ("workdir", "why"), [("file", "File exists"), ("file/run", "Not a directory"), ("/proc/run", "No such file")]
)
def test_a_workdir_that_cannot_be_made(tmp_path, capsys, workdir, why):
    (tmp_path / "file").write_text("")
    assert cli.main(tiny_run.argv(tmp_path / workdir)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: Cannot use '{tmp_path / workdir}") and why in line


def test_a_corpus_that_is_not_utf8(tmp_path, capsys):
    (tmp_path / "corpus.jsonl").write_bytes('{"id": "1", "contents": "Café"}\n'.encode("latin-1"))
    line = refused(capsys, tmp_path / "run", f"--config.env.retriever.corpus={tmp_path / 'corpus.jsonl'}")
    assert "corpus.jsonl, row 1: not JSON" in line


def test_a_dataset_that_cannot_be_opened(tmp_path, capsys):
    write(tmp_path / "data", "test", [task(2)])
    (tmp_path / "data" / "train.jsonl").symlink_to("train.jsonl")
    line = refused(capsys, tmp_path / "run", f"--config.data.source={tmp_path / 'data'}")
    assert line == f"error: Cannot use '{tmp_path / 'data' / 'train.jsonl'}': Too many levels of symbolic links."


@pytest.mark.slow
def test_a_search_engine_that_is_down(tmp_path, capsys):
    url = "http://127.0.0.1:9/retrieve"
    flags = ("--config.env.retriever=http", f"--config.env.retriever.url={url}")
    line = refused(capsys, tmp_path / "run", *flags)
    assert "env.retriever" in line and url in line


@pytest.mark.slow
def test_prompts_without_room_for_a_turn(tmp_path, capsys):
    line = refused(capsys, tmp_path / "run", "--config.env.context_tokens=8")
    assert "env.context_tokens=8 has no room" in line and "of 8 held-out prompts" in line


def test_a_curriculum_over_too_few_tasks_is_told_before_the_warm_start(tmp_path, capsys):
    flags = ("--config.rl.curriculum=failed", "--config.rl.tasks_per_step=100000")
    assert "rl.curriculum draws 100000 different tasks" in refused(capsys, tmp_path / "run", *flags)


@pytest.mark.parametrize(
    "flag", ["sampling.top_p=0.9", "sampling.temperature=0", "sampling.temperature=9e-7", "temperature.final=1e-9"]
)
def test_truncated_sampling_cannot_be_trained(tmp_path, capsys, flag):
    assert f"rl.{flag.partition('.')[0]}" in refused(capsys, tmp_path / "run", f"--config.rl.{flag}")


@pytest.mark.slow
def test_tokenizer_larger_than_the_model(tmp_path, capsys):
    shape = [f"--config.model.{name}=0" for name in ("num_layers", "embed_dim", "num_heads", "num_kv_heads")]
    shape += ["--config.model.head_dim=0", "--config.model.mlp_dim=0", "--config.model.family="]
    first = tmp_path / "first"
    flags = ("--config.stages=rl", "--config.rl.steps=0", "--config.data.num_eval=2")
    assert cli.main(tiny_run.argv(first, *flags)) == 0  # leaves a tokenizer of 512 tokens
    capsys.readouterr()
    line = refused(
        capsys,
        tmp_path / "run",
        f"--config.model.path={GOLDEN / 'qwen3-tied'}",
        f"--config.tokenizer.path={first / 'tokenizer'}",
        *shape,
    )
    assert "512 tokens" in line and "vocabulary" in line


def test_a_mesh_that_does_not_divide(tmp_path, capsys):
    assert "mesh" in refused(capsys, tmp_path / "run", "--config.mesh.tensor=3")
