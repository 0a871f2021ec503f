"""A sweep: the right runs, one after another, resumable, and a table whose numbers can be checked by hand."""

import fcntl
import json
import math
import os
import pathlib
import shlex
import subprocess
import sys
import types
import xml.etree.ElementTree

import pytest

from jaxagent.config import ConfigError, flags, to_dict
from launch import grid, sweep, table

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/search_r1.py")


def test_grid_is_the_product_with_seeds_innermost(tmp_path):
    runs = grid.runs(CONFIG, ["rl.advantage=group_mean,gae", "config.rl.steps=5,6"], [0, 1], tmp_path)
    assert [(run.name, run.seed) for run in runs][:3] == [
        ("advantage=group_mean, steps=5", 0),
        ("advantage=group_mean, steps=5", 1),
        ("advantage=group_mean, steps=6", 0),
    ]
    assert len(runs) == 8 and len({run.workdir for run in runs}) == 8
    assert runs[0].command[2:] == (
        "jaxagent.main",
        f"--config={CONFIG}",
        "--config.rl.advantage=group_mean",
        "--config.rl.steps=5",
        "--config.seed=0",
        f"--config.workdir={tmp_path / 'advantage=group_mean_steps=5_seed=0'}",
    )


def test_presets_are_an_axis_and_equal_leaves_stay_apart(tmp_path):
    runs = grid.runs(CONFIG, ["preset=laptop,laptop-ppo"], [0], tmp_path)
    assert [run.command[3] for run in runs] == [f"--config={CONFIG}:laptop", f"--config={CONFIG}:laptop-ppo"]
    fields = ["rl.optimizer.learning_rate=1e-3", "rl.advantage.critic.optimizer.learning_rate=1e-2"]
    (run,) = grid.runs(f"{CONFIG}:laptop-ppo", fields, [0], tmp_path)
    assert run.name == "rl.optimizer.learning_rate=1e-3, rl.advantage.critic.optimizer.learning_rate=1e-2"


@pytest.mark.parametrize(
    "axis", ["rl.advantage", "rl.advantag=gae", "rl.advantage=gae,pop", "rl.kl.where=pop", "rl.steps=x"]
)
def test_a_mistake_ends_the_sweep_before_its_first_run(tmp_path, capsys, axis):
    with pytest.raises(ConfigError):
        grid.runs(CONFIG, [axis], [0], tmp_path)
    assert sweep.main([f"--config={CONFIG}", f"--grid={axis}", f"--workdir={tmp_path / 'w'}"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "w").exists()


def test_fixed_overrides_are_in_every_run_and_in_no_name(tmp_path, fake_runs):
    args = [
        f"--config={CONFIG}",
        "--grid=rl.objective.clip_high=0.2,0.3",
        f"--workdir={tmp_path}",
        "--config.rl.steps=2",
    ]
    assert sweep.main(args) == 0
    assert all("--config.rl.steps=2" in command for command in fake_runs) and len(fake_runs) == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "clip_high=0.2_seed=0",
        "clip_high=0.3_seed=0",
    ]


def test_a_finished_run_of_other_stages_is_not_taken_for_this_one(tmp_path, fake_runs, capsys):
    args = [f"--config={CONFIG}", f"--workdir={tmp_path}"]
    assert sweep.main([*args, "--config.stages=rl"]) == 0
    (tmp_path / "seed=0" / "config.json").write_text('{"stages": ["rl"]}')
    assert sweep.main([*args, "--config.stages=rl"]) == 0
    assert sweep.main([*args, "--config.stages=warm_start,rl"]) == 2
    assert "was made with stages=['rl'], not ['warm_start', 'rl']" in capsys.readouterr().err
    (tmp_path / "seed=0" / "config.json").write_text('{"stages": ["warm_start"]}')
    assert sweep.main([*args, "--config.stages=warm_start,rl"]) == 2
    (tmp_path / "seed=0" / "summary.json").unlink()  # as one that has taken over a shared run's stages
    assert sweep.main([*args, "--config.stages=warm_start,rl"]) == 0


def store(command) -> None:
    """The config.json that a run writes."""
    cfg = flags.parse_argv(["main", *command[3:]]).config.for_platform("cpu")
    path = pathlib.Path(cfg.workdir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_dict(cfg)))


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ([":laptop", "--config.rl.steps=20"], [":laptop"], "was made with rl.steps=20, not "),
        ([":laptop"], [":laptop+gspo"], "was made with rl.advantage.drop_zero_signal=True, not False"),
        ([":laptop"], [":laptop", "--config.eval.every=9"], "was made with eval.every="),
        ([":laptop", "--config.rl.kl=on", "--config.rl.kl.coefficient=0.1"], [":laptop"], "with rl.kl=on, not None"),
    ],
)
def test_a_run_of_another_config_is_not_taken_for_this_one(tmp_path, fake_runs, capsys, first, second, told):
    def call(args):
        return sweep.main([f"--config={CONFIG}{args[0]}", "--grid=rl.group_size=4", f"--workdir={tmp_path}", *args[1:]])

    assert call(first) == 0
    store(fake_runs[0])
    assert call(first) == 0 and call([*first, "--config.engine.tile_rows=0"]) == 0 and len(fake_runs) == 1
    assert call(second) == 2 and call([*second, "--table_only"]) == 2
    error = capsys.readouterr().err
    assert told in error and "use another --workdir" in error and len(fake_runs) == 1


def test_a_shared_run_and_what_took_it_over_may_differ_in_what_its_stages_do_not_read(tmp_path):
    def runs(*fixed):
        return grid.runs(CONFIG, ["rl.advantage=group_mean"], [0], tmp_path, "warm_start", fixed)

    (run,) = runs("--config.rl.steps=2")
    store(run.base.command)
    (tmp_path / "warm_start_0_seed=0/summary.json").write_text("{}")
    sweep.take_over(run.base.workdir, run.workdir)
    assert runs("--config.rl.steps=4", "--config.eval.every=9")
    for fixed in ("--config.warm_start.max_steps=7", "--config.model.mlp_dim=64"):
        with pytest.raises(ConfigError, match=r"was made with (warm_start\.max_steps|model\.mlp_dim)="):
            runs(fixed)
    store(run.command)
    assert runs("--config.rl.steps=2")
    with pytest.raises(ConfigError, match=r"was made with rl\.steps=2, not 4"):
        runs("--config.rl.steps=4")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "The following arguments are required: --config, --workdir."),
        (["--sedes=0"], "Unknown flag '--sedes=0'. Did you mean 'seeds'?"),
        (["--seeds=a"], "--seeds: must be a whole number, at least 0, got 'a'"),
        (["--seeds=0,0"], "name seed=0 twice"),
        (["--grid=rl.steps=1,1"], "name steps=1_seed=0 twice"),
        (["--grid=seed=0,1"], "--grid=seed: a sweep sets it itself, from --seeds."),
        (["--grid=config.workdir=a,b"], "--grid=workdir: a sweep sets it itself, from --workdir."),
        (["--config.seed=1"], "--config.seed: a sweep sets it itself, from --seeds."),
        (["--grid=rl.steps=1", "--config.rl.steps=2"], "rl.steps is both an axis of --grid and fixed"),
        (["--grid=rl.steps=1", "--grid=rl.steps=2"], "rl.steps is an axis of --grid twice"),
        (["--grid=rl.objective=sapo", "--config.rl.objective.name=gspo"], "is both an axis of --grid and fixed"),
        (
            ["--grid=rl.kl=none,on", "--config.rl.kl.coefficient=0.1"],
            "rl.kl=none and --config.rl.kl.coefficient contradict",
        ),
        (["--config.rl.stepz=2"], "Did you mean 'steps'?"),
        (["--config.rl.steps=-2"], "config.rl.steps must be at least 0"),
        (["--run_timeout_s=0"], "--run_timeout_s: must be a number, more than 0"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, fake_runs, capsys, args, message):
    given = [f"--config={CONFIG}", f"--workdir={tmp_path}", *args] if args else []
    assert sweep.main(given) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not fake_runs


def test_a_second_sweep_on_one_folder_is_refused(tmp_path, fake_runs, capsys):
    with open(tmp_path / ".lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweep.main([f"--config={CONFIG}", f"--workdir={tmp_path}"]) == 2
    assert "is being written by another process" in capsys.readouterr().err
    assert not fake_runs


def test_intervals_by_hand():
    mean, half = table.interval([0.5, 0.7])
    # sd = 0.1414, / sqrt(2) = 0.1, t(1) = 12.706
    assert (mean, half) == (pytest.approx(0.6), pytest.approx(1.2706))
    assert math.isnan(table.interval([0.5])[1])
    mean, half = table.interval([1.0, 2.0, 3.0])
    assert half == pytest.approx(4.303 / math.sqrt(3))


def test_a_chain_of_stages_is_measured_from_its_first_to_its_last():
    names = ("before_dpo", "after_dpo", "before_rl", "after_rl")
    summary = {f"eval/em_{name}": 0.1 * i for i, name in enumerate(names)} | {"eval/em_sampled_after_rl": 0.9}
    assert table._value(summary, "eval/em_before") == 0.0
    assert table._value(summary, "eval/em_after") == pytest.approx(0.3)
    assert table._value(summary, "eval/em_gain") == pytest.approx(0.3)
    assert table._value(summary, "eval/em_two_hop_after") is None
    assert table._value(summary, "eval/em_sampled_gain") is None


def test_a_kind_of_tasks_may_have_the_words_of_the_summary_in_its_name():
    summary = {"eval/em_before_rl": 0.1, "eval/em_day_after_tomorrow_before_rl": 0.2, "eval/em_after_rl": 0.3}
    summary["eval/em_day_after_tomorrow_after_rl"] = 0.4
    columns = table.columns_of([summary])
    assert columns[-1] == "eval/em_day_after_tomorrow_after" and "eval/em_day_after" not in columns
    assert table._value(summary, columns[-1]) == 0.4


def test_what_was_not_measured_is_no_number_of_the_table(tmp_path):
    failed = {"eval/em_before_rl": 0.5, "eval/em_after_sft": 0.6, "eval/em_after_rl": None}
    assert table._value(failed, "eval/em_after") is None  # not that of the stage before
    assert table._value(failed, "eval/em_gain") is None
    runs = [
        types.SimpleNamespace(name="a", summary=failed),
        types.SimpleNamespace(name="a", summary=failed | {"eval/em_after_rl": 0.8}),
        types.SimpleNamespace(name="b", summary=failed),
    ]
    text = table.write(runs, tmp_path)
    assert "| a | 2 | 0.500 ± 0.000 | 0.800 (1 of 2) | 0.300 (1 of 2) |" in text
    assert "| b | 1 | 0.500 | – | – |" in text
    xml.etree.ElementTree.parse(tmp_path / "sweep.svg")


@pytest.fixture
def fake_runs(monkeypatch):
    """Replaces the training command by one that writes a summary; returns the log of what was started."""
    started = []

    def run(program, *_):
        command = program.command
        started.append(command)
        workdir = pathlib.Path([a for a in command if "workdir" in a][-1].partition("=")[2])
        seed = int(next(a for a in command if "config.seed" in a).partition("=")[2])
        if "--config.rl.advantage=gae" not in command:  # it dies without a summary
            summary = {"eval/em_before_rl": 0.5, "eval/em_after_rl": 0.8 + 0.1 * seed}
            (workdir / "summary.json").write_text(json.dumps(summary))
        return types.SimpleNamespace(exit_code=lambda: 0, kill=lambda: None, close=lambda: None)

    monkeypatch.setattr(sweep, "Child", run)
    return started


def test_a_sweep_ends_in_a_table_and_a_plot_and_goes_on_where_it_stopped(tmp_path, fake_runs, capsys):
    args = [f"--config={CONFIG}", "--grid=rl.advantage=group_mean,gae", "--seeds=0,1", f"--workdir={tmp_path}"]
    assert sweep.main(args) == 1
    assert len(fake_runs) == 4
    text = (tmp_path / "sweep.md").read_text()
    # 0.8 and 0.9: mean 0.85, half width 12.706 * 0.0707 / 1.414 = 0.635
    assert "| advantage=group_mean | 2 | 0.500 ± 0.000 | 0.850 ± 0.635 |" in text
    assert "gae" not in text
    assert "advantage=gae_seed=0" in capsys.readouterr().err
    xml.etree.ElementTree.parse(tmp_path / "sweep.svg")
    assert (tmp_path / "sweep.csv").read_text().startswith("run,column,seeds,mean,half_width_95")
    sweep.main(args)
    assert len(fake_runs) == 6, "only the two unfinished runs start again"


def test_runs_that_differ_after_a_stage_share_it(tmp_path, fake_runs):
    args = [f"--config={CONFIG}", "--grid=rl.advantage=group_mean,leave_one_out", "--seeds=0,1", "--share=warm_start"]
    assert sweep.main([*args, f"--workdir={tmp_path}"]) == 0
    assert len(fake_runs) == 2 + 4
    base = fake_runs[0]
    assert base[-2:] == ("--config.stages=warm_start", f"--config.workdir={tmp_path / 'warm_start_0_seed=0'}")
    other = grid.runs(CONFIG, ["warm_start.max_steps=5,6"], [0], tmp_path, "warm_start")
    assert [run.base.workdir.name for run in other] == ["warm_start_0_seed=0", "warm_start_1_seed=0"]
    with pytest.raises(ConfigError, match="warm_start"):
        grid.runs(CONFIG, [], [0], tmp_path, "warm_stat")
    with pytest.raises(ConfigError, match="last stage"):
        grid.runs(CONFIG, [], [0], tmp_path, "rl")
    assert sweep.main([*args, "--slurm=", f"--workdir={tmp_path}"]) == 2


def test_a_shared_run_leaves_out_what_only_later_stages_read(tmp_path):
    dpo = f"{CONFIG}:laptop-dpo"
    runs = grid.runs(dpo, ["dpo.beta=0.1,0.2"], [0], tmp_path, "sample", ["--config.dpo.updates=7"])
    assert runs[0].base is runs[1].base
    command = runs[0].base.command
    assert flags.parse_argv(["main", *command[3:]]).config.dpo is None
    assert not [arg for arg in command if arg.startswith("--config.dpo.")]


def test_runs_share_a_stage_only_where_they_agree_on_what_it_reads_of_rl(tmp_path):
    dpo, field = f"{CONFIG}:laptop-dpo", "rl.sampling.temperature=0.9,1.0"
    assert len({run.base for run in grid.runs(dpo, [field], [0], tmp_path, "sample")}) == 2
    assert len({run.base for run in grid.runs(dpo, [field], [0], tmp_path, "warm_start")}) == 1
    assert len({run.base for run in grid.runs(dpo, ["rl.steps=1,2"], [0], tmp_path, "sample")}) == 1


def test_what_a_run_takes_over(tmp_path):
    base = tmp_path / "base"
    (base / "checkpoints" / "600").mkdir(parents=True)
    (base / "policy").mkdir()
    for name in ("summary.json", "metrics.jsonl", "log.txt"):
        (base / name).write_text("{}")
    sweep.take_over(base, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "metrics.jsonl"]
    assert (tmp_path / "run" / "checkpoints" / "600").exists()


def test_slurm_array(tmp_path, fake_runs):
    args = [f"--config={CONFIG}", "--grid=rl.steps=5,6", "--seeds=0,1", f"--workdir={tmp_path}"]
    assert sweep.main([*args, "--slurm=--gres=gpu:4 --time=8:00:00"]) == 0
    commands = (tmp_path / "commands.txt").read_text().splitlines()
    script = (tmp_path / "array.sbatch").read_text()
    assert [shlex.split(line)[-1] for line in commands][3].endswith("steps=6_seed=1")
    assert "#SBATCH --array=0-3" in script and "#SBATCH --gres=gpu:4\n#SBATCH --time=8:00:00" in script
    assert not fake_runs


def test_a_task_of_a_slurm_array_runs_its_line_or_fails(tmp_path):
    workdir = tmp_path / "my runs"
    workdir.mkdir()
    run = grid.Run((), 0, workdir / "seed=0", (sys.executable, "-c", "import sys; print(sys.argv)", "a b"))
    script = sweep.write_array([run], workdir, [])

    def task(number):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}
        return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60)

    assert task(0).stdout == "['-c', 'a b']\n"
    assert task(1).returncode != 0 and "command: is not in commands.txt" in task(1).stderr


@pytest.mark.parametrize("of_a_sweep", [False, True])
def test_what_slurm_signals_before_the_time_limit_is_the_run(tmp_path, of_a_sweep):
    """By default Slurm signals the steps of a job and not its batch shell, which is all that these jobs have."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\ntrap 'exit 143' TERM\necho $$\nwhile :; do sleep 0.05; done\n")
    python.chmod(0o755)
    script = ROOT / "launch" / "slurm.sh"
    if of_a_sweep:
        script = sweep.write_array([grid.Run((), 0, tmp_path / "seed=0", (str(python),))], tmp_path, [])
    assert "\n#SBATCH --signal=B:TERM@120\n" in script.read_text()
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "0"}
    with subprocess.Popen(["bash", script], env=environment, stdout=subprocess.PIPE, text=True) as batch_shell:
        try:
            assert int(batch_shell.stdout.readline()) == batch_shell.pid
            batch_shell.terminate()
            assert batch_shell.wait(timeout=60) == 143
        finally:
            batch_shell.kill()
