"""An attempt that is paid turn by turn is compared, chosen and counted as one that is paid the same at its end.

Each reader of rewards is given the same attempts three times: paid at the end, in their turns, and not at all. It must
say the same of the first two, and something else of the third.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs.ragen import get_config
from jaxagent import config
from jaxagent.algorithms import compose, outcome, supervised
from jaxagent.algorithms.checks import check
from jaxagent.algorithms.streams import shaped
from jaxagent.config import RefillConfig, ReplayConfig
from jaxagent.config.parse import build
from jaxagent.data.curriculum import CURRICULA, Curriculum
from jaxagent.observe import shown_episodes
from jaxagent.rollout import groups as selection
from jaxagent.rollout.groups import episode_metrics
from jaxagent.rollout.replay import ReplayBuffer
from jaxagent.runs.stages import outcome_model
from jaxagent.service import episodes as served
from jaxagent.types import Episode, Group, StopReason, Task, TokenKind, Trajectory
from tests.algorithms.entries import BEST_OF_K, GROUP

PAID = {  # an attempt's sum, in its turns
    "t0": [(0.5, 0.25, 0.25), (-0.1, -0.1, 0.2), (0.0, 0.0, 0.0), (0.5, 0.5, 0.0)],
    "t1": [(0.0, 0.0, 1.0)] * 4,
    "t2": [(2.0, -1.0, 1.0), (0.0, 0.0, 0.0), (0.0, 0.0, -0.1), (-0.1, 0.0, 0.0)],
}


@dataclasses.dataclass(frozen=True)
class Squares:
    """A group reward of the test's own."""

    def __call__(self, group):
        return [episode.total_reward**2 for episode in group.episodes]


def attempt(task: Task, sample: int, pay: tuple[float, ...], where: str) -> Episode:
    kinds = np.array([0, *[TokenKind.ACTION, TokenKind.OBSERVATION] * 3], np.uint8)
    sampled = kinds == TokenKind.ACTION
    turns = np.array([0, 0, 0, 1, 1, 2, 2], np.int32)
    tokens = np.arange(len(kinds), dtype=np.int32) + 7 * sample
    trajectory = Trajectory(tokens, kinds, -1.0 * sampled.astype(np.float32), np.where(sampled, 0, -1), turns)
    paid = {"end": (math.fsum(pay), ()), "turns": (0.0, pay), "both": (pay[-1], (*pay[:-1], 0.0)), "lost": (0.0, ())}
    reward, turn_rewards = paid[where]
    stop = StopReason.TOKEN_LIMIT if sample == 3 else StopReason.ANSWER
    return Episode(task, sample, [trajectory], reward, {}, stop, 3, turn_rewards=turn_rewards)


def groups(where: str) -> list[Group]:
    tasks = {name: Task(name, "q", ()) for name in PAID}
    return [Group(t, [attempt(t, s, pay, where) for s, pay in enumerate(PAID[n])]) for n, t in tasks.items()]


def who(episodes) -> list[tuple[str, int]]:
    return [(episode.task.id, episode.sample) for episode in episodes]


def trained(played: list[Group], **rl) -> list[list[list[float]]]:
    base = config.to_dict(config.parse(get_config()))["rl"]
    cfg = build(config.RLConfig, base | dict(advantage="group_mean", keep_groups_frac=1.0) | rl, "rl")
    check(cfg)
    sequences, counts = compose.streams(played, cfg, 0.0)
    return [[s.advantages.tolist(), s.nll_weights.tolist()] for s in sequences], counts["groups/zero_signal"]


def replayed(played: list[Group], use: str):
    buffer = ReplayBuffer(ReplayConfig(per_step=1, use=use), 0)
    buffer.record(played, 0, GROUP["group_mean"])
    return [(kept.task_id, kept.reward, kept.advantage) for kept in buffer.candidates(0)]


def success(played: list[Group]) -> list[float]:
    curriculum = Curriculum([None] * len(played), CURRICULA["failed"](), 0)
    curriculum.record(played, {group.task.id: i for i, group in enumerate(played)})
    return curriculum.success.tolist()


def after_shaping(played: list[Group], **rl) -> list[list[float]]:
    base = config.to_dict(config.parse(get_config()))["rl"]
    cfg = build(config.RLConfig, base | rl, "rl")
    return [[round(e.total_reward, 12) for e in shaped(group, cfg).episodes] for group in played]


def received(played: list[Group]) -> list[float]:
    bodies = (served.to_bytes(episode) for group in played for episode in group.episodes)
    return [served.episode_and_summary(*body)[1].reward for body in bodies]


EPISODES = lambda played: [e for group in played for e in group.episodes]  # noqa: E731
READERS = {
    "signal": lambda g: selection.signal(g).tolist(),
    "most_varied": lambda g: [group.task.id for group in selection.keep_most_varied(g, 0.34)],
    "reward_std": lambda g: [selection.reward_std(group) for group in g],
    "refill": lambda g: len(selection.refill(lambda *_: g, 2, RefillConfig(max_rounds=1)).groups),
    "sampling metrics": lambda g: selection.selection_metrics(selection.Selection(g, g, 1)),
    "reward/mean": lambda g: episode_metrics(g)["reward/mean"],
    "replay, nll": lambda g: replayed(g, "nll"),
    "replay, policy": lambda g: replayed(g, "policy"),
    "curriculum": success,
    "rft": lambda g: who(supervised.successes(g, 1.0, 4)),
    "dpo": lambda g: [who([pair.chosen, pair.rejected]) for pair in supervised.pairs(g, 4, 0.5)],
    "outcome, binary": lambda g: [s.returns.tolist() for s in outcome.binary(EPISODES(g), 1.0)],
    "outcome, pairs": lambda g: [
        who([pair.chosen, pair.rejected]) for pair in outcome_model._examples(EPISODES(g), "bradley_terry", 1.0)
    ],
    "outcome, both known": lambda g: len(outcome_model._examples(EPISODES(g), "binary", 1.0)),
    "positive nll": lambda g: trained(g, positive_nll=dict(coefficient=0.1)),
    "boost": lambda g: trained(g, shaping=dict(correct_boost=0.1)),
    "truncated attempts": lambda g: after_shaping(g, shaping=dict(truncated_factor=0.1)),
    "a group reward": lambda g: after_shaping(g, group_reward=f"{__name__}:Squares"),
    "whitened": lambda g: trained(g, whiten_advantages=True),
    "the service": received,
    "the report": lambda g: [
        shown_episodes.episode_values(e, [None] * len(e.trajectories), None)["reward"] for e in EPISODES(g)
    ],
    **{
        f"{name}, {rule}": functools.partial(trained, advantage=dict(name=name, multi_trajectory=rule))
        for name in (*GROUP, *BEST_OF_K)
        for rule in ("full", "divide", "statistics")
        if name != "no_reward"
    },
}


def said(reader, where: str):
    try:
        return reader(groups(where))
    except config.ConfigError as error:  # "all have the same outcome"
        return str(error)


@pytest.mark.parametrize("name", READERS)
def test_an_attempt_that_is_paid_in_its_turns_is_as_one_that_is_paid_at_its_end(name):
    end, *others, lost = (said(READERS[name], where) for where in ("end", "turns", "both", "lost"))
    assert others == [end, end] and lost != end


def test_equal_sums_are_equal_in_whatever_order_they_were_paid():
    task = Task("t", "q", ())
    orders = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.3, 0.1)]
    assert len({a + b + c for a, b, c in orders}) == 2
    group = Group(task, [attempt(task, s, pay, "turns") for s, pay in enumerate(orders)])
    assert not selection.signal([group]).any()


def test_starpo_s_keeps_the_groups_whose_summed_turns_vary_most():
    """RAGEN's rollout filter: the std of `rm_scores.sum(-1)` over a group's attempts."""
    raw = get_config("sokoban")
    raw.env.pay, raw.rl.advantage = "turn", ConfigDict({"name": "gae_bilevel", "turn_gamma": 0.95})
    raw.rl.advantage.critic = get_config("sokoban").rl.advantage.critic
    cfg, task, rng = config.parse(raw), Task("t", "seed 1", ()), np.random.default_rng(0)
    check(cfg.rl)
    pays = [[(-0.1, float(spread * rng.normal())) for _ in range(16)] for spread in (0, 0, 0, 0, 0, 0, 5, 3)]
    played = [
        Group(task, [Episode(task, s, [], 0.0, {}, StopReason.ANSWER, 2, turn_rewards=pay) for s, pay in enumerate(g)])
        for g in pays
    ]
    kept = selection.keep_most_varied(played, cfg.rl.keep_groups_frac)
    published = np.argsort([-np.std([sum(pay) for pay in g], ddof=1) for g in pays])[:2]
    assert sorted(map(played.index, kept)) == sorted(published) == [6, 7]
