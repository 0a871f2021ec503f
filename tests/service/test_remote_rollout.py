"""The trainer's side: groups through the service are the groups of a local rollout; failures keep their reasons; a
node's agent reaches the trainer's policy, and what it sampled comes back token for token."""

import asyncio
import contextlib
import dataclasses

import aiohttp
import numpy as np
import pytest

from jaxagent.algorithms.estimators import LeaveOneOutStd
from jaxagent.algorithms.streams import rewards
from jaxagent.config import ConfigError, EnvConfig
from jaxagent.io.http import HttpStatus
from jaxagent.rollout.groups import Failures, usable
from jaxagent.rollout.templates import Plain
from jaxagent.rollout.workers import ENOUGH, Workers, run_groups
from jaxagent.service import remote_rollout
from jaxagent.service.gateway_client import GatewayClient
from jaxagent.service.play import of_rollout
from jaxagent.service.remote_rollout import RemoteRollout, ServiceConfig, Shared
from jaxagent.service.states import State
from jaxagent.types import Episode, StopReason, Task
from tests.gateway import world
from tests.gateway.scripted import Scripted
from tests.service.cluster import TOKEN, episode, playing, same, serving, until

TASKS = [Task(f"row {i}/a", f"question {i}", ("x",), metadata={"i": i}) for i in range(3)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(EnvConfig):
    service: ServiceConfig


@contextlib.asynccontextmanager
async def rollouts(tmp_path, url, policy=None, **service):
    """group size -> the rollout of a step."""
    (tmp_path / "token").write_text(TOKEN)
    settings = Settings(service=ServiceConfig(url, str(tmp_path / "token"), **service))
    shared = Shared(lambda line: None)

    def rollout(group_size):
        fields = (
            lambda task: None,
            policy,
            world.tokenizer(),
            Plain(),
            settings,
            world.SAMPLING,
            60.0,
        )
        return RemoteRollout(*fields, shared=shared, group_size=group_size)

    try:
        yield rollout
    finally:
        await shared.close()


def ways(task: Task, sample: int) -> Episode:
    """Rewards 0 to 2, and every third attempt fails."""
    if sample % 3 == 2:
        return episode(task, sample, 0.0, StopReason.ENV_ERROR)
    return episode(task, sample, float(sample % 3))


async def local(task, sample):
    return ways(task, sample)


async def test_groups_through_the_service_are_those_of_a_local_rollout(tmp_path):
    async with (
        serving(tmp_path / "s") as service,
        playing(service.url, of_rollout(local), "a"),
        playing(service.url, of_rollout(local), "b"),
        rollouts(tmp_path, service.url) as rollout,
    ):
        here = await run_groups(TASKS, 4, local, 12, 60)
        for concurrency in (12, 1):  # also where attempts at a task are not wanted at the same time
            there = await run_groups(TASKS, 4, rollout(4), concurrency, 60)
            for a, b in zip(here, there, strict=True):
                assert a.task == b.task and len(a.valid) == len(b.valid)
                for x, y in zip(a.episodes, b.episodes, strict=True):
                    assert y.metrics == {"service_attempts": 1.0, "service_losses": 0.0}
                    assert same(x, dataclasses.replace(y, metrics=x.metrics))
            np.testing.assert_array_equal(LeaveOneOutStd()(*rewards(here)), LeaveOneOutStd()(*rewards(there)))
        second_step = rollout(4)
        got = await asyncio.gather(*[second_step(TASKS[0], 40 + i) for i in range(4)])
        assert [e.sample for e in got] == [40, 41, 42, 43]
        assert (await service.client.status())["tasks"] == {"completed": 7}


@pytest.mark.parametrize(("fraction", "valid"), [(0.0, 1), (0.25, 0)])
async def test_one_usable_session_of_eight(tmp_path, fraction, valid):
    """At 0 the one is the group: alone it has no advantage. At 1/4 the group is not accepted: nothing of it counts."""

    async def one(task, sample):
        return episode(task, sample, 1.0, StopReason.ANSWER if sample == 5 else StopReason.ENV_ERROR)

    async with (
        serving(tmp_path / "s") as service,
        playing(service.url, of_rollout(one)),
        rollouts(tmp_path, service.url, min_complete_accept_fraction=fraction) as rollout,
    ):
        (group,) = await run_groups(TASKS[:1], 8, rollout(8), 8, 60)
        assert len(group.episodes) == 8 and len(group.valid) == valid
        assert all(e.error for e in group.episodes if e.stop_reason.is_failure)
        assert "it failed on purpose" in Failures.of(group.episodes).reason
        assert not LeaveOneOutStd()(*rewards([group])).any()
        assert usable([group], 2, 1) == []
        if not valid:
            assert "1 of 8 sessions are usable, 2 are needed" in group.episodes[5].error


async def test_an_early_stop_leaves_the_slow_ones_out(tmp_path):
    async def slow(task, sample):
        await asyncio.sleep(0 if sample < 5 else 3600)
        return episode(task, sample, float(sample % 2))

    async with (
        serving(tmp_path / "s") as service,
        playing(service.url, of_rollout(slow), places=(8, 8, 8)),
        rollouts(tmp_path, service.url, min_complete_accept_fraction=0.25) as rollout,
    ):
        (group,) = await run_groups(TASKS[:1], 8, rollout(8), 8, 60)
        assert len(group.valid) == 4  # ceil(8 / 4) + 2
        rest = [e for e in group.episodes if e.stop_reason.is_failure]
        assert {(e.stop_reason, e.error) for e in rest} == {(StopReason.CANCELLED, ENOUGH)}
        assert Failures.of(group.episodes).failed == 0  # nobody failed


async def test_a_service_that_is_not_there_or_never_ends_is_data(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_rollout, "POLL_S", 1.0)

    async with serving(tmp_path / "s") as service:
        async with rollouts(tmp_path, service.url, group_s=0.3) as rollout:
            (group,) = await run_groups(TASKS[:1], 2, rollout(2), 2, 60)
            assert {e.stop_reason for e in group.episodes} == {StopReason.TIMEOUT}
            assert "did not end the group in 0.3 s" in group.episodes[0].error
            assert (await service.client.status())["tasks"] == {"failed": 1}  # nobody plays it later
        service.api._token = b"the token of another service"
        async with rollouts(tmp_path, service.url) as rollout:
            (group,) = await run_groups(TASKS[:1], 2, rollout(2), 2, 60)
            assert {e.stop_reason for e in group.episodes} == {StopReason.ENV_ERROR}
            assert "401" in group.episodes[0].error
    async with rollouts(tmp_path, "http://127.0.0.1:1", group_s=0.3) as rollout:
        (group,) = await run_groups(TASKS[:1], 2, rollout(2), 2, 60)
        assert {e.stop_reason for e in group.episodes} == {StopReason.TIMEOUT}
    (tmp_path / "token").unlink()
    with pytest.raises(ConfigError, match="token"):
        await Shared(print).client(rollout(2))


async def test_what_nobody_waits_for_is_cancelled(tmp_path):
    async with serving(tmp_path / "s") as service, rollouts(tmp_path, service.url) as rollout:
        groups = await run_groups(TASKS, 2, rollout(2), 6, 0.5)
        assert {e.stop_reason for g in groups for e in g.episodes} == {StopReason.CANCELLED}

        async def all_cancelled():
            return (await service.client.status())["sessions"] == {"CANCELLED": 6}

        await until(all_cancelled)
        once = rollout(2)
        first, second = asyncio.create_task(once(TASKS[0], 0)), asyncio.create_task(once(TASKS[0], 1))
        await until(lambda: asyncio.sleep(0, once.begun and once.begun["row 0/a", 0].waiting == 2))
        first.cancel()
        await asyncio.sleep(0.1)
        assert not second.done()  # one still waits
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await asyncio.wait([once.begun["row 0/a", 0].playing], timeout=30)
        late = await once(TASKS[0], 1)
        assert late.stop_reason is StopReason.CANCELLED


async def test_an_agent_on_a_node_reaches_the_trainers_policy(tmp_path):
    """The agent is a plain HTTP client; its session's trajectories come back through gateway, node and server."""
    (tmp_path / "admin").write_text("the admin token of the gateway")
    policy = Scripted(world.tokenizer(), lambda context, turn: f"the quick fox {turn}")

    async with (
        serving(tmp_path / "s") as service,
        rollouts(tmp_path, service.url, policy, gateway_token_file=str(tmp_path / "admin")) as rollout,
    ):
        step = rollout(2)
        await step.shared.client(step)
        url = step.shared._gateway.url

        async def play(work, phases):
            gateway = GatewayClient(url, "the admin token of the gateway")
            session = await gateway.open(work.task.id, work.number, work.group_size, "")
            await phases.enter(State.RUNNING)
            said = []
            async with aiohttp.ClientSession(url) as program:
                for _ in range(2):
                    said.append({"role": "user", "content": work.task.prompt})
                    status, answer = await world.post(program, session.token, messages=said)
                    assert status == 200
                    said.append(answer["choices"][0]["message"])
            await phases.enter(State.EVALUATING)
            sampled = await gateway.trajectories(session)
            again = await gateway.trajectories(session)
            assert len(again.trajectories) == len(sampled.trajectories)
            await gateway.remove(session)
            await gateway.remove(session)
            with pytest.raises(HttpStatus, match="404"):
                await gateway.trajectories(session)
            with pytest.raises(HttpStatus, match="401"):
                await GatewayClient(url, session.token).open("t", 0, 1, "")
            await gateway.close()
            found = sampled.trajectories
            counters = {"requests": sampled.counters["requests"]}
            return Episode(work.task, work.number, found, 1.0, {}, StopReason.ANSWER, 2, counters)

        async with playing(service.url, play):
            got = await asyncio.gather(*[step(TASKS[0], 6 + i) for i in range(2)])
        for sample, one in zip((6, 7), got, strict=True):
            assert (one.stop_reason, one.error, one.metrics["requests"]) == (StopReason.ANSWER, "", 2.0)
            assert len(one.trajectories) == 1
            world.check(policy, one.trajectories, TASKS[0].id, sample)


async def test_the_gateway_refuses_a_session_of_nothing(tmp_path):
    (tmp_path / "admin").write_text("the admin token of the gateway")

    admin = {"gateway_token_file": str(tmp_path / "admin")}
    async with rollouts(tmp_path, "http://127.0.0.1:1", object(), **admin) as rollout:
        step = rollout(2)
        await step.shared.client(step)
        client = GatewayClient(step.shared._gateway.url, "the admin token of the gateway")
        with pytest.raises(HttpStatus, match="'sample' must be int"):
            await client.open("t", "0", 1, "")
        await client.close()


def test_a_run_opens_and_closes_what_its_rollouts_share():
    with Workers(1) as workers, RemoteRollout.open_shared(workers, print) as shared:
        assert isinstance(shared, Shared)
