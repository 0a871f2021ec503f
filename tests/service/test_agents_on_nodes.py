"""Agent programs on a node, in real sandboxes, whose policy is at the trainer's gateway: as they are at home."""

import asyncio
import dataclasses
import types

import pytest

from jaxagent.agents.programs import Command
from jaxagent.agents.shell import Shell
from jaxagent.config import ConfigError
from jaxagent.engine.requests import EngineError
from jaxagent.io.http import HttpUnreachable
from jaxagent.rollout.templates import Plain
from jaxagent.sandbox import choose
from jaxagent.sandbox.base import SandboxLost
from jaxagent.service.agents import play_of, player
from jaxagent.service.gateway_client import GatewayClient
from jaxagent.service.play import Here
from jaxagent.service.remote_rollout import RemoteRollout, ServiceConfig, Shared
from jaxagent.types import StopReason, Task
from tests.gateway import world
from tests.gateway.conftest import machines, scene  # noqa: F401  (fixtures)
from tests.gateway.episodes import CONFIG, Attempt, has_hello, says
from tests.gateway.scripted import Scripted
from tests.service.cluster import TOKEN, playing, serving
from tests.service.test_remote_rollout import Settings

ADMIN = "the admin token of the gateway"
SOLVES = "<cmd>echo hello > hello.txt</cmd>", "<done>"
TASK = Task("task", "write hello", (), metadata={"domain": "d"})


def remotely(machines, tmp_path, reply, agent=None, client=GatewayClient, run_s=30.0, judge=has_hello, **service):  # noqa: F811
    """(the episode of sample 3, the policy, the server's view of its session) by way of server, node and gateway."""
    runner, backend = machines
    policy = Scripted(world.tokenizer(), reply)
    attempts = []

    def begin(task):
        how = agent or Shell(python="/usr/bin/python3")
        attempts.append(Attempt(backend, choose.Spec(), how, run_s=run_s, judge=judge))
        return attempts[-1]

    async def main():
        for name, secret in (("token", TOKEN), ("admin", ADMIN)):
            (tmp_path / name).write_text(secret)
        shared = Shared(lambda line: None)
        async with serving(tmp_path / "s") as server:
            where = ServiceConfig(
                server.url, str(tmp_path / "token"), gateway_token_file=str(tmp_path / "admin"), **service
            )
            settings = Settings(**{f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG)}, service=where)
            fields = (None, policy, world.tokenizer(), Plain(), settings, world.SAMPLING, 30.0)
            rollout = RemoteRollout(*fields, shared=shared)
            object.__setattr__(rollout, "renderer", world.renderer())
            await shared.client(rollout)
            gateway = client(shared._gateway.url, ADMIN)
            async with playing(server.url, play_of(CONFIG, begin, gateway)):
                episode = await rollout(TASK, 3)
                (task,) = (await server.client._ask("GET", "/tasks"))["tasks"]
                (session,) = (await server.client.task(task["task_id"]))["results"]
            await gateway.close()
            assert shared._gateway.sessions == (client is not GatewayClient), "a session stays"
            await shared.close()
        assert all(attempt.closed == 1 and attempt.sandbox.is_closed for attempt in attempts)
        return episode, policy, session

    return runner.run(asyncio.wait_for(main(), 120))


def test_an_agent_elsewhere_plays_the_same_episode(machines, scene, tmp_path):  # noqa: F811
    at_home = scene.play(says(*SOLVES))
    episode, policy, session = remotely(machines, tmp_path, says(*SOLVES))
    assert (episode.stop_reason, episode.reward, episode.rewards) == (StopReason.ANSWER, 1.0, {"solved": 1.0})
    assert (session["state"], session["usable"]) == ("COMPLETED", True)
    world.check(policy, episode.trajectories, "task", 3)
    (one,), (other,) = at_home.trajectories, episode.trajectories
    assert one.tokens.tolist() == other.tokens.tolist() and one.logprobs.tolist() == other.logprobs.tolist()
    assert (episode.text, episode.turns) == (at_home.text, at_home.turns)
    same = ("requests", "exit_status", "action_tokens", "observation_tokens", "forks", "seen")
    assert [episode.metrics[name] for name in same] == [at_home.metrics[name] for name in same]


def test_the_agents_time_is_the_submissions_and_what_it_sampled_is_kept(machines, tmp_path):  # noqa: F811
    endless = says("<cmd>echo hello > hello.txt; sleep 60</cmd>")
    episode, policy, session = remotely(machines, tmp_path, endless, run_s=3600.0, agent_timeout_s=3.0)
    assert (episode.stop_reason, episode.reward) == (StopReason.TIME_LIMIT, 1.0)  # judged by the environment
    assert (session["state"], session["usable"], session["stop_reason"]) == ("COMPLETED", True, "time_limit")
    world.check(policy, episode.trajectories, "task", 3)


@pytest.mark.parametrize(
    ("reply", "agent", "reason", "told"),
    [
        (says(EngineError("no weights")), None, StopReason.ENGINE_ERROR, "no weights"),
        (says("x"), Command(words=("/bin/false",)), StopReason.ENV_ERROR, "without an answer"),
    ],
)
def test_a_failure_keeps_its_reason(machines, tmp_path, reply, agent, reason, told):  # noqa: F811
    episode, _, session = remotely(machines, tmp_path, reply, agent)
    assert episode.stop_reason is reason and told in episode.error
    assert (session["state"], session["usable"]) == ("ERROR", False) and told in session["reason"]


def test_an_attempt_that_loses_its_sandbox_is_played_again_where_it_was(machines, tmp_path):  # noqa: F811
    judged = []

    async def lost_at_first(sandbox):
        judged.append(sandbox)
        if len(judged) < 3:
            raise SandboxLost("its host is gone")
        return await has_hello(sandbox)

    episode, policy, session = remotely(machines, tmp_path, says(*SOLVES), judge=lost_at_first)
    assert (episode.reward, episode.error, session["usable"], len(judged)) == (1.0, "", True, 3)
    world.check(policy, episode.trajectories, "task", 3, given_up=4)


class Gone(GatewayClient):
    """A gateway that is gone when the agent has ended."""

    async def trajectories(self, session):
        raise HttpUnreachable("the gateway is gone")


def test_a_gateway_that_is_gone_costs_one_attempt_and_no_sandbox(machines, tmp_path):  # noqa: F811
    episode, _, session = remotely(machines, tmp_path, says(*SOLVES), client=Gone)
    assert episode.stop_reason is StopReason.ENV_ERROR and "the gateway is gone" in episode.error
    assert (session["state"], session["usable"]) == ("ERROR", False)


def test_the_player_says_what_it_needs():
    from jaxagent.envs.search.environment import Search

    def config(env):
        return types.SimpleNamespace(env=env)

    for here, told in [
        (Here(None, None), "--config"),
        (Here(config(Search()), None), "--gateway_url"),
        (Here(config(Search()), None, "http://h", "t" * 20), "plays no agent programs"),
    ]:
        with pytest.raises(ConfigError, match=told), player(here):
            pass
