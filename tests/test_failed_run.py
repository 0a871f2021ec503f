"""A run whose episodes all fail says so, measures nothing, and stops."""

import asyncio
import contextlib
import io
import json
import pathlib
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from ml_collections import ConfigDict
from rich.console import Console

from configs.search_r1 import get_config
from jaxagent import config, evaluate
from jaxagent import main as cli
from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening
from jaxagent.envs.search.environment import SearchAttempt
from jaxagent.envs.search.retriever.base import RetrieverError
from jaxagent.observe import jsonl
from jaxagent.observe.progress import Progress
from jaxagent.rollout.groups import Failures
from jaxagent.rollout.workers import Workers
from jaxagent.runs import workdir as workdir_module
from jaxagent.runs.evaluation import held_out
from jaxagent.runs.stages import warm_start
from jaxagent.runs.stopping import Stopping
from jaxagent.runs.workdir import open_workdir
from jaxagent.types import Episode, Group, StopReason, Task
from tests import tiny_run

pytestmark = pytest.mark.slow  # whole runs, or what takes as long to prepare

DEAD = "RetrieverError: nobody listens on port 9"
ROOT = pathlib.Path(__file__).resolve().parents[1]


def episode(kind="one_hop/x", failed=True):
    if failed:
        return Episode(Task("t", "p", (), kind), 0, (), 0.0, {}, StopReason.ENV_ERROR, 0, error=DEAD)
    return Episode(Task("t", "p", (), kind), 0, (), 1.0, {"em": 1.0}, StopReason.ANSWER, 1, {"searches": 2.0})


@contextlib.contextmanager
def opened(workdir, **changes):
    """(run, its console so far)."""
    raw = get_config()
    raw.workdir = str(workdir)
    raw.update_from_flattened_dict(changes)
    out = io.StringIO()
    with (
        Stopping() as stopping,
        Progress(Console(file=out, width=300), 0.0) as progress,
        open_workdir(config.parse(raw), progress, stopping) as saved,
    ):
        yield saved, out


def parts(cfg, episodes):
    """What an evaluation needs, with these episodes as what is played."""
    groups = [Group(e.task, (e,)) for e in episodes]
    return types.SimpleNamespace(
        cfg=cfg,
        environment=types.SimpleNamespace(score="em", calls="searches", cost=""),
        heldout=[e.task for e in episodes],
        tokenizer=types.SimpleNamespace(token_bytes=lambda: []),
        rollout=lambda *arguments: None,
        workers=types.SimpleNamespace(collect=lambda *arguments: groups),
    )


def test_the_last_line_names_no_report_that_was_not_written(tmp_path, monkeypatch):
    def broken(*arguments):
        raise UnicodeDecodeError("ascii", b"x", 0, 1, "ordinal not in range(128)")

    with opened(tmp_path) as (saved, out):
        monkeypatch.setattr(workdir_module.report, "write_report", broken)
        saved.finish({})
    last = out.getvalue().splitlines()[-1]
    assert "summary.json" in last and "report" not in last and "report.html was not written" in out.getvalue()


def test_a_run_ends_without_the_card_that_cannot_be_written(tmp_path):
    """A certificate was torn."""
    with opened(tmp_path) as (saved, out):
        (tmp_path / "policy").mkdir()
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(saved.cfg)))
        (tmp_path / "replay").mkdir()
        (tmp_path / "replay/verify-rl.json").write_text('{"verdict": "pas')
        saved.finish({})
    assert "README.md was not written: JSONDecodeError" in out.getvalue() and (tmp_path / "report.html").is_file()


def test_steps_without_an_episode_that_counts_end_the_run(tmp_path):
    dead, half = Failures.of([episode()] * 8), Failures.of([episode(), episode(failed=False)])
    with opened(tmp_path, **{"env.max_failed_steps": 3}) as (saved, out):
        for step, failures in enumerate((dead, dead, half, dead, dead)):
            saved.failed.tell_step("rl", step, failures)
            assert not saved.terminating
            saved.end_if_asked(5)
        saved.failed.tell_step("rl", 5, dead)
        assert saved.terminating
        with pytest.raises(SystemExit) as stopped:
            saved.end_if_asked(5)
        assert saved.results["failed_episodes"] == {"rl": 41}
        assert saved.results["first_failure"] == f"rl, step 0: env_error: {DEAD}"
    text = str(stopped.value)  # Python prints it on stderr and exits with 1
    assert text.startswith("error: ") and "\n" not in text and DEAD in text and "saved" in text and "3 steps" in text
    # Once when everything failed, once when some did: not a line per step.
    assert [line for line in out.getvalue().splitlines() if "failed" in line] == [
        f"rl, step 0: 8 of 8 episodes failed: env_error: {DEAD}",
        f"rl, step 2: 1 of 2 episodes failed: env_error: {DEAD}",
    ]


def test_never_is_a_choice_and_another_reason_is_told_again(tmp_path):
    with opened(tmp_path, **{"env.max_failed_steps": 0}) as (saved, out):
        for step in range(9):
            saved.failed.tell_step("rl", step, Failures(8, 8, f"timeout: after {step} s"))
        saved.failed.tell_step("rl", 9, Failures(8, 8, "env_error: other"))
        assert not saved.terminating
    assert out.getvalue().count("episodes failed") == 2


def test_an_evaluation_of_nothing_is_null_and_nothing_begins_after_it(tmp_path):
    with opened(tmp_path) as (saved, out):
        saved.begin({}, types.SimpleNamespace(devices=np.zeros(0)))
        steps = saved.steps("rl", 4, lambda: (None, {}))
        next(steps)  # opens the logs
        with pytest.raises(SystemExit, match=DEAD):
            held_out.record_evaluation(parts(saved.cfg, [episode()] * 8), saved, None, "rl", 0, {})
        held_out.record_evaluation(parts(saved.cfg, [episode()] * 8), saved, None, "rl", 2, {})  # training has begun
        saved.results["eval/em_sampled_last_after_rl"] = 1.0  # of an evaluation that scored more
        mixed = [episode("two_hop/y"), episode(failed=False)]
        held_out.record_evaluation(parts(saved.cfg, mixed), saved, None, "rl", 4, {})
        steps.close()
        saved.finish({"seed": 0, **saved.results})
    _, dead, half = jsonl.read(tmp_path / "metrics.jsonl")
    scores = ("eval/em", "eval/em_sampled", "eval/em_one_hop", "eval/em/one_hop/x", "eval/searches")
    assert {name: dead[name] for name in scores} == dict.fromkeys(scores)
    assert (dead["eval/n"], dead["eval/failed"], dead["eval/failed_sampled"]) == (8.0, 8.0, 8.0)
    assert (half["eval/em"], half["eval/em_two_hop"], half["eval/searches"]) == (1.0, None, 2.0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval/em_before_rl"] is None and summary["eval/em_two_hop_after_rl"] is None
    assert "eval/em_sampled_last_after_rl" not in summary
    assert summary["failed_episodes"] == {"rl.eval": 34} and DEAD in summary["first_failure"]
    lines = out.getvalue().splitlines()
    assert f"rl.eval, step 0: 16 of 16 episodes failed: env_error: {DEAD}" in lines
    assert any("eval/em -" in line and "eval/failed 8" in line for line in lines)
    page = (tmp_path / "report.html").read_text()
    assert "34" in page and "nobody listens" in page


def test_a_gate_stays_shut_for_a_kind_that_was_not_measured(tmp_path):
    with opened(tmp_path) as (saved, _):
        metrics, failures = warm_start.gate(parts(saved.cfg, [episode("one_hop/y"), episode(failed=False)]), None, [])
        assert metrics["gate/mean_accuracy"] == metrics["gate/x"] == 1.0
        assert metrics["gate/worst_accuracy"] is metrics["gate/y"] is None
        assert failures == Failures(1, 2, f"env_error: {DEAD}")


@pytest.mark.parametrize("after", [None, 0.9])
def test_the_check_of_a_summary_needs_measurements(tmp_path, after):
    scores = {"em_before_rl": 0.4, "em_after_rl": after, "em_sampled_before_rl": 0.4, "em_sampled_after_rl": 0.9}
    summary = {f"eval/{name}": value for name, value in scores.items()}
    summary |= {"eval/n": 256, "logprob_gap_max": 0.0, "compiles_after_warmup": 0, "first_failure": DEAD}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    command = [sys.executable, str(ROOT / ".ci/check_summary.py"), str(tmp_path / "summary.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (after is not None)
    assert "Traceback" not in done.stderr and (after is not None or DEAD in done.stderr)


def test_a_run_that_goes_on_into_nothing_but_failures(finished, tmp_path, monkeypatch, capsys):
    """It saves, stops with the reason, and goes on when that is mended."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    flags = ("--config.rl.steps=7", "--config.eval.every=0", "--config.checkpoint.every=0")
    with monkeypatch.context() as broken:
        broken.setattr(SearchAttempt, "verify", _broken)
        with pytest.raises(SystemExit, match=r"2 steps in a row .* 8 of 8 episodes failed: env_error: .*crashed"):
            cli.main(tiny_run.argv(run, *flags, "--config.env.max_failed_steps=2"))
    assert capsys.readouterr().out.count("8 of 8 episodes failed") == 1
    records = list(jsonl.read(run / "metrics.jsonl"))
    assert [r["step"] for r in records if r["stage"] == "rl"] == [0, 1, 2, 3, 4, 5, 6]
    for record in records[-2:]:
        assert record["reward/mean"] is record["episode/turns"] is None and record["stop/env_error"] == 1.0
    assert cli.main(tiny_run.argv(run, *flags)) == 0
    last = list(jsonl.read(run / "metrics.jsonl"))[-1]
    assert last["step"] == 7 and last["reward/mean"] is not None and last["eval/em"] is not None
    summary = json.loads((run / "summary.json").read_text())
    assert summary["failed_episodes"] == {"rl": 16} and "crashed" in summary["first_failure"]


async def _broken(self, transcript):
    raise RuntimeError("the verifier crashed")


def test_an_evaluation_of_which_every_attempt_fails_is_an_error(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SearchAttempt, "verify", _broken)
    flags = ["evaluate", f"--config.workdir={finished}", "--greedy", f"--out={tmp_path}"]
    assert evaluate.main(flags) == 1
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert "all 8 attempts failed" in line and "the verifier crashed" in line and "--retry_failed" in line
    found = json.loads(said.out.splitlines()[-1])
    assert found["pass_at_k"] == {"1": None} and (found["attempts"], found["failed"]) == (8, 8)
    assert "8 of 8 attempts failed, most of them: env_error: RuntimeError: the verifier crashed" in said.out
    monkeypatch.undo()
    assert evaluate.main([*flags, "--retry_failed"]) == 0


@pytest.mark.parametrize("failure", [TimeoutError(), RetrieverError("http://x:1/retrieve answered 500: no"), None])
def test_the_search_engine_is_asked_at_start(tmp_path, monkeypatch, failure):
    """One that never answers, one that fails, and one that finds nothing, which is an answer."""

    class Engine:
        async def search(self, queries, topk):
            if isinstance(failure, TimeoutError):
                await asyncio.Event().wait()
            if failure is not None:
                raise failure
            return [[] for _ in queries]

        async def close(self):
            pass

    raw = get_config()
    raw.env.retriever = ConfigDict({"name": "http", "url": "http://x:1/retrieve"})
    monkeypatch.setattr("jaxagent.envs.search.retriever.backends.HttpConfig.open", lambda *arguments: Engine())
    monkeypatch.setattr("jaxagent.envs.search.retriever.base.TRY_TIMEOUT_S", 0.05)
    with Workers(1) as workers:
        here = Opening(tmp_path, [Task("t", "Who?", ("me",))], workers.run, print)
        refused = pytest.raises(ConfigError, match="http://x:1/retrieve") if failure else contextlib.nullcontext()
        with refused, config.parse(raw).env.open(here):
            pass
