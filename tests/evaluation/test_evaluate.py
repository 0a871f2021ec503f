"""The command, end to end: the right weights, only what is missing is played, and every mistake is one line."""

import json
import pathlib
import shutil

import pytest

from configs import search_r1
from jaxagent import evaluate
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Verdict
from jaxagent.envs.search.environment import SearchAttempt
from jaxagent.observe import jsonl
from jaxagent.rollout.pass_at_k import pass_at_k
from jaxagent.runs.evaluation import policy
from tests import tiny_run

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/models/golden/qwen3-tied"  # of another shape
SAMPLED = ("--samples=4", "--k=1,4", "--tasks=4", "--seed=5")


def command(run: pathlib.Path, *flags: str) -> list[str]:
    return ["evaluate", f"--config.workdir={run}", *flags]


def said(capsys) -> dict:
    """The last line of stdout."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def attempts(out: pathlib.Path) -> dict:
    """By task and sample, without what depends on the clock."""
    rows = {(row["task"]["id"], row["sample"]): row for row in jsonl.read(out / "attempts.jsonl")}
    return {key: {name: value for name, value in row.items() if name != "metrics"} for key, row in rows.items()}


def results(out: pathlib.Path) -> dict:
    return json.loads((out / "evaluation.json").read_text())["results"]


async def by_length(self, transcript):
    """A verifier that a policy without any skill sometimes pleases, and that sometimes fails."""
    length = len(transcript.response)
    if length % 7 == 3:
        raise RuntimeError("the verifier is broken")
    return Verdict(float(length % 2), {"em": float(length % 2)})


def test_greedy_attempts_are_the_runs_own_last_evaluation(finished, tmp_path, capsys):
    """Text and log-probs of the same questions: of these weights and no others, from the bundle and from the export."""
    last = [row for row in tiny_run.episodes(finished, "rl.eval") if row["step"] == 4]
    own = {r["task"]["id"]: r["trajectories"][0] for r in last}
    texts = {row["task"]["id"]: row["text"] for row in last}
    logprobs = {task: t["logprobs"] for task, t in own.items()}
    for name in ("latest", str(finished / "policy")):
        out = tmp_path / name.replace("/", "_")
        assert evaluate.main(command(finished, "--greedy", f"--checkpoint={name}", f"--out={out}")) == 0
        rows = {task: row for (task, _), row in attempts(out).items()}
        assert {task: row["text"] for task, row in rows.items()} == texts and len(texts) == 8
        assert {task: row["trajectories"][0]["logprobs"] for task, row in rows.items()} == logprobs
        # The bundle's own step; the exported folder does not say it.
        versions = {v for row in rows.values() for v in row["trajectories"][0]["policy_versions"]}
        assert versions == ({v for t in own.values() for v in t["policy_versions"]} if name == "latest" else {0})
    assert said(capsys)["pass_at_k"]["1"]["interval"] == "wilson"


def test_only_missing_attempts_are_played(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SearchAttempt, "verify", by_length)
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert evaluate.main(command(finished, *SAMPLED, f"--out={whole}")) == 0
    first, table = said(capsys), results(whole)
    assert first["attempts_played"] == 16 == len(attempts(whole)) and 0 < first["failed"] == table["failed"]
    assert 0 < first["pass_at_k"]["1"]["mean"] < 1
    valid = [(t["n"], t["passed"]) for t in table["per_task"]]
    assert first["pass_at_k"]["1"]["mean"] == pytest.approx(sum(c / n for n, c in valid) / 4)
    at_4 = [pass_at_k(n, c, 4) for n, c in valid if n == 4]
    assert first["pass_at_k"]["4"]["too_few"] == 4 - len(at_4) > 0
    assert (whole / "evaluation.html").read_text().count("<svg") == 1

    # Killed in the middle: every second line is gone, and the last one is torn.
    half.mkdir()
    shutil.copy(whole / "evaluation.json", half)
    lines = (whole / "attempts.jsonl").read_bytes().splitlines(keepends=True)
    (half / "attempts.jsonl").write_bytes(b"".join(lines[::2]) + lines[1][:40])
    assert evaluate.main(command(finished, *SAMPLED, f"--out={half}")) == 0
    assert said(capsys)["attempts_played"] == 8
    assert attempts(half) == attempts(whole)
    assert results(half) == table

    # Everything is there: no weight is read, no engine started. Fewer samples are a part of what is there.
    before = (half / "attempts.jsonl").read_bytes()
    monkeypatch.setattr(policy, "load", None)
    assert evaluate.main(command(finished, "--samples=2", "--tasks=3", "--seed=5", f"--out={half}")) == 0
    again = said(capsys)
    assert (again["attempts_played"], again["tasks"], again["samples"]) == (0, 3, 2)
    assert (half / "attempts.jsonl").read_bytes() == before

    # Another seed, or a run whose newest checkpoint is another one, is another evaluation.
    assert evaluate.main(command(finished, "--samples=2", "--seed=6", f"--out={half}")) == 2
    assert f"'{half}' holds attempts with seed = 5, here it is 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint=77"], "has no checkpoint 77. There are: "),
        (["--checkpoint=policy_folder"], "no folder 'policy_folder'"),
        (["--config.model.mlp_dim=96"], "config.model.mlp_dim is 96, checkpoint"),
        (["--config.tokenizer.vocab_size=600"], "config.tokenizer.vocab_size is 600, checkpoint"),
        ([f"--checkpoint={GOLDEN}"], f"config.model is another model than {GOLDEN / 'config.json'}: "),
        (["--greedy", "--samples=3"], "greedy attempts at a task are all alike"),
        (["--temperature=1e-9"], "must be 0 (greedy) or at least 1e-06, got 1e-09"),
        (["--temperature=nan"], "must be a number, at least 0, got 'nan'"),
        (["--samples=4", "--k=8"], "--k=8 needs --samples=8 or more, got 4"),
        (["--k=0"], "must be a whole number, at least 1, got '0'"),
        (["--sampels=4"], "Unknown flag '--sampels=4'. Did you mean 'samples'?"),
        (["--config.modl.mlp_dim=96"], "Unknown config field 'config.modl'"),
        (["--split=test"], "--split: invalid choice: 'test'"),
    ],
)
def test_a_mistake_is_one_line(finished, capsys, flags, message):
    assert evaluate.main(command(finished, *flags)) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_no_run(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name, message in (("nowhere", "no such folder"), ("empty", "it has no config.json")):
        assert evaluate.main(command(tmp_path / name)) == 2
        assert message in capsys.readouterr().err
    assert evaluate.main(["evaluate", "--greedy"]) == 2
    assert "No run: say --config.workdir=RUN" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def lacks_fields(stored):
    del stored["engine"]["slots"], stored["data"]["eval_source"], stored["checkpoint"]


def of_a_module_that_is_not_there(stored):
    stored["env"] = {"name": "my_own_game_of_yesterday:Nim"}


def before_choices_had_constants(stored):
    stored["rl"] |= {"objective": "ppo_clip", "clip_low": 0.2}


OTHER = "config.json was written by another version of this code"


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            lacks_fields,
            (OTHER, "config.engine.slots", "config.data.eval_source", "config.checkpoint", "Say --"),
        ),
        (of_a_module_that_is_not_there, ("finds no module 'my_own_game_of_yesterday'", "PYTHONPATH")),
        (
            before_choices_had_constants,
            (f"{OTHER}: Unknown config field 'config.rl.clip_low'", "Say --config="),
        ),
    ],
)
def test_a_stored_config_that_cannot_be_read_is_one_line(tmp_path, capsys, change, messages):
    stored = search_r1.get_config().to_dict()
    change(stored)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert evaluate.main(command(tmp_path)) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages) and error.count("\n") == 1
    assert error.startswith(f"error: {tmp_path / 'config.json'}")
    assert ("another version" in error) == (change is not of_a_module_that_is_not_there)


def test_a_run_without_checkpoints(finished, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(finished / "config.json", run)
    shutil.copytree(finished / "policy", run / "policy")
    assert evaluate.main(command(run)) == 2
    assert (
        f"holds no complete checkpoint. Its exported policy: --checkpoint={run / 'policy'}" in capsys.readouterr().err
    )


def test_a_policy_with_another_tokenizer(finished, tmp_path, capsys):
    shutil.copytree(finished / "policy", tmp_path / "policy")
    Tokenizer.train(["a quick brown fox"] * 3, 300, ["<stop>"]).save(tmp_path / "policy")
    assert evaluate.main(command(finished, f"--checkpoint={tmp_path / 'policy'}")) == 2
    assert "is not the config's" in capsys.readouterr().err
