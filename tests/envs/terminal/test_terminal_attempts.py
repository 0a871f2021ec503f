"""Attempts at terminal tasks in real sandboxes, by scripted policies: how they are answered, end and are judged."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from configs import echo, endless_terminals
from jaxagent import config as schema
from jaxagent.config import ConfigError, SoftwareConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.terminal import dialogue
from jaxagent.envs.terminal.commands import shortened_output
from jaxagent.envs.terminal.environment import TerminalAttempt, own_image
from jaxagent.envs.terminal.verify import VerifierError
from jaxagent.envs.terminal_text import clean
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.sandbox.base import SandboxError
from jaxagent.types import StopReason, Task, TokenKind
from tests.envs.opened import opened_sandboxes
from tests.rollout.scripted import ScriptedPolicy

TIMEOUT_S = 120.0
FINAL = """
import os, sys
sys.exit(0 if os.path.isfile("b") and not os.path.exists("a") else 1)
"""
TERMINAL = {
    "setup": "echo fig > a\n",
    "initial_test": "raise SystemExit(0)",
    "final_test": FINAL,
    "commands": ["mv a b"],
    "processes": False,
    "level": 1,
    "template": "rename_file",
}


def task(**changes):
    return Task("t", "Rename the file a to b.", (), "level1/rename_file", {"terminal": {**TERMINAL, **changes}})


RECIPES = {
    "laptop": (endless_terminals, "laptop"),
    "endless": (endless_terminals, "qwen2.5-7b"),
    "echo": (echo, "qwen3-8b"),
}


def make_config(recipe="laptop", **terminal):
    module, preset = RECIPES[recipe]
    raw = module.get_config(preset)
    raw.env.max_turns = terminal.pop("max_turns", 3)
    raw.env.sandbox.warm = 2
    raw.env.update(terminal)
    return schema.parse(raw)


@pytest.fixture(scope="module")
def opened():
    """Sandboxes that are open, and the loop on which they are."""
    with opened_sandboxes(make_config().env.sandbox, 4) as both:
        yield both


def taken_from(sandboxes):
    """What gives an attempt its sandbox."""
    return lambda of: sandboxes.take(own_image(of))


@pytest.fixture
def attempt(opened):
    """Plays actions until the attempt ends, then verifies it; returns (steps, verdict or exception, environment)."""
    sandboxes, workers = opened

    def play(*actions, of=None, ended=None, then=None, by=None, **changes):
        cfg = make_config(**changes)

        async def run():
            environment = TerminalAttempt(of or task(), cfg.env, by or taken_from(sandboxes))
            try:
                await environment.start()
                steps = [await environment.step(action) for action in actions]
                if then is not None:
                    await then(environment)
                stop = ended or steps[-1].stop_reason
                try:
                    verdict = await environment.verify(Transcript("", (), (), stop))
                except VerifierError as error:
                    verdict = error
                return steps, verdict, environment
            finally:
                await environment.close()

        return workers.run(run(), TIMEOUT_S)

    return play


def cmd(command):
    return f"<cmd>{command}</cmd>"


def test_an_oracle_scores_1_and_an_idle_agent_0(attempt):
    (moved, end), verdict, environment = attempt(cmd("mv a b"), "<done>", initial_test=True)
    assert moved.observation.parts == (("<out></out>\n", TokenKind.OBSERVATION),) and moved.observation.role == ""
    assert end.stop_reason == StopReason.ANSWER
    assert verdict.reward == 1.0 and verdict.components == {"solved": 1.0}
    assert environment.counters["commands"] == 1 and environment.counters["failed_commands"] == 0
    _, verdict, _ = attempt("<done>")
    assert verdict.reward == 0.0 and verdict.components == {"solved": 0.0}


def test_one_shell_for_the_whole_attempt(attempt):
    said = (cmd("cd /tmp; X=lime"), cmd("echo $X in $PWD; cat ~/a"), cmd("ls nothing"), "<done>")
    steps, _, environment = attempt(*said, max_turns=9)
    assert steps[1].observation.text == "<out>lime in /tmp\nfig</out>\n"
    assert steps[2].observation.text.endswith("\n(exit_code=2)</out>\n")
    assert environment.counters["failed_commands"] == 1


def test_the_time_limit_gives_0_without_verification(attempt):
    """All is done in time, and still: what counts is that the attempt did not end by itself."""
    started = time.monotonic()
    steps, verdict, environment = attempt(cmd("mv a b"), cmd("sleep 60"), agent_timeout_s=2.0, max_turns=9)
    assert steps[-1].stop_reason == StopReason.TIME_LIMIT and time.monotonic() - started < 50
    assert verdict.reward == 0.0 and environment.counters["unverified"] == 1
    assert not StopReason.TIME_LIMIT.is_failure  # it stays in its group, with its 0
    # A test that says nothing would be an error if it ran.
    _, verdict, _ = attempt(cmd("sleep 60"), of=task(final_test="raise SystemExit(7)"), agent_timeout_s=0.5)
    assert verdict.reward == 0.0


@pytest.fixture(params=["endless", "echo"])
def published(request, attempt):
    """Attempts by a published recipe's own settings: its format, limits and rules; and how it writes things."""
    tools = make_config(request.param).env.tools
    assert tools == {"endless": "endless", "echo": "qwen3_xml"}[request.param]

    def play(*actions, **changes):
        return attempt(*[f"<think>x</think>{action}" for action in actions], recipe=request.param, **changes)

    return play, lambda command: dialogue.action(tools, command), dialogue.finish(tools)


def test_published_timeouts(published):
    """The wall clock gives 0 whatever was done, the turn limit is judged, too many tokens give 0 without a test."""
    play, act, done = published
    steps, verdict, environment = play(act("mv a b"), act("sleep 60"), done, agent_timeout_s=1.5, max_turns=9)
    assert [step.stop_reason for step in steps[1:]] == [StopReason.TIME_LIMIT] * 2
    assert (verdict.reward, environment.counters["unverified"]) == (0.0, 1)
    (_, end), verdict, environment = play(act("true"), act("mv a b"), max_turns=2)
    assert end.stop_reason == StopReason.TURN_LIMIT and (verdict.reward, environment.counters["unverified"]) == (1.0, 0)
    _, verdict, environment = play(act("mv a b"), ended=StopReason.TOKEN_LIMIT)
    assert (verdict.reward, environment.counters["unverified"]) == (0.0, 1)


def test_published_done_beats_the_command(published):
    play, act, done = published
    for action in (act("mv a b") + done, done + act("mv a b")):
        (end,), verdict, environment = play(action, max_turns=1)  # nor is it the turn limit
        assert end.stop_reason == StopReason.ANSWER and environment.counters["commands"] == 0
        assert verdict.reward == 0.0 and environment.counters["unverified"] == 0


@pytest.mark.parametrize("final_test", ["raise SystemExit(7)", "import os; os.kill(os.getpid(), 9)"])
def test_a_missing_reward_is_an_error(attempt, final_test):
    _, failure, _ = attempt("<done>", of=task(final_test=final_test))
    assert isinstance(failure, VerifierError)


def test_a_test_that_hangs_is_an_error(attempt):
    _, failure, _ = attempt("<done>", of=task(final_test="import time; time.sleep(60)"), verifier_timeout_s=1.0)
    assert isinstance(failure, VerifierError) and "deadline" in str(failure)


def test_a_setup_or_initial_test_that_fails_is_an_error(attempt):
    with pytest.raises(VerifierError, match="setup"):
        attempt("<done>", of=task(setup="exit 3\n"))
    with pytest.raises(VerifierError, match="initial test"):
        attempt("<done>", of=task(initial_test="raise SystemExit(1)"), initial_test=True)
    attempt("<done>", of=task(initial_test="raise SystemExit(1)"), initial_test=False)


def test_what_the_agent_left_running_cannot_change_the_verdict(attempt):
    """A loop puts the right state back all the time; it is stopped before the test looks."""
    loop = "(while true; do touch b; rm -f a; done) >/dev/null 2>&1 &"

    async def wrong_state(environment):
        await environment._sandbox.stop_processes()
        await environment._sandbox.execute(("sh", "-c", "touch a; rm -f b"), 10.0, 1000)

    _, verdict, _ = attempt(cmd(loop), "<done>", then=wrong_state)
    assert verdict.reward == 0.0
    slow = "import os, sys, time; os.rename('b', 'a'); time.sleep(.5); sys.exit(0 if os.path.exists('b') else 1)"
    _, verdict, _ = attempt(cmd(f"mv a b; {loop}"), "<done>", of=task(final_test=slow))
    assert verdict.reward == 0.0


@pytest.mark.parametrize("tools", ["plain", "endless", "qwen3_xml"])
def test_a_command_that_takes_too_long_is_answered(attempt, tools):
    slow, after = (dialogue.action(tools, c) for c in ("echo begun; sleep 60", "echo still here"))
    think = "<think>hm</think>" if tools == "qwen3_xml" else ""
    steps, _, environment = attempt(
        think + slow, think + after, dialogue.finish(tools), tools=tools, command_timeout_s=1.0, max_turns=9
    )
    said = {
        "plain": "<out>begun\n(timed out)</out>\n",
        "endless": "Command timed out. Partial output:\nbegun",
        "qwen3_xml": "Command 'echo begun; sleep 60' timed out after 1 seconds.\n\n(exit_code=-1)",
    }[tools]
    assert steps[0].observation.text == said and environment.counters["timed_out_commands"] == 1
    assert "still here" in steps[1].observation.text
    assert steps[1].observation.role == {"plain": "", "endless": "user", "qwen3_xml": "tool"}[tools]


def test_a_long_output_keeps_the_end_that_is_published(attempt):
    count = "seq 1 3000"  # 1\n2\n ... 3000: 13,892 characters without the last line's end
    (step, _), _, _ = attempt(
        dialogue.action("endless", count), dialogue.finish("endless"), tools="endless", output_chars=9
    )
    assert step.observation.text.startswith("Command executed successfully. Output: 1\n2\n3\n4\n5\n\n(exit")
    action = "<think>x</think>" + dialogue.action("qwen3_xml", count)
    (step, _), _, _ = attempt(action, dialogue.finish("qwen3_xml"), tools="qwen3_xml", output_chars=9)
    assert " Output: 2999\n3000\n\n(exit_code=0)" in step.observation.text


def test_the_two_ends_of_a_cut_output_are_never_joined():
    """Four bytes of each end were kept, and three of the last four are not shown."""
    assert shortened_output(b"HEAD\r\r\rT", truncated=True, chars=4, at_end=True) == "T"
    assert shortened_output(b"H\r\r\rTAIL", truncated=True, chars=4, at_end=False) == "H"
    assert shortened_output(b"H\r\r\rTAIL", truncated=False, chars=4, at_end=False) == "HTAI"


def test_output_is_cleaned():
    assert clean(b"\x1b[1;31mred\x1b[0m\r\nb\xff \x1b]0;title\x07\n\n") == "red\nb\ufffd"


def test_kinds_of_what_the_harness_says(attempt):
    """ECHO's parser errors count as the environment's words, its list of warnings does not."""
    (step, _), _, environment = attempt("nothing", "<done>")
    assert step.observation.parts == (("<out>no command</out>\n", TokenKind.WARNING),)
    assert environment.counters["invalid_actions"] == 1
    (step, run, _), _, environment = attempt(
        "ls", dialogue.action("qwen3_xml", "cat a"), dialogue.finish("qwen3_xml"), tools="qwen3_xml"
    )
    warned = ("WARNINGS:\n- Missing <think> block.\n\n", TokenKind.WARNING)
    assert step.observation.parts == (warned, ("No <tool_call> found in response.", TokenKind.OBSERVATION))
    assert run.observation.parts[0] == warned and run.observation.parts[1][1] == TokenKind.OBSERVATION
    assert environment.counters["warnings"] == 3


def test_settings_that_cannot_work_are_refused():
    raw = endless_terminals.get_config()
    raw.env.agent_timeout_s = 500.0
    with pytest.raises(ConfigError, match="agent_timeout_s=500 must be less than"):
        schema.parse(raw)
    here = Opening(None, [Task("q", "Who?", ("me",))], None, print)
    with pytest.raises(ConfigError, match="no 'terminal' object"), make_config().env.open(here):
        pass


def harbor(folder):
    """A task with an image of its own: a file that only the image has must be copied."""
    for name, text in {
        "task.toml": '[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n',
        "instruction.md": "Copy /srv/given to /home/user/taken.",
        "environment/Dockerfile": "FROM base\n",
        "tests/test.sh": "echo 0.25 > /logs/verifier/reward.txt\n"
        "grep -qx 'from the image' /home/user/taken && cp /tests/full /logs/verifier/reward.txt\nexit 0\n",
        "tests/full": "0.75\n",
        "solution/solve.sh": "cp /srv/given /home/user/taken\n",
    }.items():
        path = folder / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Task(
        "copy", "Copy /srv/given to /home/user/taken.", (), "harbor", {"terminal": {"folder": str(folder / "copy")}}
    )


@pytest.fixture
def layered(opened, tmp_path):
    """A Harbor task whose image is a layer that is there."""
    sandboxes, _ = opened
    if sandboxes._backend.name != "namespaces":
        pytest.skip("the back end that works here has no layers")
    layers = tmp_path / "layers"
    (layers / "copy/srv").mkdir(parents=True)
    (layers / "copy/srv/given").write_text("from the image\n")
    for path in [tmp_path, *tmp_path.parents]:  # the sandboxes' user must reach the layer
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    software = sandboxes._software
    sandboxes._software = dataclasses.replace(software, layers=str(layers))
    try:
        yield harbor(tmp_path)
    finally:
        sandboxes._software = software


def test_a_task_with_an_image_that_is_not_there(attempt, tmp_path):
    with pytest.raises(SandboxError, match="copy has an image of its own"):
        attempt("<done>", of=harbor(tmp_path))


def test_a_task_with_an_image_of_its_own(attempt, layered):
    said = (cmd("ls /tests; ls /logs"), cmd("cp /srv/given /home/user/taken"), "<done>")
    steps, verdict, _ = attempt(*said, of=layered, solved_reward=0.5)
    assert "/tests" in steps[0].observation.text and "No such file" in steps[0].observation.text  # not there yet
    assert verdict.reward == 0.75 and verdict.components == {"solved": 1.0}


REWARD, CLOSED = "/logs/verifier/reward.txt", "/logs/verifier/x"
FORGE = f"echo 'echo 1 > {REWARD}' > /tests/test.sh"
PREPARATIONS = {
    "forged reward": f"mkdir -p /logs/verifier; echo 1 > {REWARD}",
    "forged reward beside it": "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "reward folder is a link": "mkdir -p /logs mine; ln -s ~/mine /logs/verifier; echo 1 > mine/reward.txt",
    "logs are a link": "mkdir -p mine/verifier; ln -s ~/mine /logs; echo 1 > mine/verifier/reward.txt; chmod 555 mine",
    "logs are a file": "touch /logs",
    "reward in a closed folder": f"mkdir -p {CLOSED}; touch {CLOSED}/y; chmod 0 {CLOSED} /logs/verifier /logs",
    "tests already there": f"mkdir -p /tests/x; {FORGE}; touch /tests/x/y; chmod 444 /tests/test.sh; "
    "chmod 555 /tests/x /tests /",
    "tests are a link": f"mkdir mine; ln -s ~/mine /tests; {FORGE}",
    "rewritten by a daemon": 'setsid sh -c \'trap "" HUP TERM; while :; do mkdir -p /tests /logs/verifier; '
    f"echo true > /tests/test.sh; echo 1 > {REWARD}; done' >/dev/null 2>&1 & sleep 0.1",
    "shell prepared": "for f in .bashrc .profile .bash_profile .env; do echo 'exit 0' > $f; done; "
    "export BASH_ENV=~/.env ENV=~/.env; grep() { :; }; export -f grep; mkdir bin; printf '#!/bin/sh\\n' > bin/grep; "
    "chmod 755 bin/grep; export PATH=~/bin:$PATH",
}


@pytest.mark.parametrize("preparation", PREPARATIONS)
def test_a_prepared_verifier_is_not_believed(attempt, layered, preparation):
    """The honest test says 0.25, whatever stands ready; nor can an agent turn its failure into an error."""
    steps, verdict, _ = attempt(cmd(PREPARATIONS[preparation]), "<done>", of=layered)
    assert "exit_code" not in steps[0].observation.text, steps[0].observation.text
    assert getattr(verdict, "reward", verdict) == 0.25


def test_a_test_of_the_hosts_files_is_refused(attempt, layered, tmp_path):
    (tmp_path / "secret").write_text("of the host")
    tests = tmp_path / "copy" / "tests"
    (tests / "same").symlink_to("full")  # a link inside its own folder is a file
    _, verdict, _ = attempt("<done>", of=layered)
    assert verdict.reward == 0.25
    (tests / "link").symlink_to(tmp_path / "secret")
    _, failure, _ = attempt("<done>", of=layered)
    assert isinstance(failure, VerifierError) and "leads out" in str(failure)


def test_images_are_built(opened, attempt, tmp_path):
    """A Dockerfile's layers are what the attempt starts from; one that cannot be built is a named failure."""
    sandboxes, workers = opened
    if sandboxes._backend.name != "namespaces":
        pytest.skip("the back end that works here has no layers")
    of = harbor(tmp_path)
    dockerfile = tmp_path / "copy/environment/Dockerfile"
    dockerfile.write_text("FROM base\nENV WORD='from the image'\nWORKDIR /srv\nRUN echo $WORD > given; ls /root\n")
    folder = Path(tempfile.mkdtemp(prefix="jaxagent-test-images-"))  # pytest's own is closed to the sandboxes' user
    env, lines = make_config(solved_reward=0.5).env, []
    sandbox = dataclasses.replace(env.sandbox, software=SoftwareConfig(images=str(folder), bases=("base=host",)))
    env = dataclasses.replace(env, sandbox=sandbox)
    place = str(harbor_copy(tmp_path, "broken", "RUN false"))
    broken = Task("broken", "x", (), "harbor", {"terminal": {"folder": place}})
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        begin = stack.enter_context(env.open(Opening(None, [of, broken, task()], workers.run, lines.append)))
        second = begin(task())._take
        assert lines[-1].startswith("images of 2 tasks: 1 built, 0 found, 1 failed\n  image broken: step 1 (RUN false)")
        said = (cmd("pwd; id -u; cat given"), cmd("mkdir -p /home/user; cp /srv/given /home/user/taken"), "<done>")
        steps, verdict, _ = attempt(*said, of=of, by=second, solved_reward=0.5)
        assert "/srv\n0\nfrom the image" in steps[0].observation.text
        assert verdict.reward == 0.75 and verdict.components == {"solved": 1.0}
        with pytest.raises(SandboxError, match=r"broken: image broken: step 1 \(RUN false\) ended with status 1"):
            attempt("<done>", of=broken, by=second)


def harbor_copy(folder, name, line):
    """The task of `harbor` by another name, with one more line in its Dockerfile."""
    shutil.copytree(folder / "copy", folder / name)
    (folder / name / "environment/Dockerfile").write_text(f"FROM base\n{line}\n")
    return folder / name


def test_a_whole_rollout(opened):
    """Through MultiTurn: tokens, kinds, and the four ways in which an episode can end without an answer."""
    sandboxes, workers = opened
    tokenizer = Tokenizer.train(["Rename the file a to b. mv a b sleep 60"] * 20, 400, dialogue.TAGS["plain"])

    def play(*moves, of=None, **changes):
        cfg = make_config(**changes)
        policy = ScriptedPolicy(tokenizer, lambda task_id, sample: moves)
        rollout = MultiTurn(
            begin=lambda t: TerminalAttempt(t, cfg.env, taken_from(sandboxes)),
            policy=policy,
            tokenizer=tokenizer,
            template=Plain(),
            config=cfg.env,
            sampling=cfg.rl.sampling,
            request_timeout_s=10.0,
        )
        return workers.collect([of or task()], 1, rollout, TIMEOUT_S)[0].episodes[0]

    episode = play(cmd("mv a b"), "<done>")
    assert episode.stop_reason == StopReason.ANSWER and episode.reward == 1.0 and episode.rewards == {"solved": 1.0}
    assert episode.text == "Rename the file a to b.\n<cmd>mv a b</cmd><out></out>\n<done>"
    trajectory = episode.trajectories[0]
    seen = tokenizer.decode(trajectory.tokens[trajectory.kinds == TokenKind.OBSERVATION])
    assert seen == "<out></out>\n" and episode.metrics["commands"] == 1.0
    long = play(cmd("mv a b"), "a b " * 20)  # more tokens than a turn has
    assert (long.stop_reason, long.reward, long.metrics["unverified"]) == (StopReason.TOKEN_LIMIT, 0.0, 1.0)
    assert play(cmd("mv a b"), "a b " * 20, verify_overlong=True).reward == 1.0
    late = play(cmd("mv a b; sleep 60"), agent_timeout_s=1.0)
    assert (late.stop_reason, late.reward) == (StopReason.TIME_LIMIT, 0.0)
    broken = play("<done>", of=task(final_test="raise SystemExit(2)"))
    assert broken.stop_reason == StopReason.ENV_ERROR and "must exit with 0 or 1" in broken.error
