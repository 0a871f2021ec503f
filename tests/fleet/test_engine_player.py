"""A real engine that plays what a coordinator gives out: its episodes are those of a run of one process, bit by bit."""

import asyncio
import dataclasses
import functools
import threading
import types

import pytest

pytest.importorskip("jax")

import jax
import numpy as np

from jaxagent.config import ConfigError, flags
from jaxagent.data import codec
from jaxagent.fleet import manifest, weights
from jaxagent.fleet.admission import LeasedEpisode
from jaxagent.fleet.plan import EpisodeId, GroupId
from jaxagent.fleet.weight_fetch import WeightFetcher
from jaxagent.fleet.weight_server import WeightServer
from jaxagent.fleet.wire import Job, Sources, TaskRef
from jaxagent.rollout.experience import Experience
from jaxagent.runs import attempts
from jaxagent.runs.attempts import collect
from jaxagent.runs.fleet import player as player_of
from jaxagent.runs.fleet import probe, trees
from jaxagent.runs.fleet.engine_weights import EngineVersions, VersionReader, blank, place
from jaxagent.runs.fleet.player import EnginePlayer
from jaxagent.runs.parts import open_parts
from jaxagent.sandbox.base import SandboxLost
from jaxagent.types import Episode, StopReason, Task
from tests.fleet.test_trainer_seams import CFG
from tests.fleet.test_weight_http import until
from tests.tiny_run import argv

STEP, TOKEN = 1, "a secret of the run"


class Link:
    """Knows the versions of a trainer that serves them over HTTP alone."""

    def __init__(self, url):
        self.url, self.digests = url, {}

    def weights(self, version):
        return Sources(version, self.digests[version], "run", (self.url,)) if version in self.digests else None


def played(player, jobs):
    """The packed results of jobs, in order, each with its version."""
    found, all_done = {}, threading.Event()

    def done(lease, packed, version):
        found[lease] = (packed, version)
        if len(found) == len(jobs):
            all_done.set()

    for job in jobs:
        player.play(job, lambda packed, version, lease=job.work.lease: done(lease, packed, version))
    assert all_done.wait(120)
    return [found[job.work.lease] for job in jobs]


@pytest.mark.slow
def test_an_engine_plays_what_a_run_of_one_process_plays_with_the_same_weights(tmp_path):
    cfg = flags.parse_argv(argv(tmp_path / "run", "--config.stages=rl", "--config.fleet=on")).config
    trainers, own = tmp_path / "trainer", tmp_path / "engine"
    with open_parts(cfg, print) as parts, WeightServer([trainers], TOKEN) as server:
        link, policy = Link(server.url), parts.init_params()
        for version in (0, 1):
            tree = trees.paths(jax.device_get(policy))
            tree["final_norm",] = tree["final_norm",] * np.float32(1 + version)
            link.digests[version] = weights.publish(trainers, manifest.shares(tree), "run", version).digest
        with parts.engine(place(tree, parts.spec, parts.mesh), 1) as driver:
            expected = collect(parts, driver, Experience(parts.train, cfg), STEP).chosen.sampled
            driver.update_params(policy, 0)
            probe.record(trainers, parts, driver, {"jaxlib": "theirs"})
            recorded = (trainers / probe.FILE).read_bytes()
            driver.update_params(place(tree, parts.spec, parts.mesh), 1)  # a trainer that goes on elsewhere with it
            again = functools.partial(probe.record, trainers, parts, driver, {"jaxlib": "another"})
            probe.renew(trainers, driver, again, policy)
            renewed = (trainers / probe.FILE).read_bytes()
            assert renewed == recorded.replace(b"theirs", b"another") != recorded
            assert "facts alone" in probe.renew(trainers, driver, again, None)
            assert not (trainers / probe.FILE).exists()
        jobs = [
            Job(
                LeasedEpisode(EpisodeId(GroupId(STEP, 0, number), sample), f"0-{4 * number + sample}", 1),
                TaskRef([task.id for task in parts.train].index(group.task.id), group.task.id),
            )
            for number, group in enumerate(expected)
            for sample in range(attempts.of_a_group(cfg.rl))
        ]
        with parts.engine(blank(parts.spec, parts.mesh), -1) as driver:
            fetcher = WeightFetcher(own, TOKEN)
            versions = EngineVersions(
                cfg, parts.spec, parts.mesh, link, VersionReader(tmp_path / "none", own, fetcher, 60.0)
            )
            player = EnginePlayer(parts, driver, versions, lambda: recorded, {"jaxlib": "ours"})
            player.hold(1)
            results = played(player, jobs)
            assert player.numbers()["progress"] > 0 and versions.versions_to_hand_on() == [0, 1]
            later = {**tree, ("final_norm",): 3 * tree["final_norm",]}
            link.digests[2] = weights.publish(trainers, manifest.shares(later), "run", 2).digest
            player.expect(2)
            until(lambda: weights.versions(own) == [0, 1, 2])

            with pytest.raises(ConfigError, match="has other data"):
                player.play(Job(jobs[0].work, TaskRef(jobs[0].task.row, "another")), lambda *_: None)

            driver.update_params(place(tree, parts.spec, parts.mesh), 1)
            other = EnginePlayer(parts, driver, versions, lambda: spoilt(recorded), {"jaxlib": "ours"})
            with pytest.raises(ConfigError, match="jaxlib is 'ours' here and 'theirs' there"):
                other.hold(1)
    assert {version for _, version in results} == {1}
    every = [episode for group in expected for episode in group.episodes]
    assert [packed.digest for packed, _ in results] == [codec.pack(episode).digest for episode in every]
    assert sum(len(trajectory) for episode in every for trajectory in episode.trajectories) > 100


def spoilt(recorded):
    """The trainer's probe with one bit of one log-prob changed, as its digest tells."""
    digest = recorded.split(b'"digest": "')[1][:1]
    return recorded.replace(b'"digest": "' + digest, b'"digest": "' + (b"0" if digest != b"0" else b"1"))


class Clock(asyncio.SelectorEventLoop):
    """A loop in which time passes when somebody says so."""

    now = 0.0

    def time(self):
        return self.now


@pytest.mark.parametrize(("takes_s", "cut_off"), [(60.0, 0), (130.0, 1)])
def test_an_attempt_whose_sandbox_was_lost_has_its_whole_time_again(takes_s, cut_off):
    env = dataclasses.replace(CFG.env, episode_timeout_s=100.0 - player_of.STOP_TIMEOUT_S)
    of = EnginePlayer(types.SimpleNamespace(cfg=dataclasses.replace(CFG, env=env)), None, None, None, {})
    plays = []

    async def attempt(task, sample):
        plays.append(sample)
        asyncio.get_running_loop().now += 60.0 if len(plays) == 1 else takes_s
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if len(plays) == 1:
            raise SandboxLost("its worker is gone")
        return Episode(task, sample, (), 1.0, {}, StopReason.ANSWER, 1)

    with asyncio.Runner(loop_factory=Clock) as runner:
        found = runner.run(of._in_time(Task("t", "?", ()), 3, attempt))
    assert plays == [3, 3] and of._counts["cut_off"] == cut_off
    assert found.stop_reason is (StopReason.CANCELLED if cut_off else StopReason.ANSWER)
