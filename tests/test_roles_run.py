"""Runs with roles, end to end: whose tokens are whose, to the bit; resumed, evaluated; and counterparts that fail."""

import contextlib
import json
import shutil
import types
from unittest import mock

import jax
import numpy as np
import pytest

from jaxagent import evaluate, loop
from jaxagent import main as cli
from jaxagent.config import ConfigError, flags
from jaxagent.data import codec
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.models import exact, hf, params, sharding
from jaxagent.observe import jsonl
from jaxagent.plan import programs
from jaxagent.plan import run as run_plan
from jaxagent.runs import checks, roles
from tests import role_world, tiny_run

ROLES = [
    "--config.roles.guide=engine",
    "--config.roles.guide.context_tokens=64",
    "--config.roles.guide.reply_tokens=5",
    "--config.roles.critic=policy",
    "--config.roles.critic.context_tokens=64",
    "--config.roles.critic.reply_tokens=4",
]


def trajectories(workdir) -> list[tuple[int, str, object]]:
    """(step, whose, trajectory) of every conversation of training that an engine played."""
    found = []
    for line in tiny_run.episodes(workdir, "rl"):
        episode = codec.decode_episode(line, "log")
        assert not episode.error
        found += [(line["step"], "trained", trajectory) for trajectory in episode.trajectories]
        found += [(line["step"], heard.role, heard.trajectory) for heard in episode.heard]
    return found


def scored(workdir, folder, found) -> list[np.ndarray]:
    """The trainer's exact log-probs of each trajectory's sampled tokens, under the weights in a folder."""
    cfg = flags.parse_argv(role_world.argv(workdir, "Talking", *ROLES)).config
    spec, mesh = hf.read_spec(folder, cfg.model), sharding.make_mesh(cfg.mesh)
    tiling = exact.Tiling(cfg.engine.tile_rows, cfg.engine.page_tokens, cfg.engine.cache_dtype)
    program, rows, width, out = jax.jit(exact.packed_logprobs, static_argnums=(1, 2)), 8, 96, []
    with jax.set_mesh(mesh):
        weights = hf.load(folder, spec, params.shardings(spec, mesh, sharding.TRAIN))
        for start in range(0, len(found), rows):
            tokens = np.zeros((rows, width), np.int32)
            positions, targets = np.zeros_like(tokens), np.zeros_like(tokens)
            batch = [trajectory for _, _, trajectory in found[start : start + rows]]
            for row, trajectory in enumerate(batch):
                size = len(trajectory)
                tokens[row, :size], positions[row, :size] = trajectory.tokens, np.arange(size)
                targets[row, : size - 1] = trajectory.tokens[1:]
            head = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
            arrays = (tokens, positions, head, targets, np.ones(tokens.shape, np.float32))
            got = np.asarray(
                program(weights, spec, tiling, *(jax.device_put(x, sharding.rows(mesh, 2)) for x in arrays))
            )
            out += [got[row, np.flatnonzero(t.action_mask) - 1] for row, t in enumerate(batch)]
    return out


def same_bits(trajectory, logprobs) -> bool:
    return trajectory.logprobs[trajectory.action_mask].tobytes() == logprobs.tobytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps with a frozen guide on the run's mesh and the policy as its own critic."""
    workdir = tmp_path_factory.mktemp("roles") / "run"
    assert cli.main(role_world.argv(workdir, "Talking", *ROLES, "--config.rl.steps=3")) == 0
    return workdir


@pytest.mark.slow
def test_every_conversation_is_its_engines_to_the_bit(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["compiles_after_warmup"] == 0 and summary["failed_episodes"] == {}
    steps = [row for row in jsonl.read(run / "metrics.jsonl") if row["stage"] == "rl" and row["step"]]
    assert [row["logprob_gap/max"] for row in steps] == [0.0] * 3
    for row in steps:
        assert row["episode/guide_replies"] == 2 and row["episode/critic_replies"] == 1
        assert row["episode/trajectories"] == 2 and "episode/guide_cost" not in row
    found = trajectories(run)
    assert {(step, who) for step, who, _ in found} == {
        (step, who) for step in range(3) for who in ("trained", "guide", "critic", "policy")
    }
    equal = [
        (step, who, same_bits(trajectory, logprobs))
        for (step, who, trajectory), logprobs in zip(found, scored(run, run / "roles/start", found), strict=True)
    ]
    # The guide speaks with the weights that RL began with, all the time; the others only until the first update.
    assert all(same for step, who, same in equal if who == "guide" or step == 0)
    assert {who for step, who, same in equal if step == 2 and not same} == {"trained", "critic", "policy"}


@pytest.mark.slow
def test_attempts_at_a_task_hear_different_things_and_two_runs_the_same(run, tmp_path):
    again = tmp_path / "again"
    assert cli.main(role_world.argv(again, "Talking", *ROLES, "--config.rl.steps=1")) == 0
    first = [t.tokens.tolist() for step, _, t in trajectories(run) if step == 0]
    assert [t.tokens.tolist() for _, _, t in trajectories(again)] == first
    guides = [tuple(t.tokens.tolist()) for step, who, t in trajectories(run) if who == "guide" and step == 0]
    assert len(guides) == 8 and len({*guides}) > 4


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_same_frozen_weights(run, tmp_path):
    resumed = tmp_path / "resumed"
    assert cli.main(role_world.argv(resumed, "Talking", *ROLES, "--config.rl.steps=2")) == 0
    weights = (resumed / "roles/start/model.safetensors").read_bytes()
    assert cli.main(role_world.argv(resumed, "Talking", *ROLES, "--config.rl.steps=3")) == 0
    assert (resumed / "roles/start/model.safetensors").read_bytes() == weights
    assert weights == (run / "roles/start/model.safetensors").read_bytes()
    assert json.loads((resumed / "summary.json").read_text())["compiles_after_warmup"] == 0
    last = [[t.tokens.tolist() for step, _, t in trajectories(at) if step == 2] for at in (run, resumed)]
    assert last[0] == last[1] and last[0]


@pytest.mark.slow
def test_such_a_run_is_evaluated_with_its_own_roles(run, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    command = ["evaluate", f"--config.workdir={copy}", "--greedy"]
    assert evaluate.main(command) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((run / "summary.json").read_text())
    assert found["attempts"] == 4 and found["failed"] == 0
    (file,) = copy.glob("evaluations/*/evaluation.json")
    results = json.loads(file.read_text())["results"]
    assert summary["eval/even_after_rl"] == pytest.approx(results["pass_at_k"]["all"]["1"]["mean"])
    assert evaluate.main([*command, "--config.roles.guide.reply_tokens=3"]) == 2
    assert "roles" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_with_a_tokenizer_of_their_own_play_a_role(run, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run / "policy", other)
    Tokenizer.train(["other words for other ears"] * 9, 280, ()).save(other)
    workdir = tmp_path / "run"
    extra = (f"--config.roles.guide.path={other}", "--config.rl.steps=1", "--config.engine.slots=4")
    assert cli.main(role_world.argv(workdir, "Talking", *ROLES, *extra)) == 0
    assert not (workdir / "roles/start").exists()
    tokenizer = Tokenizer.load(other)
    rows = list(tiny_run.episodes(workdir, "rl"))
    for row in rows:
        (guide,) = [h for h in codec.decode_episode(row, "log").heard if h.role == "guide"]
        shown = tokenizer.decode(guide.trajectory.tokens.tolist())
        assert guide.turns[0][0] == row["task"]["prompt"] and shown.startswith(row["task"]["prompt"])


@pytest.mark.parametrize("stage", ["opd", "rl"])
def test_roles_without_a_path_keep_what_rl_begins_with_and_not_what_opd_does(tmp_path, monkeypatch, stage):
    class Begun(Exception):
        pass

    def connect(*_):
        raise Begun

    frozen, nothing = [], types.SimpleNamespace(warm_up=contextlib.nullcontext)
    for name in ("Experience", "EntropyControl", "open_teacher"):
        monkeypatch.setattr(loop, name, mock.MagicMock())
    monkeypatch.setattr(loop, "make_programs", lambda *_: (None, None))
    cfg = flags.parse_argv(role_world.argv(tmp_path / "run", "Talking", *ROLES)).config
    parts, saved = mock.MagicMock(cfg=cfg), mock.MagicMock(compiles=nothing)
    parts.roles.freeze, saved.resumes.return_value = frozen.append, False
    with pytest.raises(Begun):
        loop.rl_stage(parts, saved, None, {}, stage, connect)
    assert len(frozen) == (stage == "rl")


# ---------------------------------------------------------------- counterparts that fail


@pytest.mark.slow
def test_a_user_that_fails_hangs_or_never_stops_is_a_counted_reason_and_no_zero(tmp_path):
    said = ("--config.roles.user=tests.role_world:Wild", "--config.roles.user.timeout_s=0.3", "--config.rl.steps=2",
             "--config.env.concurrent_episodes=16")  # fmt: skip
    assert cli.main(role_world.argv(tmp_path / "run", "Serving", *said)) == 0
    rows = [row for row in jsonl.read(tmp_path / "run/metrics.jsonl") if row["stage"] == "rl" and row["step"]]
    for reason in ("env_error", "timeout", "turn_limit", "answer"):
        assert sum(row[f"stop/{reason}"] for row in rows) > 0, reason
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    failed = 0
    for row in tiny_run.episodes(tmp_path / "run", "rl"):
        if row["stop_reason"] in ("env_error", "timeout"):
            failed += 1
            told = "ConnectionError: the line is dead" if row["stop_reason"] == "env_error" else "no reply in its time"
            assert row["error"].endswith(f"user: {told}") and row["rewards"] == {}
    assert failed and summary["failed_episodes"]["rl"] == failed
    assert "user: " in summary["first_failure"] and not summary["compiles_after_warmup"]


@pytest.mark.slow
def test_a_user_that_only_fails_ends_the_run_before_anything_is_trained(tmp_path):
    said = ("--config.roles.user=tests.role_world:Wild", "--config.roles.user.how=fail")
    with pytest.raises(SystemExit, match=r"before the stage 'rl' .*user: ConnectionError: the line is dead"):
        cli.main(role_world.argv(tmp_path / "run", "Serving", *said))


# ---------------------------------------------------------------- mistakes, before any device work

GUIDE, CRITIC = ROLES[:3], ROLES[3:]
BY_HTTP = (*CRITIC, "guide=http", "guide.model=m", "guide.retries=0")
MISTAKES = {  # what is said beside the roles (of those that have no "--", after --config.roles.), and what is told
    "unknown role": ((*ROLES, "guid=policy"), "has no role 'guid'. Did you mean 'guide'?"),
    "no such choice": ((*CRITIC, "guide=engin"), "config.roles.guide has no choice 'engin'"),
    "missing role": (GUIDE, "config.roles.critic is missing"),
    "the policy": ((*ROLES, "policy=engine"), "config.roles.policy: the environment has no role 'policy'"),
    "no endpoint": (BY_HTTP, "config.roles.guide.url"),
    "no url": ((*BY_HTTP, "guide.url=here"), "config.roles.guide: url='here' is no URL"),
    "no such field": ((*ROLES, "guide.url=http://x"), "config.roles.guide.url"),
    "a reply as long as all": ((*ROLES, "guide.reply_tokens=64"), "must be less than its context_tokens"),
    "a negative price": ((*ROLES, "guide.price_reply=-1"), "config.roles.guide.price_reply must be at least 0"),
    "longer than the engine's": ((*ROLES, "critic.context_tokens=97"), "is more than env.context_tokens=96"),
    "truncated sampling": ((*ROLES, "guide.sampling.top_p=0.9"), "config.roles.guide.sampling.top_p' exists no more"),
    "pages for no conversation": ((*ROLES, "guide.pages=2"), "config.roles.guide.pages=2"),
}


def refused(argv) -> str:
    with pytest.raises(ConfigError) as error:
        checks.check(flags.parse_argv(argv).config)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_one_line(what, tmp_path):
    said, told = MISTAKES[what]
    extra = [flag if flag.startswith("--") else f"--config.roles.{flag}" for flag in said]
    assert told in refused(role_world.argv(tmp_path / "run", "Talking", *extra))


def test_an_environment_without_roles_refuses_them(tmp_path):
    message = refused(tiny_run.argv(tmp_path / "run", "--config.roles.user=engine"))
    assert message == "config.roles.user: the environment has no role 'user'. It has none."


def test_a_role_needs_a_model_folder(tmp_path):
    cfg = flags.parse_argv(role_world.argv(tmp_path / "run", "Talking", *ROLES, "--config.roles.guide.path=no/such"))
    with pytest.raises(ConfigError, match=r"^config\.roles\.guide\.path='no/such' is no model folder"):
        roles.check_folders(cfg.config)


def test_a_name_that_numbers_of_the_episode_have_is_no_role(tmp_path):
    told = refused(role_world.argv(tmp_path / "run", "Taken", "--config.roles.engine=policy"))
    assert told == "The environment's role 'engine' must have another name: this one is taken."


def test_an_expert_needs_both_its_prices(tmp_path):
    told = refused(role_world.argv(tmp_path / "run", "Selling", *ROLES))
    assert "config.roles.guide has no price" in told and "0 is free" in told
    half = role_world.argv(tmp_path / "run", "Selling", *ROLES, "--config.roles.guide.price_prompt=3")
    assert "config.roles.guide has no price, or half of one" in refused(half)  # replies would have been free
    priced = ("--config.roles.guide.price_prompt=0", "--config.roles.guide.price_reply=2")
    checks.check(flags.parse_argv(role_world.argv(tmp_path / "run", "Selling", *ROLES, *priced)).config)


@pytest.mark.slow
def test_an_endpoint_where_nobody_is_ends_the_run_before_any_weights(tmp_path, capsys):
    said = (*CRITIC, *(f"--config.roles.{flag}" for flag in (*BY_HTTP[-3:], "guide.url=http://127.0.0.1:9/v1")))
    assert cli.main(role_world.argv(tmp_path / "run", "Talking", *said)) == 2
    told = capsys.readouterr().err
    assert "config.roles.guide: http://127.0.0.1:9/v1/chat/completions is not reached" in told
    assert "Start a server there" in told and "Traceback" not in told


@pytest.mark.slow
def test_a_dry_run_counts_the_weights_and_the_cache_of_roles(tmp_path):
    argv = role_world.argv(tmp_path / "run", "Talking", *ROLES, "--config.roles.guide.pages=129")
    cfg = flags.parse_argv(argv).config
    spec = run_plan.model_spec(cfg)
    resident = programs.resident_bytes(cfg, spec, sharding.make_mesh(cfg.mesh))
    assert resident["roles guide: parameters"] == resident["rollout parameters"] > 0
    assert resident["roles guide: kv cache"] == 2 * resident["kv cache"]  # 64 and 129 pages, and one that is not used
    assert not any("critic" in name for name in resident if name.startswith("roles"))
    plain = flags.parse_argv(tiny_run.argv(tmp_path / "plain")).config
    assert not any("role" in name for name in programs.resident_bytes(plain, spec, sharding.make_mesh(plain.mesh)))
