"""What a run goes on from: damage and changes are one line, and a refused resume leaves every file as it was."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
from types import SimpleNamespace

import jax
import pytest

from jaxagent import main as cli
from jaxagent.config import ConfigError, SandboxConfig, flags, modern, parse, to_dict
from jaxagent.config.fleet import FleetConfig
from jaxagent.config.model import RateConfig
from jaxagent.envs.base import Environment
from jaxagent.envs.orchestra.roles import SKILLS
from jaxagent.evaluate import stored_config
from jaxagent.learner import digests
from jaxagent.observe.files import RUN_FILE
from jaxagent.runs import devices, provenance, resume
from jaxagent.runs.evaluation.run import begin
from tests import tiny_run


@pytest.fixture
def run(finished, tmp_path) -> pathlib.Path:
    """A copy of a finished run that may be damaged. Its checkpoints are the two newest, 10 and 11."""
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def contents(workdir: pathlib.Path) -> dict[str, str]:
    """Every file with a digest of what is in it, but the lock and what XLA keeps."""
    return {
        str(path.relative_to(workdir)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in workdir.rglob("*")
        if path.is_file() and path.name != ".lock" and "compilation_cache" not in path.parts
    }


def refused(capsys, workdir: pathlib.Path, *changes: str, config: str = "search_r1") -> str:
    """The one line of a run that is not gone on with, and has changed nothing."""
    before = contents(workdir)
    capsys.readouterr()
    assert cli.main(tiny_run.argv(workdir, "--config.rl.steps=6", *changes, config=config)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert contents(workdir) == before
    return error


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped": lambda bundle: flip(largest(bundle / "state")),
    "cut": lambda bundle: largest(bundle / "state").write_bytes(largest(bundle / "state").read_bytes()[:-100]),
    "empty": lambda bundle: largest(bundle / "host").write_bytes(b""),
    "missing": lambda bundle: (bundle / "state/_METADATA").unlink(),
    "folder": lambda bundle: shutil.rmtree(bundle / "host"),
    "digests": lambda bundle: (bundle / digests.FILE).write_text("{"),
    "everything": lambda bundle: [shutil.rmtree(bundle), bundle.mkdir()],
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_bundle_is_named_and_the_one_before_it_offered(run, capsys, damage):
    newest, older = sorted((run / "checkpoints").iterdir(), key=lambda path: -int(path.name))[:2]
    DAMAGE[damage](newest)
    error = refused(capsys, run)
    assert f"{newest} cannot be read" in error and error.rstrip().endswith(f"to go on from {older.name}.")
    if damage in ("flipped", "cut"):
        assert f"({largest(newest / 'state').relative_to(newest)} differs from its digest)" in error


def test_a_damaged_log_is_named_with_its_line(run, capsys):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"garbage \xff\n", *lines[4:]]))
    assert f"{path}, line 4: not JSON" in refused(capsys, run)
    path.write_bytes(b"".join(lines[:3]))
    assert f"{path} has 3 records" in refused(capsys, run)


@pytest.mark.parametrize("keep_folder", [False, True])
def test_records_without_a_checkpoint_are_not_thrown_away(run, capsys, keep_folder):
    shutil.rmtree(run / "checkpoints")
    for name in ("policy", "summary.json"):  # whose being there would tell as well
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if keep_folder:
        (run / "checkpoints").mkdir()
    assert "holds 11 records and no checkpoint: use another workdir, or delete" in refused(capsys, run)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("--config.seed=7", "config.seed is 7, and 0"),
        ("--config.data.seed=7", "config.data.seed is 7"),
        ("--config.model.embed_dim=64", "config.model.embed_dim is 64, and 32"),
        ("--config.model.mlp_dim=96", "config.model.mlp_dim is 96, and 64"),
        ("--config.model.rope_theta=500", "config.model.rope_theta is 500.0, and"),
        ("--config.model.lora.rank=2", "config.model.lora is 'on', and None"),
        ("--config.tokenizer.vocab_size=600", "config.tokenizer.vocab_size is 600, and 512"),
        ("--config.rl.steps=3", "has done 4 steps of 'rl', and the config gives it 3"),
    ],
)
def test_a_config_that_cannot_go_on_is_refused(run, capsys, change, field):
    assert field in refused(capsys, run, change)


def test_another_task_is_refused_before_its_data_is_made(run, capsys):
    assert "config.env is 'python', and 'search'" in refused(capsys, run, config="gsm8k_python")
    assert not list(run.glob("arithmetic*"))


@pytest.mark.parametrize("what", ["corpus", "tokenizer"])
def test_other_contents_are_refused(run, capsys, what):
    if what == "corpus":
        (path,) = run.glob("geography-*/corpus.jsonl")
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:200]))
        assert "The corpus has changed" in refused(capsys, run)
    else:
        path = run / "tokenizer/tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        path.write_text(json.dumps(tokenizer))
        assert "The tokenizer has changed" in refused(capsys, run)


def test_what_changed_is_told_and_a_finished_run_is_left_alone(run, capsys):
    before = contents(run)
    assert cli.main(tiny_run.argv(run, "--config.rl.group_size=2")) == 2
    told = capsys.readouterr().err
    assert "has ended, and does not take: rl.group_size 4 -> 2. More steps" in told and "--config.workdir" in told
    assert contents(run) == before
    assert cli.main(tiny_run.argv(run)) == 0
    assert "has ended already, and nothing is done. More steps" in capsys.readouterr().out
    after = contents(run)
    assert {name for name in before if after.get(name) != before[name]} <= {"summary.json", "report.html"}


def test_an_empty_workdir_is_refused(capsys):
    assert cli.main(tiny_run.argv(pathlib.Path("x"), "--config.workdir=")) == 2
    assert "config.workdir is empty" in capsys.readouterr().err


def test_a_run_says_what_it_was_made_with(finished):
    (start,) = json.loads((finished / RUN_FILE).read_text())["starts"]
    assert start["packages"]["jax"] and start["python"] and start["host"] and start["devices"] == ["1 x cpu"]
    assert start["resumed_at"] is None and "main" in start["command"] and "--config.rl.steps=4" in start["command"]
    commit = provenance.commit(pathlib.Path(provenance.__file__).parent)
    assert (start["commit"], start["time"][:2]) == (commit["commit"], "20")


def test_code_that_lies_in_another_repository_has_no_commit(tmp_path):
    """As an installed package in a virtual environment does, inside the user's own checkout."""
    import subprocess

    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/__init__.py").touch()
    subprocess.run([*git, "init", "-q"], check=True, timeout=60)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True, timeout=60)
    assert provenance.commit(tmp_path / "lib") == {"commit": None, "dirty": None}
    subprocess.run([*git, "add", "."], check=True, timeout=60)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True, timeout=60)
    found = provenance.commit(tmp_path / "lib")
    assert len(found["commit"]) == 40 and found["dirty"] is False
    (tmp_path / "lib/__init__.py").write_text("changed")
    assert provenance.commit(tmp_path / "lib")["dirty"] is True


def test_a_damaged_record_of_starts_is_told(tmp_path):
    assert provenance.read(tmp_path / RUN_FILE) == {"checkpointed": False, "starts": []}
    (tmp_path / RUN_FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        provenance.read(tmp_path / RUN_FILE)


# ---- the rule, field by field


def cfg(*changes: str):
    return flags.parse_argv(tiny_run.argv(pathlib.Path("run"), *changes)).config


def test_every_refused_field_exists():
    gone = {
        f"warm_start.{name}" for name in ("batch.targets_multiple", *(f"optimizer.{f}" for f in RateConfig.removed))
    }
    fields = {field.path.removeprefix("config.") for field in flags.fields()} | {"env.name"}
    assert set(resume.REFUSED) <= fields | gone


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ([], ["workdir=elsewhere"], ""),
        ([], ["rl.group_size=2", "numerics=fast"], "numerics exact -> fast, rl.group_size 4 -> 2"),
        ([], ["rl.optimizer.learning_rate=0.5"], "rl.optimizer.learning_rate 0.0002 -> 0.5"),
        (["model.num_layers=0"], ["model.num_layers=1"], "model.num_layers 0 -> 1"),  # 0: as the model's folder says
        (
            [],
            ["tokenizer.vocab_size=9", "model.path=x"],
            "model.path '' -> x, model.family qwen3 -> '', tokenizer.vocab_size 512 -> 9",
        ),
        ([], ["stages=rl"], "stages ['warm_start', 'rl'] -> ['rl']"),
        ([], ["rl.objective=gspo"], "rl.objective ppo_clip -> gspo"),  # whose constants are others
        ([], ["rl.objective.clip_low=0.1"], "rl.objective.clip_low 0.2 -> 0.1"),
        ([], ["rl.kl.coefficient=0.1", "rl.correction=mask"], "rl.correction none -> mask, rl.kl none -> on"),
        (["rl.kl=on"], ["rl.kl=none"], "rl.kl on -> none"),
        (["rl.kl=on"], ["rl.kl.coefficient=0.1"], "rl.kl.coefficient 0.04 -> 0.1"),
    ],
)
def test_changes_that_are_taken_are_told(then, now, told):
    before, after = (cfg(*(f"--config.{change}" for change in changes)) for changes in (then, now))
    saved = json.loads(json.dumps(to_dict(before)))  # as a bundle has it
    assert resume.changes_line(resume.check_config(saved, after, "7", adapting=True)) == told


def test_sizes_by_platform_are_no_change_where_they_come_to_the_same():
    """On another platform they are what suits that one, and told."""
    by_platform = [f"--config.engine.{name}=0" for name in ("tile_rows", "page_tokens", "prefill_tokens")]
    open_sizes = cfg(*by_platform, "--config.numerics=fast")
    saved = json.loads(json.dumps(to_dict(open_sizes.for_platform("cpu"))))
    assert resume.check_config(saved, open_sizes.for_platform("cpu"), "7", adapting=True) == []
    told = resume.changes_line(resume.check_config(saved, open_sizes.for_platform("gpu"), "7", adapting=True))
    assert told == "engine.prefill_tokens 4096 -> 16384, engine.tile_rows 64 -> 128"


def test_fields_of_earlier_versions_open_and_are_told_where_they_were_in_use(tmp_path):
    now = cfg("--config.fleet=on", "--config.rl.staleness=1")
    for field, used in (("lend", True), ("in_flight", "auto"), ("transfer", "device")):
        saved = json.loads(json.dumps(to_dict(now)))
        unused = FleetConfig.removed[field].value
        saved["fleet"][field] = unused
        assert resume.changes_line(resume.check_config(saved, now, "7", adapting=True)) == ""
        saved["fleet"][field] = used
        changes = resume.check_config(saved, now, "7", adapting=True)
        assert resume.changes_line(changes) == f"fleet.{field} {used} -> gone"
        (tmp_path / "config.json").write_text(json.dumps(saved))
        assert to_dict(parse(stored_config(str(tmp_path)))) == to_dict(now)
        with pytest.raises(
            ConfigError, match=rf"^Config field 'config\.fleet\.{field}' exists no more: .* Leave it out"
        ):
            cfg("--config.fleet=on", f"--config.fleet.{field}={used}")


def earlier(stored: dict) -> dict:
    """A config as the version before stored it, which had options that are constants, shared or sections now."""
    stored = json.loads(json.dumps(stored))
    warm, adamw = stored["warm_start"], stored["rl"]["optimizer"] | {"b1": 0.9, "eps": 1e-8}
    stored["rl"]["optimizer"] = adamw
    warm["optimizer"] = adamw | warm["optimizer"]
    warm["batch"]["targets_multiple"] = stored["rl"]["batch"]["targets_multiple"]
    curriculum = warm.pop("curriculum") or {"steps": 0, "sequences": 42}
    warm |= {f"curriculum_{name}": value for name, value in curriculum.items()}
    stored["model"]["lora"] = {"rank": 0, "alpha": 32.0, "rank_stabilised": False, "targets": "all-linear"}
    stored["data"]["columns"] = dict.fromkeys(("id", "prompt", "answers", "kind", "metadata"), "")
    stored["resume"] = {"numerics": "same"}
    if sandbox := stored["env"].get("sandbox"):
        sandbox |= dict.fromkeys(("workers", "token_file", "root", "image", "layers", "images"), "")
        sandbox |= {"bases": [], "build_network": False}
    for role in stored["roles"].values():
        skill = SKILLS[role.pop("expert")]
        role |= skill._asdict() | {"reply_tokens": 96, "timeout_s": 60.0}
        role["price_prompt"], role["price_reply"] = role.pop("prices")
    if "latency" in stored["env"]:
        stored["env"]["latency"] |= {"prompt_tokens_per_s": 5000.0, "reply_tokens_per_s": 50.0, "program_s": 1.0}
    if stored["env"]["name"] == "coding":
        stored["env"]["max_change_bytes"] = 1_000_000
    return json.loads(json.dumps(stored))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boxed(Environment):
    """Somebody's own environment, with sandboxes."""

    sandbox: SandboxConfig = dataclasses.field(default_factory=SandboxConfig)

    def attempt(self, task):
        raise NotImplementedError


@pytest.mark.parametrize(
    "words",
    ["search_r1", "tool_orchestra", "coding_agent", f"search_r1 --config.env={__name__}:Boxed"],
)
def test_what_the_version_before_stored_opens_and_goes_on_as_what_it_is_now(words, tmp_path):
    now = flags.parse_argv(["main", *f"--config={words} --config.workdir={tmp_path}".split()]).config
    then = earlier(to_dict(now))
    assert resume.changes(then, now) == []
    (tmp_path / "config.json").write_text(json.dumps(then))
    assert parse(stored_config(str(tmp_path))) == now
    # An evaluation of that version is gone on with, too.
    before, after = ({"config": json.loads(json.dumps(config))} for config in (then, to_dict(now)))
    (tmp_path / "evaluation.json").write_text(json.dumps({"evaluated": before}))
    assert begin(tmp_path, {"evaluated": after}, print) == after


@pytest.mark.parametrize(
    ("section", "field", "used"),
    [("optimizer", "b2", 0.5), ("optimizer", "eps", 1e-6), ("batch", "targets_multiple", 7)],
)
def test_what_the_version_before_stored_is_refused_by_name_where_it_means_something_else(
    section, field, used, tmp_path
):
    then = earlier(to_dict(cfg()))
    then["warm_start"][section][field] = used
    with pytest.raises(ConfigError, match=rf"config\.warm_start\.{section}\.{field}' exists no more: it is .*Leave it"):
        parse(then | {"stages": tuple(then["stages"])})
    with pytest.raises(ConfigError, match=rf"config\.warm_start\.{section}\.{field} .*{used}.* in checkpoint 7"):
        resume.check_config(then, cfg(), "7", adapting=False)
    # A run whose warm start is over goes on, and is read: evaluated, served, verified.
    changed = resume.changes_line(resume.check_config(then, cfg(), "7", adapting=True))
    assert changed.startswith(f"warm_start.{section}.{field} {used} ->")
    (tmp_path / "config.json").write_text(json.dumps(then))
    assert parse(stored_config(str(tmp_path))).warm_start == cfg().warm_start


def test_a_field_that_one_choice_lost_stays_anothers():
    assert modern({"env": {"name": "tau_bench", "user_strategy": "llm"}}) == {"env": {"name": "tau_bench"}}
    for kept in ({"name": "mine:Env", "user_strategy": "llm"}, {"name": "tau_bench", "user_strategy": "react"}):
        assert modern({"env": kept}) == {"env": kept}


def test_names_of_the_version_before_are_taken_from_a_command_line():
    sandbox = ("--config.env.sandbox.workers=http://a", "--config.env.sandbox.bases=a=b")
    env = flags.parse_argv(["main", "--config=configs/coding_agent.py", *sandbox]).config.env
    assert (env.sandbox.remote.workers, env.sandbox.software.bases) == ("http://a", ("a=b",))
    assert cfg("--config.warm_start.curriculum_steps=0").warm_start.curriculum is None
    assert cfg("--config.warm_start.curriculum_steps=3").warm_start.curriculum_steps == 3
    assert cfg("--config.model.lora.rank=0").model.lora is None


def test_adapters_keep_their_scale():
    saved = to_dict(cfg("--config.model.lora.rank=2"))
    now = cfg("--config.model.lora.rank=2", "--config.model.lora.alpha=3")
    with pytest.raises(ConfigError, match=r"config\.model\.lora\.alpha .* in checkpoint 7"):
        resume.check_config(saved, now, "7", adapting=True)
    assert resume.changes_line(resume.check_config(saved, now, "7", adapting=False)) == "model.lora.alpha 32 -> 3"


@pytest.mark.parametrize(
    "name", ["threads", "cpu_features", "xla_flags", "few_optimizations", "jax_settings", "jax", "jaxlib", "device"]
)
def test_a_machine_that_rounds_otherwise_is_refused_where_bits_count(name, monkeypatch):
    monkeypatch.setattr(devices, "_FOR_MESH", {})
    now = provenance.rounding(jax.devices()[0])
    then = now | {name: 3 if name == "threads" else "another"}
    for text, saved in (("exact", now), ("exact", None), ("fast", then)):
        what = resume.other_rounding(saved, now, cfg(f"--config.numerics={text}"), "7")
        assert what == (f"{name} {resume.changes_line([('', then[name], now[name])])[1:]}" if text == "fast" else "")
    with pytest.raises(ConfigError, match=rf"Checkpoint 7 was made .* otherwise: {name} .*resume\.numerics=accept"):
        resume.other_rounding(then, now, cfg(), "7")
    assert resume.other_rounding(then, now, cfg("--config.resume.numerics=accept"), "7").startswith(name)
    assert resume.other_rounding(then, now, cfg(), "7", "fast").startswith(name)  # bits that promised nothing


def test_what_decides_rounding_is_read_as_xla_reads_it(monkeypatch):
    monkeypatch.setattr(devices, "_FOR_MESH", {})
    device, before = jax.devices()[0], provenance.rounding(jax.devices()[0])
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --b=1 --a=2")
    monkeypatch.setenv("PJRT_NPROC", "77")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    changed = {"xla_flags": "--a=2 --b=1", "threads": 77, "jax_settings": "JAX_ENABLE_X64=1"}
    assert provenance.rounding(device) == before | changed
    monkeypatch.delenv("JAX_ENABLE_X64")
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setenv("NPROC", "88")
    monkeypatch.setattr(devices, "_FOR_MESH", {"NPROC": "88"})  # a mesh's, wherever it runs: another mesh is taken
    of_mesh = provenance.rounding(device)
    assert "threads" not in of_mesh and resume.other_rounding(before, of_mesh | {"xla_flags": ""}, cfg(), "7") == ""
    assert resume.other_rounding(of_mesh | {"xla_flags": ""}, before, cfg(), "7") == ""
    chip = SimpleNamespace(platform="gpu", device_kind="H100")  # what the host's cores are decides nothing there
    assert not {"threads", "cpu_features"} & provenance.rounding(chip).keys()


def test_contents_are_compared_by_name():
    now = {"model": {"rope_theta": 1e4, "norm_eps": 1e-6}, "tokenizer": "a", "tasks": "b", "held_out": "c"}
    config, host = cfg(), {"config": to_dict(cfg())}
    resume.check_identity({}, now, config, host)  # a bundle from before there was any
    resume.check_identity(now, now, config, host)
    for model in ({"rope_theta": 1e4}, now["model"] | {"of_later_code": 1}):  # a bundle of another version of the code
        resume.check_identity(now | {"model": model}, now, config, host)
    with pytest.raises(ConfigError, match=r"The model .* has changed .*: norm_eps was 1e-05 and is 1e-06"):
        resume.check_identity(now | {"model": {"rope_theta": 1e4, "norm_eps": 1e-5}}, now, config, host)
    with pytest.raises(ConfigError, match="The held-out data has changed"):
        resume.check_identity(now | {"held_out": "d"}, now, config, host)
    fewer = dataclasses.replace(config, data=dataclasses.replace(config.data, num_eval=4))
    resume.check_identity(now | {"held_out": "d"}, now, fewer, host)


def test_an_expert_of_the_version_before_keeps_prices_of_its_own_and_says_where_its_skill_is_now():
    then = earlier(to_dict(flags.parse_argv(["main", "--config=tool_orchestra"]).config))
    then["roles"]["answer-1"]["price_prompt"] = 2.0
    expert = parse(then | {"stages": tuple(then["stages"])}).roles["answer-1"]
    assert (expert.expert, expert.prices) == ("answer-1", (2.0, 10.0))
    then["roles"]["answer-1"] |= {"price_prompt": None, "price_reply": None}  # it cost nothing then: not so now
    with pytest.raises(ConfigError, match=r"roles\.answer-1\.\w+' exists no more: .* field 'expert'\. Leave it out"):
        parse(then | {"stages": tuple(then["stages"])})
    with pytest.raises(ConfigError, match=r"roles\.answer-1\.knows_frac' exists no more: .* field 'expert'"):
        flags.parse_argv(["main", "--config=tool_orchestra", "--config.roles.answer-1.knows_frac=0.5"])


def test_the_command_line_wins_where_a_config_file_has_the_name_of_the_version_before(tmp_path):
    file = tmp_path / "mine.py"
    made = "from configs.search_r1 import get_config as base\n\n\ndef get_config(preset='laptop'):\n"
    file.write_text(f"{made}    config = base(preset)\n    config.log_episodes = True\n    return config\n")
    for flag, learn in (("episodes.keep=newest", True), ("log_episodes=false", False), ("episodes.learn=false", False)):
        assert flags.parse_argv(["main", f"--config={file}", f"--config.{flag}"]).config.episodes.learn is learn, flag
