"""Attempts are played once, are on disk when they have ended, and are what they were when they are read again."""

import asyncio
import contextlib
import dataclasses
import errno
import json

import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.engine.requests import EngineError
from jaxagent.runs.evaluation.attempts import AttemptLog, ScoredAttempt, play
from jaxagent.types import Episode, StopReason, Task, TokenKind, Trajectory

TASKS = [Task(f"t{i}", "Who?", ("me",), "one_hop/x") for i in range(3)]
TODO = [(task, sample) for task in TASKS for sample in range(2)]


def episode(task, sample, score=1.0, reason=StopReason.ANSWER):
    kinds = np.array([TokenKind.PROMPT, TokenKind.ACTION], np.uint8)
    trajectory = Trajectory(np.array([3, 4]), kinds, np.float32([0, -0.3]), np.array([-1, 7]), np.zeros(2, np.int32))
    rewards = {} if reason.is_failure else {"em": score}
    return Episode(task, sample, (trajectory,), score, rewards, reason, 2, {"action_tokens": 1.0}, "Who? me")


def played(todo, rollout, on_episode, concurrency=2, deadline_s=5.0):
    asyncio.run(play(todo, rollout, concurrency, deadline_s, on_episode))


def test_all_are_played_with_so_many_at_once():
    running, most, ended = 0, 0, []

    async def rollout(task, sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 * (sample + 1))
        running -= 1
        return episode(task, sample)

    played(TODO, rollout, ended.append)
    assert sorted((e.task.id, e.sample) for e in ended) == sorted((t.id, s) for t, s in TODO)
    assert most == 2


def test_an_engine_that_fails_ends_it_and_what_ended_before_is_kept():
    ended = []

    async def rollout(task, sample):
        await asyncio.sleep(0.02 * sample)
        reason = StopReason.ENGINE_ERROR if sample else StopReason.ANSWER
        return episode(task, sample, reason=reason)

    with pytest.raises(EngineError):
        played(TODO, rollout, ended.append)
    assert (ended[0].task.id, ended[0].sample) == ("t0", 0)
    assert all(e.sample == 0 for e in ended)


def test_a_full_disk_ends_it():
    calls = 0

    async def rollout(task, sample):
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.02)
        return episode(task, sample)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        played(TODO * 50, rollout, full)
    assert calls < 50


def test_one_that_raises_failed_and_one_that_never_ends_is_dropped():
    ended = []

    async def rollout(task, sample):
        if task.id == "t1":
            raise RuntimeError("a broken environment")
        if task.id == "t2" and sample == 1:
            await asyncio.sleep(60)
        return episode(task, sample)

    played(TODO, rollout, ended.append, deadline_s=0.3)
    assert len(ended) == 5
    assert [e.stop_reason for e in ended if e.task.id == "t1"] == [StopReason.ENV_ERROR] * 2


def test_the_log_is_read_back_without_a_torn_last_line(tmp_path):
    path = tmp_path / "attempts.jsonl"
    log = AttemptLog(path, "em", "rl", 3)
    log.append(episode(TASKS[0], 0))
    log.append(episode(TASKS[0], 1, reason=StopReason.TIMEOUT))
    log.append(episode(TASKS[1], 0, score=0.25))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"stage": "rl", "st')
    again = AttemptLog(path, "em", "rl", 3)
    assert again.attempts == log.attempts
    assert {key: dataclasses.replace(attempt, task="") for key, attempt in again.attempts.items()} == {
        ("t0", 0): ScoredAttempt(1.0, "answer", 2, 1),
        ("t0", 1): ScoredAttempt(None, "timeout", 2, 1),
        ("t1", 0): ScoredAttempt(0.25, "answer", 2, 1),
    }
    again.check_same(TASKS)
    fixed = [dataclasses.replace(TASKS[0], metadata={"test": "mended"}), *TASKS[1:]]
    with pytest.raises(ConfigError, match="another task 't0' than the dataset has now: set another --out"):
        again.check_same(fixed)
    again.append(episode(TASKS[0], 1))  # tried again: the last one counts
    again.close()
    assert path.read_bytes().startswith(whole) and again.attempts["t0", 1].score == 1.0
    assert AttemptLog(path, "em", "rl", 3).attempts == again.attempts
    assert json.loads(whole.splitlines()[0])["text"] == "Who? me"


@pytest.mark.parametrize("line", ["no JSON", '{"task": {"id": "a"}}', '{"stop_reason": "tired"}'])
def test_a_line_that_is_no_attempt_is_named(tmp_path, line):
    path = tmp_path / "attempts.jsonl"
    log = AttemptLog(path, "em", "rl", 3)
    log.append(episode(TASKS[0], 0))
    log.close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"attempts\.jsonl, line 2"):
        AttemptLog(path, "em", "rl", 3)


def test_a_verdict_without_the_environments_score_is_a_mistake_told_in_one_line(tmp_path):
    async def rollout(task, sample):
        return dataclasses.replace(episode(task, sample), rewards={"guessed": 1.0, "short": 0.0})

    told = r"has the score 'solved', and its verdicts have guessed, short"
    log = AttemptLog(tmp_path / "attempts.jsonl", "solved", "rl", 3)
    with contextlib.closing(log), pytest.raises(ConfigError, match=told):
        played(TODO, rollout, log.append)
