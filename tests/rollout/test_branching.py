"""Forks as they are played: from which turn of whom, what they copy, and what becomes of an attempt that parts."""

import asyncio
import dataclasses
import hashlib
from typing import ClassVar

import numpy as np
import pytest

from configs.search_r1 import get_config
from jaxagent import config
from jaxagent.algorithms.branches import Tree
from jaxagent.algorithms.branching import Branching, Planned
from jaxagent.algorithms.estimate import branches, by_turn
from jaxagent.config import ConfigError, EnvConfig, SamplingConfig
from jaxagent.config.fleet import FleetConfig
from jaxagent.data import codec
from jaxagent.envs.base import Environment, Message, Observation, Step, Verdict
from jaxagent.observe.episode_store import columns_of
from jaxagent.rollout.branching import Branched
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.templates import Plain
from jaxagent.rollout.workers import group_deadline_s, run_groups
from jaxagent.runs import checks
from jaxagent.runs.attempts import numbered_on
from jaxagent.types import Generation, StopReason, Task, TokenKind
from tests.branching_game import CHANCES, TURNS, VALUE, outcome, sigmas

SIZE = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class GameEnvironment(Environment):
    """The game of tests/branching_game.py; `odd`: the attempts, counted from 0, to which a place is told otherwise."""

    odd: tuple[int, ...] = ()
    otherwise: str = "spot {}\n"

    def attempt(self, task):
        return Attempt(self)


class Attempt:
    stop_strings = ()
    counters: ClassVar[dict] = {}
    begun = 0

    def __init__(self, environment):
        self.told, self.path = environment.otherwise if Attempt.begun in environment.odd else "place {}\n", []
        Attempt.begun += 1

    async def start(self):
        await asyncio.sleep(0)
        return [Message("user", "a game\n")]

    async def step(self, action):
        place = self.path[-1][1] if self.path else 0
        paid, after, over = outcome(len(self.path), place, int(action))
        self.path.append((paid, after))
        if over:
            return Step(stop_reason=StopReason.ANSWER)
        return Step(Observation((("\n" + self.told.format(after), TokenKind.OBSERVATION),)))

    async def verify(self, transcript):
        assert len(transcript.turns) == len(self.path)
        return Verdict(0.0, {}, tuple(paid for paid, _ in self.path))

    async def close(self):
        pass


class Player:
    """An engine that takes each action with its chance, keyed by (task, attempt, turn); it sees tokens alone."""

    def __init__(self, tokenizer, failing=()):
        self.tokenizer, self.failing, self.running, self.most, self.shown = tokenizer, failing, 0, 0, {}

    async def open(self, task_id, sample, group_size, domain):
        self.running += 1
        self.most = max(self.most, self.running)
        return [task_id, sample, []]

    async def generate(self, session, new_tokens, max_tokens, sampling, turn, deadline_s, *, stop_strings):
        task, sample, tokens = session
        await asyncio.sleep(0)
        if (sample, turn) in self.failing:
            raise RuntimeError("out of order")
        tokens += new_tokens
        self.shown.setdefault((task, sample), len(new_tokens))
        place = self.tokenizer.decode(tokens).rstrip().endswith("1")
        draw = int.from_bytes(hashlib.blake2b(f"{task} {sample} {turn}".encode(), digest_size=8).digest(), "big")
        ids = self.tokenizer.encode("1" if draw < CHANCES[place] * 2**64 else "0")
        tokens += ids
        logprobs = np.full(len(ids), -0.5 - sample, np.float32)
        return Generation(np.array(ids, np.int32), logprobs, np.full(len(ids), 7, np.int32), "stop")

    def close(self, session):
        self.running -= 1


@dataclasses.dataclass(frozen=True)
class Chain(Branching):
    """Every fork goes on from the attempt before it, at the first turn that it did not copy, or at one that it did."""

    def waits_for(self, attempt):
        return attempt

    def choose(self, episodes, attempt, rng):
        turn = int(rng.integers(1, 4))
        return attempt - 1, turn if turn < episodes[-1].turns and not episodes[-1].stop_reason.is_failure else 0


def play(tokenizer, rule, tasks=3, concurrency=4, odd=(), failing=(), first=2 * SIZE, **settings):
    cfg = GameEnvironment(
        max_turns=TURNS, turn_tokens=8, observation_tokens=50, context_tokens=400, episode_timeout_s=20.0,
        max_failed_steps=3, odd=odd, **settings,
    )  # fmt: skip
    Attempt.begun = 0
    player = Player(tokenizer, failing)
    inner = MultiTurn(cfg.attempt, player, tokenizer, Plain(), cfg, SamplingConfig(1.0), 5.0, group_size=SIZE)
    rollout = Branched(inner, rule, 3)
    tasks = [Task(f"t{i}", "", ()) for i in range(tasks)]

    async def run():
        attempt = numbered_on(rollout, first, tasks, len(tasks), SIZE)
        return await run_groups(tasks, SIZE, attempt, concurrency, group_deadline_s(SIZE, concurrency, 20.0, 4))

    groups = asyncio.run(asyncio.wait_for(run(), 60))
    assert player.running == 0
    return groups, player


def results(groups):
    return [[codec.pack(episode).digest for episode in group.episodes] for group in groups]


@pytest.mark.parametrize("rule", [Planned(roots=2, turns=2), Chain(roots=2)])
def test_the_same_forks_at_any_concurrency(trained, rule):
    groups, player = play(trained, rule, concurrency=1)
    assert player.most == 1 and all(len(group.valid) == SIZE for group in groups)
    again, at_once = play(trained, rule, concurrency=18)
    assert at_once.most > 4 and results(again) == results(groups)
    assert all(codec.unpack(codec.pack(e), "") == e for g in groups for e in g.episodes[:1] if not e.trajectories)
    for group in groups:
        assert [e.fork_of is None for e in group.episodes] == [True, True, False, False, False, False]
        assert [e.sample for e in group.roots.episodes] == [2 * SIZE, 2 * SIZE + 1]
        row = columns_of(group.episodes, [[]] * SIZE)["fork"]
        assert row[:2] == [None, None] and row[2:] == [[e.fork_of, e.forked_at] for e in group.episodes[2:]]
        assert "fork" not in columns_of(group.roots.episodes, [[]] * 2)


@pytest.mark.parametrize("rule", [Planned(roots=2, turns=2), Chain(roots=2)])
def test_a_fork_begins_with_its_parents_tokens_and_learns_nothing_of_them(trained, rule):
    groups, player = play(trained, rule, tasks=8)
    copied = 0
    for group in groups:
        by_sample = {episode.sample: episode for episode in group.episodes}
        for fork in group.episodes[2:]:
            (own,), turn = fork.trajectories, fork.forked_at
            parent = by_sample[fork.fork_of]
            length = int(np.sum(own.turns < turn)) + player.shown[group.task.id, fork.sample] * (turn == 0)
            # Each observation belongs to the turn before it; the first own turn begins behind the last of them.
            if turn:
                assert parent.forked_at < turn < parent.turns
                length = player.shown[group.task.id, fork.sample]  # all of it is asked of the engine at once
                assert length == fork.metrics["copied_tokens"] and fork.metrics["copied_turns"] == turn
                np.testing.assert_array_equal(own.tokens[:length], parent.trajectories[0].tokens[:length])
                np.testing.assert_array_equal(own.turns[:length], parent.trajectories[0].turns[:length])
                copied += 1
            assert not own.kinds[:length].any() and not own.logprobs[:length].any()
            assert (own.policy_versions[:length] == -1).all() and own.kinds[length] == TokenKind.ACTION
            sampled = own.logprobs[own.kinds == TokenKind.ACTION]
            assert (sampled == np.float32(-0.5 - fork.sample)).all()
            assert len(fork.turn_rewards) == fork.turns and own.turns.max() == fork.turns - 1
            assert fork.turn_rewards[:turn] == parent.turn_rewards[:turn]
            numbers, rewards = by_turn(fork)
            assert rewards.tolist() == list(fork.turn_rewards[turn:])
            assert set(numbers[0][numbers[0] >= 0].tolist()) == set(range(fork.turns - turn))
            restored = codec.unpack(codec.pack(fork), "")
            assert (restored.fork_of, restored.forked_at) == (fork.fork_of, turn)
    assert copied > 10


@pytest.mark.parametrize("otherwise", ["spot {}\n", "place {}\n!", "place {}", "place", ""])
def test_an_environment_that_does_not_repeat_itself_fails_the_fork_by_name(trained, otherwise):
    """Attempts that are begun third and fifth, both forks, are told places otherwise, also by less or more text."""
    groups, _ = play(trained, Planned(roots=2, turns=1), tasks=1, concurrency=1, odd=(2, 4), otherwise=otherwise)
    (group,) = groups
    failed = [e for e in group.episodes if e.stop_reason.is_failure]
    assert failed and {e.sample - 2 * SIZE for e in failed} <= {2, 4}
    for episode in failed:
        assert episode.stop_reason is StopReason.ENV_ERROR and not episode.trajectories
        assert f"a fork of attempt {episode.fork_of} at turn 1" in episode.error
        assert "what follows turn 0 is other text" in episode.error and "not repeatable" in episode.error


def test_forks_of_a_failed_root_begin_at_the_start(trained):
    groups, _ = play(trained, Planned(roots=2, turns=2), tasks=2, failing={(2 * SIZE, 0)})
    for group in groups:
        assert group.episodes[0].stop_reason is StopReason.ENGINE_ERROR
        forks = [e for e in group.episodes if e.fork_of == 2 * SIZE]
        assert len(forks) == 2 and all(e.forked_at == 0 and not e.stop_reason.is_failure for e in forks)
        parents, firsts = branches([group])
        assert parents[0].tolist() == [-1, -1, 0, 1, 0, 1] and not firsts[0][[0, 1, 2, 4]].any()


@dataclasses.dataclass(frozen=True)
class Beyond(Branching):
    def choose(self, episodes, attempt, rng):
        return 0, episodes[0].turns


@dataclasses.dataclass(frozen=True)
class ForItself(Planned):
    def waits_for(self, attempt):
        return attempt + 1


@dataclasses.dataclass(frozen=True)
class Broken(Branching):
    def choose(self, episodes, attempt, rng):
        return episodes[9], 1


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (Beyond(roots=5), "Beyond.choose returned turn"),
        (ForItself(roots=5), "ForItself.waits_for returned 6 where 1 to 5 is wanted"),
        (Broken(roots=5), "Broken.choose raised IndexError"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_told_so(trained, rule, why):
    groups, _ = play(trained, rule, tasks=1)
    assert why in groups[0].episodes[5].error and len(groups[0].valid) == 5


def test_values_read_off_played_forks_are_those_of_the_game(trained):
    groups, _ = play(trained, Planned(roots=2, turns=2), tasks=400, concurrency=64)
    parents, firsts = branches(groups)
    starts = []
    for n, group in enumerate(groups):
        rewards, mask = np.zeros((SIZE, TURNS)), np.zeros((SIZE, TURNS), bool)
        for a, episode in enumerate(group.episodes):
            _, own = by_turn(episode)
            rewards[a, : len(own)], mask[a, : len(own)] = own, True
        starts.append([Tree(rewards, mask, parents[n], firsts[n]).worth(a, 0) for a in (0, 1)])
    assert sigmas(np.reshape(starts, (-1, 1)), VALUE) < 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unrepeatable(GameEnvironment):
    repeatable = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithRoles(GameEnvironment):
    roles = ("judge",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfPlayed(GameEnvironment):
    rollout = "jaxagent.rollout.play:Play"


def test_environments_that_cannot_be_forked_are_refused_by_name(monkeypatch):
    cfg = config.parse(get_config("laptop+tree"))
    checks.check(cfg)
    monkeypatch.setattr(checks.roles, "check", lambda *_: None)  # it would ask for the judge first
    shared = {field.name: getattr(cfg.env, field.name) for field in dataclasses.fields(EnvConfig)}
    for kind, why in ((Unrepeatable, "repeatable = False"), (WithRoles, "has roles"), (SelfPlayed, "itself")):
        with pytest.raises(ConfigError, match=rf"plays a parent's actions again.*\({kind.__name__}\) .*{why}"):
            checks.check(dataclasses.replace(cfg, env=kind(**shared | {"max_turns": 3})))
    with pytest.raises(ConfigError, match=r"rl\.branching needs fleet=none"):
        checks.check(dataclasses.replace(cfg, fleet=FleetConfig()))
