"""The pace of a run: by formula, and from what a workdir holds."""

import dataclasses
import json

import numpy as np
import pytest

from configs import search_r1
from jaxagent.config import parse, to_dict
from jaxagent.plan import costs, measured
from jaxagent.plan.chips import Chip
from jaxagent.plan.measured import NotMeasuredError
from jaxagent.plan.pace import Pace, estimated
from jaxagent.runs import record
from jaxagent.types import Episode, Group, StopReason, Task, Trajectory
from tests.replay import forging

FORMULA = Pace(0.01, 0.001, 1e-4, 5.0, (((1.0, 0.0),),), False, ())
# One process: 10 dispatches of 4 steps and 100 tokens were 0.5 s by formula, and took 2.
ENGINE = {"engine/dispatches": 10, "engine/decode_s": 1.5, "engine/prefill_s": 0.5, "engine/sampled_tokens": 100}
ROW = {"stage": "rl", "time/rollout_s": 4.0, "time/learn_s": 6.0, "episode/count": 8, "episode/action_tokens": 30.0}
ROW |= {"episode/turns": 2.0, "episode/total_s": 9.0, "episode/engine_s": 3.0, "episode/decode_s": 2.0}


def config(workdir):
    raw = search_r1.get_config()
    raw.workdir = str(workdir)
    raw.engine.update(steps_per_dispatch=4)
    return parse(raw)


def run(workdir, *rows, **changed):
    """A workdir with these metrics, of a config with these sections changed."""
    cfg = config(workdir)
    lines = [json.dumps(row | {"step": i}) + "\n" for i, row in enumerate(rows)]
    (workdir / "metrics.jsonl").write_text("".join(lines))
    (workdir / "config.json").write_text(json.dumps(to_dict(cfg) | changed))
    (workdir / "run.json").write_text(json.dumps({"starts": [{"devices": ["8 x abacus"]}]}))
    return cfg


def test_one_process(tmp_path):
    first = ROW | ENGINE | {"time/learn_s": 500.0, "engine/decode_s": 900.0}
    found = measured.measured(run(tmp_path, first, ROW | ENGINE, {"stage": "rl", "step": 9}), FORMULA)
    assert (found.decode_s, found.sequence_s, found.prefill_s) == pytest.approx((0.04, 0.004, 4e-4))
    assert found.update_s == pytest.approx(6.0 / (8 * 30)), "and not the first step's, which compiles"
    assert found.waits_known and found.episodes == (((15.0, 3.0), (15.0, 3.0)),)
    assert "measured in 1 steps" in found.sources[0] and "8 x abacus" in found.sources[0]
    assert "mean" in found.sources[1], "no step is recorded"


def test_a_fleet_has_no_counters_of_one_engine():
    row = ROW | {"fleet/engines": 2.0, "episode/count": 40}
    # 40 episodes decoded for 2 s each, in 2 engines and 10 s: 4 at once, so 30 tokens by formula take 30 * 0.014 s.
    assert measured.slower(row, 4, FORMULA) == pytest.approx(2.0 / (30 * 0.014))


def test_lengths_and_waits_are_those_of_recorded_episodes(tmp_path):
    kinds = np.array([0, 1, 1, 2, 1], np.uint8)
    sampled = np.zeros(5, np.float32)
    versions = np.where(kinds == 1, 0, -1).astype(np.int32)
    one = Trajectory(np.arange(5, dtype=np.int32), kinds, sampled, versions, np.array([0, 0, 0, 0, 1], np.int32))
    task, times = Task("t", "p", ("a",)), {"total_s": 5.0, "engine_s": 1.0}
    episodes = [Episode(task, i, (one,) * (1 + i), 1.0, {}, StopReason.ANSWER, 2, times) for i in range(3)]
    cfg = run(tmp_path, ROW | ENGINE, ROW | ENGINE)
    folder = tmp_path / "record" / "rl"
    folder.mkdir(parents=True)
    step = record.RecordedStep(3, "c", "", "a", "b", "", "", ((Group(task, tuple(episodes)),),))
    forging.write(folder, step)
    found = measured.measured(cfg, FORMULA)
    assert found.episodes[0] == ((2.0, 2.0), (1.0, 2.0)) and found.episodes[1] == ((2.0, 1.0), (1.0, 1.0)) * 2
    assert found.sources[1].endswith("3 episodes of step 3")
    assert [episode.sample for episode in record.some(folder, 3, 2)] == [0, 2]


def test_programs_behind_the_gateway_wait_when_they_ask_nothing():
    times = {"total_s": 9.0, "queue_s": 1.0, "prefill_s": 2.0, "decode_s": 3.0}
    assert measured.waited_s(times) == 3.0 and measured.waited_s(times | {"engine_s": 8.0}) == 1.0
    assert measured.waited_s(times | {"total_s": 5.0}) == 0.0, "requests that overlapped"


def test_other_settings_have_other_times(tmp_path):
    row = ROW | ENGINE
    engine = to_dict(config(tmp_path))["engine"]
    with pytest.raises(NotMeasuredError, match=r"another config\.engine"):
        measured.measured(run(tmp_path, row, row, engine=engine | {"slots": 1}), FORMULA)
    rl = to_dict(config(tmp_path))["rl"]
    cfg = run(tmp_path, row, row, rl=rl | {"epochs": 7, "tasks_per_step": 1, "steps": 3})
    assert measured.measured(cfg, FORMULA).sources[-1].startswith("that run differs in rl.epochs, which")


def test_what_cannot_be_read_is_no_measurement(tmp_path):
    with pytest.raises(NotMeasuredError, match="no metrics of two trained steps"):
        measured.measured(config(tmp_path), FORMULA)
    with pytest.raises(NotMeasuredError, match="no metrics of two trained steps"):
        measured.measured(run(tmp_path, ROW | ENGINE, {"stage": "warm_start"}), FORMULA)
    old = {name: ROW[name] for name in ROW if name != "episode/total_s"} | ENGINE
    with pytest.raises(NotMeasuredError, match=r"cannot be read \(KeyError: 'total_s'\)"):
        measured.measured(run(tmp_path, old, old), FORMULA)
    cfg = run(tmp_path, ROW | ENGINE, ROW | ENGINE)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(NotMeasuredError, match="cannot be read"):
        measured.measured(cfg, FORMULA)


def test_by_formula_a_step_costs_what_the_plan_says(tmp_path):
    cfg = config(tmp_path)
    work = costs.Work(10, 40, 20, 1, 1, 1, 0.0, 0.0, 0.0, decode_flops=800.0, decode_steps=40)
    times = costs.Times(train_s=3.0, score_s=1.0, prefill_s=2.0, decode_s=0.0, decode_step_s=0.0)
    chip = Chip(1e4, 1e9, 1e9, 0.5, 0.5, 0.5, dispatch_s=0.4)
    found = estimated(cfg, work, times, (0.01, 0.002), chip)
    assert found.decode_s == pytest.approx(0.01 + 0.4 / 4)
    assert found.sequence_s == pytest.approx(0.002 + 2.0 / 400), "2 FLOPs a token are nothing"
    slow = estimated(cfg, dataclasses.replace(work, decode_flops=8e5), times, (0.01, 0.002), chip)
    assert slow.sequence_s == pytest.approx(2000 / 5e3 + 2.0 / 400), "no memory is as slow as 2,000 FLOPs"
    assert found.prefill_s == pytest.approx(2.0 / 200) and found.update_s == pytest.approx(4.0 / 400)
    assert len(found.episodes) == 1 and sum(tokens for tokens, _ in found.episodes[0]) == pytest.approx(40)
    assert not found.waits_known and len(found.episodes[0]) == cfg.env.most_turns
