"""The command line: what is asked for is what runs, and every mistake is one line and exit code 2."""

import errno
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import types
from unittest import mock

import pytest

from jaxagent import __version__, evaluate
from jaxagent import main as cli
from jaxagent.__main__ import COMMANDS
from jaxagent.config import MODEL_SHAPE, Config, ConfigError, errors, flags
from jaxagent.config.command import Parser
from jaxagent.runs.stopping import Stopped

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = "--config=" + str(ROOT / "configs/search_r1.py")


@pytest.fixture
def runs(monkeypatch):
    """Configs that reached the loop, which is replaced."""
    seen: list[Config] = []
    module = types.ModuleType("jaxagent.loop")
    module.run = seen.append
    monkeypatch.setitem(sys.modules, "jaxagent.loop", module)
    monkeypatch.setattr("jaxagent.loop", module, raising=False)
    monkeypatch.setattr("jaxagent.runs.devices.provide", lambda mesh, exact: None)
    return seen


def test_overrides_reach_the_loop(runs):
    args = "--config.workdir=/x --config.seed=7 --config.rl.objective.clip_low=1"
    args += " --config.engine.prefill_tokens=512 --config.stages=rl"
    code = cli.main(["main", CONFIG, *args.split()])
    (config,) = runs
    assert code == 0
    assert (config.workdir, config.seed, config.rl.objective.clip_low) == ("/x", 7, 1.0)
    assert config.engine.prefill_tokens == 512
    assert config.stages == ("rl",)


def test_the_loop_gets_the_sizes_that_suit_the_devices(runs):
    assert cli.main(["main", CONFIG + ":qwen2.5-3b", "--config.engine.tile_rows=96"]) == 0
    engine = runs[0].engine
    assert (engine.tile_rows, engine.steps_per_dispatch, engine.prefill_tokens) == (96, 4, 4096)  # a CPU's


@pytest.mark.parametrize("value", ["warm_start,rl", "('warm_start','rl')", "warm_start,rl,"])
def test_stages_are_a_list_with_commas(runs, value):
    assert cli.main(["main", CONFIG + ":qwen2.5-3b", f"--config.stages={value}"]) == 0
    assert runs[0].stages == ("warm_start", "rl")


def test_of_a_flag_given_twice_the_last_counts(runs):
    flags = ["--config.stages=warm_start", "--config.seed=1", "--config.stages=rl", "--config.seed=2"]
    assert cli.main(["main", CONFIG, *flags]) == 0
    assert runs[0].stages == ("rl",) and runs[0].seed == 2


def test_a_given_model_brings_its_own_shape(runs):
    """And a shape that is given beside it stays a demand, which the folder must meet."""
    flags = ["--config.model.path=folder", "--config.model.num_layers=30"]
    assert cli.main(["main", CONFIG, *flags]) == 0
    model = runs[0].model
    assert {field: getattr(model, field) for field in MODEL_SHAPE} == {
        "family": "", "num_layers": 30, "embed_dim": 0, "num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "mlp_dim": 0,
        "settings": None,
    }  # fmt: skip
    assert cli.main(["main", CONFIG]) == 0 and runs[1].model.num_layers == 3 and runs[1].model.family == "qwen3"
    assert cli.main(["main", CONFIG, "--config.model.path="]) == 0 and runs[2].model == runs[1].model
    assert cli.main(["main", f"{CONFIG}:smollm2"]) == 0 and runs[3].model.path == "runs/smollm2"
    assert not any(getattr(runs[3].model, field) for field in MODEL_SHAPE)


def test_every_name_of_another_trainer_s_is_a_field_of_ours():
    known = {field.path for field in flags.fields()}
    assert {f"config.{ours}" for ours in errors._OURS.values()} <= known


@pytest.mark.parametrize("spelled", ["~/x", "~"])
def test_a_path_from_home_is_found(runs, monkeypatch, tmp_path, spelled):
    """bash leaves "~" behind "=" as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    home = spelled.replace("~", str(tmp_path))
    paths = ("workdir", "model.path", "data.source", "data.eval_source", "warm_start.demonstrations")
    assert (
        cli.main(["main", CONFIG, *(f"--config.{field}={spelled}" for field in paths), "--config.stages=warm_start"])
        == 0
    )
    (config,) = runs
    assert {config.workdir, config.model.path, config.data.source.path, config.data.eval_source} == {home}
    assert config.warm_start.demonstrations == home
    (tmp_path / "mine.py").write_text((ROOT / "configs/search_r1.py").read_text(encoding="utf-8"))
    assert cli.main(["main", "--config=~/mine.py:laptop"]) == 0


def test_config_path_after_a_space(runs):
    assert cli.main(["main", "--config", CONFIG.removeprefix("--config=")]) == 0
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([CONFIG, "--config.rl.stepz=3"], "Unknown config field 'config.rl.stepz'. Did you mean 'steps'?"),
        ([CONFIG, "--config.rll.steps=3"], "Unknown config field 'config.rll'. Did you mean 'rl'?"),
        ([CONFIG, "--config.rl.steps=abc"], "config.rl.steps must be int, got 'abc'."),
        (
            [CONFIG, "--config.rl.kl.where=los"],
            "config.rl.kl.where must be one of 'loss', 'reward', 'advantage', 'objective', got 'los'. "
            "Did you mean 'loss'?",
        ),
        (
            [CONFIG, "--config.stages=warm_start,rll"],
            "'dpo', 'outcome_model', 'opd', 'rl', got 'rll'. Did you mean 'rl'?",
        ),
        ([CONFIG, "--config.stages=(1)"], "config.stages must be a sequence, got '(1)'."),
        ([CONFIG, "--config.stages=[{[]}]"], "config.stages must be a sequence, got '[{[]}]'."),
        (
            [CONFIG, "--config.rl.kl.coefficient=0.1", "--config.rl.kl=none"],
            "--config.rl.kl=none and --config.rl.kl.coefficient contradict each other: leave one out.",
        ),
        ([CONFIG, "--config.data.source="], "config.data.source is empty: name a folder or a file of tasks."),
        ([CONFIG, "--config.=3"], "'--config.=3' names no field: fields are set as --config.section.field=value."),
        ([CONFIG, "--config.rl=3"], "'config.rl' is a section"),
        ([CONFIG, "--config.rl.steps.x=3"], "'config.rl.steps' is a value"),
        ([CONFIG, "--config.rl.lr=1"], "'config.rl.lr'. It is called 'config.rl.optimizer.learning_rate' here."),
        ([CONFIG, "--config.beta=1"], "'config.beta'. It is called 'config.rl.kl.coefficient' here."),
        ([CONFIG, "--config.num_generations=8"], "It is called 'config.rl.group_size' here."),
        ([CONFIG, "--config.rl.max_completion_length=8"], "It is called 'config.env.turn_tokens' here."),
        ([CONFIG, "--config.warm_start.optimizer.lr=1"], "Did you mean 'learning_rate'?"),
        (
            [CONFIG, "--config.fleet=true"],
            "'config.fleet' is a section: say --config.fleet=on for its defaults, or set",
        ),
        ([CONFIG, "--config.env=my_env.MyAgent"], "A class of yours is written 'my_env:MyAgent'."),
        ([CONFIG, CONFIG], "--config is given 2 times"),
        ([CONFIG, "--config", "configs/toolrl.py"], "--config is given 2 times"),
        ([CONFIG, "--dry_runn"], "Unknown flag '--dry_runn'. Did you mean 'dry_run'?"),
        ([CONFIG, "--dry_run=maybe"], "--dry_run must be bool, true or false, got 'maybe'."),
        (["--config"], "No config: say --config=FILE"),
        ([CONFIG, "rl.steps=3"], "Unexpected argument 'rl.steps=3'"),
        ([CONFIG, "--dry_run", "--dry_run_chip=h20"], "Unknown chip 'h20'. Did you mean 'h200'?"),
        ([CONFIG.replace("search_r1", "serch_r1")], "does not exist. Did you mean"),
        (["--config.seed=1"], "No config"),
        ([f"{CONFIG}:laptp"], "error: configs/search_r1.py has no preset 'laptp'. Did you mean 'laptop'?\n"),
        ([f"{CONFIG}:laptop+grpp", "--config.seed=1"], "error: No published algorithm 'grpp'. Did you mean 'grpo'?\n"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(runs, capsys, args, message):
    assert cli.main(["main", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not runs


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config():\n    return 1 / 0\n", "bad.py:2: ZeroDivisionError"),
        ("import nothing_of_this_name\n", "bad.py:1: ModuleNotFoundError"),
        ("def get_config():\n    x ==== 3\n", "bad.py: SyntaxError: invalid syntax (bad.py, line 2)"),
        ("def get_config():\n    raise ValueError('one\\ntwo')\n", "bad.py:2: ValueError: one two"),
        ("def get_config():\n    open('/nowhere/x')\n", "bad.py:2: FileNotFoundError"),
        ("x = 1\n", "defines no get_config()"),
        ("def get_config():\n    return {'seed': 1}\n", "bad.py"),
        (
            "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'seed': 1})\n",
            "is missing",
        ),
    ],
)
@pytest.mark.parametrize("overrides", [[], ["--config.seed=1"]])
def test_a_broken_config_file_is_named(runs, monkeypatch, capsys, tmp_path, source, message, overrides):
    (tmp_path / "bad.py").write_text(source)
    assert cli.main(["main", f"--config={tmp_path / 'bad.py'}", *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_and_mistakes_load_no_jax():
    code = (
        "import sys; from jaxagent import evaluate, main; main.main(['main', '--helpfull']);"
        "evaluate.main(['evaluate', '--help']);"
        f"assert main.main(['main', '{CONFIG}', '--config.rl.group_size=0']) == 2;"
        "slow = {'jax', 'flax', 'grain', 'orbax', 'transformers', 'tensorflow_datasets'} & set(sys.modules);"
        "sys.exit(f'imports {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "error: config.rl.group_size must be at least 1, got 0.\n"
    for text in ("--config.seed", "--config.rl.kl.coefficient", "--config.env.retriever.topk", "--checkpoint"):
        assert text in done.stdout


def test_help_shows_ranges_and_meanings_and_the_values_of_a_config(capsys):
    assert cli.main(["main", CONFIG, "--config.rl.steps=3", "--helpfull"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  --config.")}
    assert " int, at least 0: each plays " in lines["--config.rl.steps=3"]
    assert lines["--config.rl.sampling.temperature=1.0"].endswith(" float, at least 0: 0 = greedy")
    assert lines["--config.rl.batch.row_tokens=256"].endswith("of one packed row")
    assert lines["--config.rl.kl=None"].endswith("none|on: KL to a reference policy.")
    assert cli.main(["main", CONFIG, "--config.rl.stepz=3", "--help"]) == 2


def test_help_shows_the_twenty_fields_that_matter_each_in_one_line_with_what_it_means(capsys):
    assert cli.main(["main", CONFIG, "--config.rl.steps=3", "--help"]) == 0
    out = capsys.readouterr().out
    lines = out.partition("Config fields, the 20 that most runs set:\n")[2].splitlines()
    names, meanings = zip(*(line.split(maxsplit=1) for line in lines), strict=True)  # every one has a meaning
    assert [name.partition("=")[0].removeprefix("--") for name in names] == list(cli.MATTER) and all(meanings)
    assert {"--config.rl.steps=3", "--config.numerics=exact", "--config.env=search"} < set(names) and len(names) == 20


def test_help_says_of_which_choice_a_field_is_and_its_default_there(capsys):
    assert cli.main(["main", f"{CONFIG}:laptop-ppo", "--helpfull"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  --config.")]
    high = [text for name, text in lines if name.startswith("--config.rl.objective.clip_high")]
    assert "float, at least 0, default 0.0004, of gspo" in high
    assert len(high) == 4  # of ppo_clip and dual_clip, gspo, cispo, gmpo
    (clip,) = [text for name, text in lines if name == "--config.rl.advantage.critic.loss.value_clip=0.5"]
    assert clip.startswith("float, at least 0, default 0.5, of gae|gae_adaptive|") and " / squared: in units" in clip


def test_as_a_command():
    command = [sys.executable, "-m", "jaxagent.main", CONFIG, "--config.rl.stepz=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


FULL = "No space left on device"
FREE = "Free some and run again to resume.\n"
SAVED = ": saved at step 37; the same command continues."


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("row 3 is malformed"), 2, "error: row 3 is malformed\n"),
        (PermissionError(errno.EACCES, "Permission denied", "data/train.jsonl"), 2,
         "error: Cannot use 'data/train.jsonl': Permission denied.\n"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", pathlib.Path("notes.txt/run")), 2,
         "error: Cannot use 'notes.txt/run': Not a directory.\n"),
        (OSError(errno.EXDEV, "Invalid cross-device link", "/a/x", None, b"/b/x"), 2,
         "error: Cannot use '/a/x' -> '/b/x': Invalid cross-device link.\n"),
        (OSError(errno.ENOSPC, FULL, "metrics.jsonl"), 1,
         f"error: no space left on the disk (metrics.jsonl). {FREE}"),
        (OSError(errno.ENOSPC, FULL), 1, f"error: no space left on the disk. {FREE}"),
        (ValueError(f"RESOURCE_EXHAUSTED: Failed to write 147259 bytes to file 7: {FULL} [tensorstore]"), 1,
         f"error: no space left on the disk. {FREE}"),
        (RuntimeError(f"Error while serializing: I/O error: {FULL} (os error 28)"), 1,  # safetensors
         f"error: no space left on the disk. {FREE}"),
        (Stopped(signal.SIGINT, SAVED), 130, f"interrupted{SAVED}\n"),
    ],
)  # fmt: skip
def test_what_ends_a_run_is_one_line_and_an_exit_code(runs, monkeypatch, capsys, error, code, line):
    monkeypatch.setattr("jaxagent.loop.run", mock.Mock(side_effect=error))
    assert cli.main(["main", CONFIG]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        OSError("no number and no path"),
        OSError(errno.EBADF, "Bad file descriptor", 7),
        OSError(errno.EIO, "I/O error"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", str(ROOT / "jaxagent/observe/page.css")),
        ValueError("RESOURCE_EXHAUSTED: Out of memory"),
    ],
)
def test_a_mistake_of_the_programs_own_keeps_its_traceback(runs, monkeypatch, error):
    monkeypatch.setattr("jaxagent.loop.run", mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        cli.main(["main", CONFIG])


def test_ctrl_c_while_a_command_is_loaded_is_one_line(tmp_path):
    """Python's own answer is a traceback of its imports. The module that is loaded here waits to be interrupted."""
    (tmp_path / "numpy").mkdir()  # which every command imports
    waits = "import sys, time\nprint('loading', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "numpy" / "__init__.py").write_text(waits)
    command = [sys.executable, "-m", "jaxagent.main", CONFIG]
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "loading\n"
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
    assert (child.returncode, error) == (130, "interrupted\n")


def jaxagent(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`jaxagent WORDS`, in a folder that is not the checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", "import sys; from jaxagent.__main__ import main; sys.exit(main())", *words]
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=60)


def test_the_package_says_its_commands_and_its_version():
    done = subprocess.run([sys.executable, "-m", "jaxagent"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "search_r1" in done.stdout.splitlines()[-1]
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 130
    for name, (module, words, _) in COMMANDS.items():
        assert importlib.util.find_spec(module) and f"jaxagent {name} {words}" in done.stdout, name
    assert f'version="{__version__}"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert jaxagent("--version").stdout == f"jaxagent {__version__}\n"


def test_a_command_is_its_module_in_the_place_of_the_process(tmp_path):
    done = jaxagent("train", "--config=search_r")
    assert done.returncode == 2 and "Did you mean 'search_r1'?" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "numpy").mkdir()  # which this command imports: it says who runs, and how
    said = "import os, sys\nprint(os.getpid(), sys.path[0], sys.argv[1:], flush=True)\nos.kill(os.getpid(), 15)\n"
    (tmp_path / "numpy" / "__init__.py").write_text(said)
    words = [sys.executable, "-m", "jaxagent", "report", "--a b", ""]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as child:
        out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (-15, f"{child.pid} {tmp_path} ['--a b', '']\n")


def test_a_command_that_is_none_is_answered_with_the_nearest():
    done = jaxagent("evalaute", "--config.workdir=x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: There is no command 'evalaute'. Did you mean 'evaluate'?\n"


def test_bash_completes_commands_and_configs():
    script = jaxagent("completion", "bash").stdout
    complete = (
        'complete_as() { COMP_WORDS=($1); COMP_CWORD=$2 COMP_LINE=$1; _jaxagent jaxagent "$3"; echo ${COMPREPLY[@]}; }'
    )
    asked = 'complete_as "jaxagent s" 1 s; complete_as "jaxagent train --config=gsm" 4 gsm'
    done = subprocess.run(["bash", "-c", f"{script}\n{complete}\n{asked}"], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["serve sweep sandbox", "gsm8k_python"], done.stderr


def test_the_list_of_commands_needs_no_package_but_this_one(tmp_path):
    """It answers in a Python that lacks everything, and at once."""
    code = "import sys; from jaxagent.__main__ import main; main(['jaxagent']); print(sorted(sys.modules))"
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "'numpy'" not in done.stdout and "search_r1" in done.stdout, done.stderr


def test_a_path_from_home_is_found_by_every_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = Parser("x")
    parser.add_argument("--out")
    parser.add_argument("--text")
    read = parser.parse_args(["--out=~/a", "--text=a ~/b"])
    assert (read.out, read.text) == (f"{tmp_path}/a", "a ~/b")
    assert evaluate.main(["evaluate", "--config.workdir=~/run"]) == 2
    assert f"There is no run in '{tmp_path}/run'" in capsys.readouterr().err
