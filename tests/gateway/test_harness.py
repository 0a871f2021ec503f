"""Agent programs in real sandboxes over a scripted policy: how episodes end, and that nothing is left of them."""

import asyncio
import dataclasses

import pytest

from jaxagent.agents.programs import Command
from jaxagent.config import ConfigError
from jaxagent.engine.requests import EngineError
from jaxagent.gateway import harness
from jaxagent.gateway.harness import HarnessRollout
from jaxagent.rollout.episode import ForcedTools
from jaxagent.rollout.workers import guarded
from jaxagent.sandbox.base import SandboxClosed, SandboxLost
from jaxagent.types import StopReason
from tests.gateway import world
from tests.gateway.episodes import CONFIG, TASK, says

BREAKS = "echo broken >&2; exit 3"
SOLVES = "<cmd>echo hello > hello.txt</cmd>", "<done>"
ASK = """
import json, os, urllib.request
def ask(text="go"):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
"""


async def one(sandbox):
    return 1.0


async def hangs(sandbox=None):
    await asyncio.Event().wait()


def script(text, first="ask()\n"):
    """An agent program of one's own, in Python, that asks once and then does something."""
    return Command(words=("/usr/bin/python3", "-c", ASK + first + text))


# ---------------------------------------------------------------- what goes well


def test_an_episode_has_the_engines_tokens_and_the_verdict(scene):
    episode = scene.play(says(*SOLVES))
    assert (episode.stop_reason, episode.reward, episode.rewards) == (StopReason.ANSWER, 1.0, {"solved": 1.0})
    assert episode.error == "" and episode.turns == 2 and episode.sample == 3
    world.check(scene.policy, episode.trajectories, "task", 3)
    (trajectory,) = episode.trajectories
    text = world.tokenizer().decode(trajectory.tokens.tolist())
    assert episode.text == text and "write hello" in text and "[exit status 0]" in text
    metrics = episode.metrics
    assert (metrics["requests"], metrics["trajectories"], metrics["exit_status"], metrics["seen"]) == (2, 1, 0, 1)
    assert metrics["action_tokens"] == trajectory.action_mask.sum() and metrics["observation_tokens"] > 0
    assert {"init_s", "run_s", "verify_s", "total_s", "side_requests", "retries_joined", "forks"} <= metrics.keys()
    assert {turn.sampling for turn in scene.policy.turns} == {world.SAMPLING}


def restarting(scene, again):
    """Plays an episode whose gateway stops while its second answer is on the way; `again`: and comes back."""

    async def around(rollout):
        episode = asyncio.create_task(rollout(TASK, 3))
        while not scene.policy.done:
            await asyncio.sleep(0.01)
        scene.policy.gate.clear()
        while len(scene.policy.turns) < 2:
            await asyncio.sleep(0.01)
        port = int(scene.gateway.url.rpartition(":")[2])
        await scene.gateway.stop()
        if again:
            await scene.gateway.listen(port)
        scene.policy.gate.set()
        return await episode

    return scene.play(says("<cmd>sleep 1; echo hello > hello.txt</cmd>", "<done>"), around=around)


def test_the_gateway_is_restarted_in_the_middle_of_an_episode(scene):
    episode = restarting(scene, again=True)
    assert (episode.stop_reason, episode.reward) == (StopReason.ANSWER, 1.0), episode.error
    world.check(scene.policy, episode.trajectories, "task", 3)


def test_a_gateway_that_stays_away_is_no_fault_of_the_policys(scene):
    episode = restarting(scene, again=False)
    assert (episode.stop_reason, episode.reward) == (StopReason.ENGINE_ERROR, 0.0)
    assert "the gateway no longer listens" in episode.error


# ---------------------------------------------------------------- programs that do not end

HEARTBEAT = '''
import signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = """
import signal, time
for number in (1, 2, 15):
    signal.signal(number, signal.SIG_IGN)
while True:
    open('/home/user/beat', 'a').write('.')
    time.sleep(0.02)
"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", child])
    os._exit(0)
'''


async def still(sandbox):
    """Whether nothing of the program lives: what its children wrote no longer grows."""
    sizes = []
    for _ in range(2):
        sizes.append(len(await sandbox.read("/home/user/beat")))
        await asyncio.sleep(0.2)
    return float(sizes[0] == sizes[1] > 0)


@pytest.mark.parametrize("ends", [False, True])
def test_a_program_that_ignores_signals_and_leaves_children_is_gone_when_it_is_judged(scene, ends):
    wait = "time.sleep(0.5)" if ends else "while 1: time.sleep(1)"
    agent = script(HEARTBEAT + wait)
    episode = scene.play(says("hello"), agent, run_s=30.0 if ends else 3.0, judge=still)
    assert episode.stop_reason is (StopReason.ANSWER if ends else StopReason.TIME_LIMIT), episode.error
    assert episode.reward == 1.0 and len(episode.trajectories) == 1  # judged all the same: the environment's choice
    assert scene.attempts[0].ended is episode.stop_reason


def test_zombies_do_not_keep_an_episode(scene):
    episode = scene.play(says("hello"), script("for _ in range(30):\n    if os.fork() == 0: os._exit(0)\n"), judge=one)
    assert (episode.stop_reason, episode.reward) == (StopReason.ANSWER, 1.0), episode.error


def test_a_sandbox_whose_processes_do_not_stop_is_closed(scene, monkeypatch):
    monkeypatch.setattr(harness, "STOP_TIMEOUT_S", 0.2)
    started = []

    async def prepare(sandbox):
        sandbox.stop_processes = hangs
        started.append(sandbox)

    episode = scene.play(says(*SOLVES), prepare=prepare)
    assert started[0].is_closed and episode.stop_reason is StopReason.ENV_ERROR  # there is nothing left to judge
    assert "SandboxClosed" in episode.error


def test_a_program_that_outlives_its_deadline_takes_the_sandbox_with_it(scene):
    async def prepare(sandbox):
        execute = sandbox.execute

        async def late(argv, deadline_s, *rest):
            await execute(argv, deadline_s, *rest)
            raise SandboxClosed("the sandbox did not answer and was closed")

        sandbox.execute = late

    episode = scene.play(
        says("hello"), script("time.sleep(60)", "import time\nask()\n"), run_s=2.0, prepare=prepare, judge=one
    )
    assert (episode.stop_reason, episode.reward) == (StopReason.TIME_LIMIT, 1.0), episode.error


# ---------------------------------------------------------------- what says nothing about the policy


def fails(episode, reason, told):
    assert (episode.stop_reason, episode.reward, episode.rewards) == (reason, 0.0, {}), episode.error
    assert told in episode.error and "\n" not in episode.error, episode.error


async def sleeps(sandbox):
    await sandbox.execute(["sleep", "100"], 90.0, 1000)


async def no_number(sandbox):
    return float("nan")


@pytest.mark.parametrize(
    ("reason", "error", "played"),
    [
        ("TIMEOUT", "the verifier did not end after 0.5 s", dict(judge=hangs, verify_s=0.5)),
        ("TIMEOUT", "the verifier did not end after 1 s", dict(judge=sleeps, verify_s=1.0)),
        ("TIMEOUT", "place was not ready after 0.5 s", dict(prepare=hangs, init_s=0.5)),
        ("TIMEOUT", "the episode's deadline passed", dict(judge=hangs, config=dict(episode_timeout_s=1.0))),
        ("ENV_ERROR", "Attempt.verify returned a reward of nan", dict(judge=no_number)),
        ("ENV_ERROR", "first request is over env.context_tokens=30", dict(config=dict(context_tokens=30))),
        ("ENV_ERROR", "does not start: exit status 127", dict(words=("/no/such/program",))),
        ("ENV_ERROR", "does not start: exit status 126", dict(words=("/etc/passwd",))),
        ("ENV_ERROR", "without an answer: exit status 3; it printed: broken", dict(words=("sh", "-c", BREAKS))),
        ("ENV_ERROR", "without an answer: exit status 0; it printed: nothing", dict(words=("true",))),
        ("TIMEOUT", "time was over before it had an answer", dict(words=("sleep", "60"), run_s=0.5)),
    ],
)
def test_what_says_nothing_about_the_policy(scene, reason, error, played):
    more = {name: value for name, value in played.items() if name not in ("words", "config")}
    agent = Command(words=played["words"]) if "words" in played else None
    config = dataclasses.replace(CONFIG, **played.get("config", {}))
    episode = scene.play(says(*SOLVES), agent, config, **more)
    fails(episode, StopReason[reason], error)
    if agent is not None or "init_s" in more:
        assert episode.trajectories == () and scene.policy.turns == []


def test_an_engine_that_fails(scene):
    episode = scene.play(says(SOLVES[0], EngineError("out of pages")))
    fails(episode, StopReason.ENGINE_ERROR, "EngineError: out of pages")
    assert len(episode.trajectories) == 1  # data, for whoever looks at it


def test_an_engine_that_fails_until_the_programs_time_is_over(scene):
    """A program that asks again and again is no slow agent."""

    def reply(context, turn):
        if "again" in context:
            raise EngineError("out of pages")
        return "hello"

    retries = "import time\nwhile True:\n    try: ask('again')\n    except OSError: time.sleep(0.1)\n"
    episode = scene.play(reply, script(retries), run_s=4.0, judge=one)
    fails(episode, StopReason.ENGINE_ERROR, "EngineError: out of pages")


def test_an_engine_that_does_not_answer_in_time(scene):
    def stuck():
        scene.policy.gate.clear()
        return "<done>"

    fails(scene.play(says(stuck), request_timeout_s=0.5), StopReason.TIMEOUT, "")


def test_an_episode_that_is_cancelled_leaves_nothing(scene):
    async def around(rollout):
        episode = asyncio.create_task(rollout(TASK, 3))
        while not scene.policy.done:
            await asyncio.sleep(0.01)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    scene.play(says("<cmd>sleep 50</cmd>"), around=around)
    assert len(scene.attempts) == 1


# ---------------------------------------------------------------- budgets


def test_requests_that_are_used_up_end_the_episode_and_it_is_judged(scene):
    episode = scene.play(says(SOLVES[0]), config=dataclasses.replace(CONFIG, max_turns=2))
    assert (episode.stop_reason, episode.reward) == (StopReason.TURN_LIMIT, 1.0)
    assert scene.attempts[0].ended is StopReason.TURN_LIMIT and episode.turns == 2


def test_a_context_that_is_full_ends_the_episode_and_it_is_judged(scene):
    config = dataclasses.replace(CONFIG, context_tokens=700, max_turns=50)
    episode = scene.play(says(SOLVES[0]), config=config)
    assert (episode.stop_reason, episode.reward) == (StopReason.TOKEN_LIMIT, 1.0), episode.error
    assert 2 < episode.turns < 50 and all(len(trajectory) <= 700 for trajectory in episode.trajectories)


def test_forced_tool_calls_are_refused(scene):
    with pytest.raises(ConfigError, match="tool_epsilon"):
        HarnessRollout(None, None, None, None, CONFIG, world.SAMPLING, 1.0, None, forced=ForcedTools(0.1, 0))


# ---------------------------------------------------------------- what the run is told


@pytest.mark.parametrize(("first", "turns"), [("ask(3)\n", 0), ("ask()\nask(3)\n", 1)])
def test_the_gateways_reason_stands_in_the_error_of_a_program_that_it_refused(scene, first, turns):
    async def judge(sandbox):
        raise RuntimeError("the script failed")

    episode = scene.play(says("hello"), script("", first), judge=judge)
    fails(episode, StopReason.ENV_ERROR, "the gateway refused its last request: 'messages[0].content'")
    assert episode.turns == turns


@pytest.mark.parametrize("first", ["ask()\n", "ask()\nask(3)\n"])
def test_an_attempt_that_loses_its_sandbox_is_played_again_whatever_the_gateway_refused(scene, first):
    async def lost(sandbox):
        if len(scene.attempts) < 3:
            raise SandboxLost("its host is gone")
        return 1.0

    async def around(rollout):
        return await guarded(rollout, TASK, 3)

    episode = scene.play(says("hello"), script("", first), judge=lost, around=around)
    assert (episode.reward, episode.error, len(scene.attempts)) == (1.0, "", 3)


def test_turns_that_are_tokenised_again_are_counted_and_the_run_is_warned_once(scene, caplog):
    changed = """
import json, os, urllib.request
def post(*messages):
    body = json.dumps({"messages": messages}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))["choices"][0]["message"]
first = {"role": "user", "content": "go"}
post(first)
post(first, {"role": "assistant", "content": "something else"}, first)
"""

    async def around(rollout):
        return [await rollout(dataclasses.replace(TASK, id=name), 0) for name in "ab"]

    episodes = scene.play(says("hello"), Command(words=("/usr/bin/python3", "-c", changed)), around=around, judge=one)
    assert [episode.metrics["retokenised_turns"] for episode in episodes] == [1.0, 1.0], episodes
    assert [record.getMessage().count("tokenised again") for record in caplog.records].count(1) == 1
