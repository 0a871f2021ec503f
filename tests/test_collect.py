"""One step's rollouts in the loop: the same whatever order attempts end in, and after a resume."""

import asyncio
import dataclasses
import hashlib
import json
import random
import types

import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.config import flags, overrides
from jaxagent.data import files, sources
from jaxagent.rollout.experience import Experience
from jaxagent.rollout.workers import Workers, batch_deadline_s
from jaxagent.runs.attempts import collect
from jaxagent.types import Episode, StopReason, TokenKind, Trajectory
from tests import tiny_run


class MemoryRows(files.Rows):
    name = "memory"

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return {"id": f"t{index}", "prompt": "p", "answers": ["a"]}


SOURCE = sources.TaskSource(MemoryRows(12), "memory", True)
STRATEGIES = {
    "tasks_per_step": 2, "group_size": 3, "steps": 6, "refill.max_rounds": 3, "keep_groups_frac": 0.5,
    "curriculum": "learnability", "replay.per_step": 2, "replay.capacity": 7, "temperature.schedule": "linear",
    "temperature.final": 0.5, "tool_epsilon": 0.25,
}  # fmt: skip


def number(*key):
    """A number in [0, 1) of a key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little") / 2**32


class Parts:
    """What `collect` needs, with attempts whose outcome is a function of (task, attempt) and whose duration is not."""

    def __init__(self, workers, changes, slowness=0.0):
        raw = overrides.apply(get_config().to_dict(), [(f"rl.{name}", str(value)) for name, value in changes.items()])
        self.cfg, self.workers, self.heldout, self.slowness = config.parse(raw), workers, [], slowness
        self.attempts, self.sampled = [], []

    def rollout(self, driver, sampling, group_size, tool_epsilon):
        self.sampled.append((sampling.temperature, group_size, tool_epsilon))

        async def play(task, sample):
            self.attempts.append((task.id, sample))
            await asyncio.sleep(random.random() * self.slowness)
            solved = float(number(task.id, sample) < number(task.id))
            kinds = np.array([TokenKind.PROMPT, TokenKind.ACTION], np.uint8)
            tokens = np.array([int(task.id[1:]), sample], np.int32)
            zeros = np.zeros(2, np.int32)
            versions = np.array([-1, 0], np.int32)
            trajectory = Trajectory(tokens, kinds, zeros.astype(np.float32), versions, zeros)
            return Episode(task, sample, (trajectory,), solved, {}, StopReason.ANSWER, 1)

        return play


DRIVER = types.SimpleNamespace(stats=dict)


def steps_of(parts, experience, steps):
    """Per step: what was learnt from, and the metrics."""
    out = []
    for step in steps:
        rollouts = collect(parts, DRIVER, experience, step)
        chosen, metrics = rollouts.chosen, rollouts.metrics
        groups = [(g.task.id, [(e.sample, e.reward) for e in g.episodes]) for g in chosen.groups]
        replayed = [s.trajectories[0].tokens.tolist() for s in experience.replay.candidates(step)]
        out.append(json.dumps([groups, replayed, metrics | experience.record(chosen.sampled, step)]))
    return out


def test_the_same_whatever_ends_first_and_when_it_is_continued():
    runs = []
    for slots, slowness in ((32, 0.01), (2, 0.0)):
        with Workers(slots) as workers:
            parts = Parts(workers, STRATEGIES, slowness)
            runs.append(steps_of(parts, Experience(SOURCE, parts.cfg), range(6)))
    assert runs[0] == runs[1]
    with Workers(32) as workers:
        parts = Parts(workers, STRATEGIES)
        first, second = Experience(SOURCE, parts.cfg), Experience(SOURCE, parts.cfg)
        begun = steps_of(parts, first, range(3))
        saved = json.loads(json.dumps(first.get_state()))
        second.set_state(saved, 3)
        assert begun + steps_of(parts, second, range(3, 6)) == runs[0]
    metrics = [json.loads(line)[2] for line in runs[0]]
    assert max(m["sampling/rounds"] for m in metrics) > 1 and metrics[-1]["replay/size"] == 7
    assert {m["sampling/groups_trained"] for m in metrics} <= {0.0, 1.0}
    assert saved["curriculum"]["index"] and len(saved["replay"]) > 2
    assert len(set(parts.attempts)) == len(parts.attempts)  # no two attempts of a run share randomness
    assert parts.sampled[0] == (1.0, 3, 0.25) and parts.sampled[-1] == (0.5, 3, 0.25)


def test_without_strategies_attempts_are_numbered_as_ever():
    with Workers(8) as workers:
        parts = Parts(workers, {"tasks_per_step": 2, "group_size": 3})
        experience = Experience(SOURCE, parts.cfg)
        ids = [[g.task.id for g in collect(parts, DRIVER, experience, step).chosen.groups] for step in range(3)]
    expected = [(task, step * 3 + s) for step in range(3) for task in ids[step] for s in range(3)]
    assert sorted(parts.attempts) == sorted(expected)
    assert set(experience.get_state()) == {"next_index", "fingerprint", "num_tasks", "seed", "shuffle"}
    assert set(parts.sampled) == {(1.0, 3, 0.0)}


def test_a_task_that_comes_again_in_a_step_is_sampled_anew():
    """In a further round, and in one round of more groups than there are tasks: no attempt is another one's copy."""
    for tasks, changes in ((1, {"tasks_per_step": 1, "refill.max_rounds": 4}), (2, {"tasks_per_step": 5})):
        with Workers(8) as workers:
            parts = Parts(workers, {"group_size": 2} | changes)
            experience = Experience(sources.TaskSource(MemoryRows(tasks), "memory", True), parts.cfg)
            chosen = [collect(parts, DRIVER, experience, step).chosen for step in range(4)]
        assert max(c.rounds for c in chosen) > 1 or len(chosen[0].groups) == 5
        assert len(set(parts.attempts)) == len(parts.attempts)


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Of a group, one less with each attempt."""

    def __call__(self, group):
        return [-float(place) for place, _ in enumerate(group.episodes)]


@pytest.mark.parametrize("oversampled", [False, True])
def test_rewards_of_a_group_are_those_that_are_selected_learnt_and_reported(oversampled):
    changes = {"tasks_per_step": 2, "group_size": 3, "refill.max_rounds": 2, "group_reward": f"{__name__}:Ranked"}
    changes |= {"oversample.extra_attempts": 0} if oversampled else {}
    with Workers(8) as workers:
        parts = Parts(workers, changes)
        rollouts = collect(parts, DRIVER, Experience(SOURCE, parts.cfg), 0)
    chosen, metrics = rollouts.chosen, rollouts.metrics
    assert chosen.rounds == 1 and len(chosen.groups) == 2  # all have signal, whatever their outcomes
    for groups in (chosen.groups, chosen.sampled):
        assert [[e.reward for e in g.episodes] for g in groups] == [[0.0, -1.0, -2.0]] * 2
    assert metrics["reward/mean"] == -1.0


def test_oversampling_in_the_loop():
    changes = {"tasks_per_step": 2, "group_size": 3, "oversample.extra_tasks": 1, "oversample.extra_attempts": 2}
    with Workers(8) as workers:
        parts = Parts(workers, changes, 0.02)
        rollouts = collect(parts, DRIVER, Experience(SOURCE, parts.cfg), 0)
    chosen, metrics = rollouts.chosen, rollouts.metrics
    assert len(chosen.groups) == 2 and all(len(g.episodes) == 5 and len(g.valid) >= 2 for g in chosen.groups)
    assert metrics["sampling/attempts_cancelled"] > 0 and metrics["sampling/groups_dropped"] == 1.0
    assert parts.sampled == [(1.0, 5, 0.0)]


def test_failures_are_of_all_that_was_begun():
    """Also of groups that oversampling drops: else a dead environment would be no failure at all, step after step."""

    class Dead(Parts):
        def rollout(self, *arguments):
            async def play(task, sample):
                return Episode(task, sample, (), 0.0, {}, StopReason.ENV_ERROR, 0, error="nobody listens")

            return play

    with Workers(8) as workers:
        for more, attempts in (({}, 6), ({"oversample.extra_tasks": 1}, 9)):
            changes = {"tasks_per_step": 2, "group_size": 3} | more
            parts = Dead(workers, changes)
            rollouts = collect(parts, DRIVER, Experience(SOURCE, parts.cfg), 0)
            failures = rollouts.failures
            assert failures.all and failures.attempts == attempts and failures.reason == "env_error: nobody listens"
            assert not any(group.valid for group in rollouts.chosen.groups)


@pytest.mark.parametrize(("said", "at_once"), [(0, 8), (3, 3), (64, 64)])
def test_episodes_at_once_are_as_many_as_slots_or_as_said(said, at_once, tmp_path):
    cfg = flags.parse_argv(tiny_run.argv(tmp_path, f"--config.env.concurrent_episodes={said}")).config
    assert cfg.engine.slots == 8 and cfg.concurrent_episodes == at_once
    rounds = -(-100 // at_once)
    assert (
        batch_deadline_s(100, cfg.concurrent_episodes, cfg.env.episode_timeout_s) == rounds * cfg.env.episode_timeout_s
    )
