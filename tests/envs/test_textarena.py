"""TextArena's games as ours, beside the package's own: texts, rewards, other players, random numbers, failures."""

import asyncio
import dataclasses
import math
import random
import time

import numpy as np
import pytest

from jaxagent.config import ConfigError
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.cast import RoleError
from jaxagent.envs.textarena import environment as ours
from jaxagent.envs.textarena.environment import RandomPlayer, TextArena, listed_moves
from jaxagent.types import StopReason, Task
from tests.envs import games

pytestmark = pytest.mark.slow  # installs packages

OPENING = Opening(None, (), lambda coroutine, timeout_s: asyncio.run(coroutine), lambda line: None)


@pytest.fixture(scope="module", autouse=True)
def textarena():
    with games.importable("textarena"):
        import textarena

        yield textarena


class Others:
    """A cast whose opponent is a `TextRole`, or a function of what it is shown."""

    def __init__(self, role, task):
        self.role, self.task, self.number = role, task, 0

    def talk(self, name):
        assert name == "opponent"
        self.number += 1
        return Talk(self.role.speaker(self.task, 0, self.number))


class Talk:
    def __init__(self, speaker):
        self.speaker, self.messages = speaker, []

    async def say(self, message):
        self.messages.append(message)
        reply = await self.speaker.reply(self.messages, (), 100)
        self.messages.append(dataclasses.replace(message, role="assistant", content=reply.text))
        return reply


def task_of(seed):
    return Task(f"seed-{seed}", "Begin.", (), metadata={"seed": seed})


def begun(config, seed, role=None):
    with config.open(OPENING) as attempt_at:
        task = task_of(seed)
        return attempt_at(task, Others(role, task)) if role else attempt_at(task)


async def played(attempt, move_of):
    """(all texts shown, last stop reason, verdict); `move_of`: texts so far -> a move, None to stop there."""
    (prompt,) = await attempt.start()
    shown, reason = [prompt.content], None
    while reason is None and (move := move_of(shown)) is not None:
        step = await attempt.step(move)
        reason = step.stop_reason
        if step.observation:
            shown.append(step.observation.text)
    verdict = await attempt.verify(Transcript("", ()))
    await attempt.close()
    return [text.strip() for text in shown], reason, verdict


def play(config, seed, move_of, role=None):
    return asyncio.run(played(begun(config, seed, role), move_of))


def by_the_package(textarena, make, seed, moves):
    """(what the package's own observations add after each move, its reward) of a game alone, without any of ours."""
    game = textarena.make(make)  # its default observations: all that was said so far, the player's moves too
    game.reset(num_players=1, seed=seed)
    seen, shown = "", []
    for move in [*moves, None]:
        _, text = game.get_observation()
        shown.append(text.removeprefix(seen))
        seen = text
        if move is None or game.step(action=move)[0]:
            break
    return shown, (game.close()[0] or {}).get(0, 0.0)


def without_moves(text):
    return "\n".join(line for line in text.strip().split("\n") if not line.startswith("[Player]"))


# Every way in which a game ends: its end, a second invalid move, its own turn limit, ours before it.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("moves", "max_turns"),
    [
        ([f"[{n}]" for n in (10, 5, 15, 3, 7, 12, 18, 1, 20, 9, 11)], 20),
        (["ten", "no"], 20),
        ([f"It is [{n}]." for n in range(1, 12)], 20),
        (["[1]", "[20]", "[2]"], 2),
    ],
)
def test_texts_and_rewards_are_the_packages(textarena, seed, moves, max_turns):
    shown, reason, verdict = play(
        TextArena(make="GuessTheNumber-v0", max_turns=max_turns),
        seed,
        lambda shown: moves[len(shown) - 1] if len(shown) <= len(moves) else None,
    )
    theirs, reward = by_the_package(textarena, "GuessTheNumber-v0", seed, moves[:max_turns])
    assert shown == [without_moves(text) for text in theirs][: len(shown)]
    assert verdict.reward == reward == verdict.reward and verdict.components["solved"] == float(reward >= 1)
    ended = verdict.components["ended"]
    assert (reason, ended) == (StopReason.ANSWER, 1.0) or (reason, reward) == (StopReason.TURN_LIMIT, 0.0)


def test_attempts_of_a_group_play_one_game_whatever_is_played_beside_them(textarena):
    """2048 draws a tile after each move, from the random numbers that all share."""
    config = TextArena(make="2048-v0-ultra-easy", max_turns=9)
    moves = ["[up]", "[left]", "[down]", "[right]"] * 2

    async def together(attempts):
        shown = [[(await attempt.start())[0].content] for attempt in attempts]
        for move in moves:
            steps = await asyncio.gather(*(attempt.step(move) for attempt in attempts))
            for texts, step in zip(shown, steps, strict=True):
                texts.append(step.observation and step.observation.text)
        return shown

    random.seed(7)
    np.random.seed(7)
    before = random.getstate()
    one, other, third = asyncio.run(together([begun(config, seed) for seed in (1, 2, 1)]))
    assert (
        random.getstate() == before
        and np.random.get_state()[1].tolist() == np.random.RandomState(7).get_state()[1].tolist()
    )
    (alone,) = asyncio.run(together([begun(config, 1)]))
    assert one == third == alone and other != one
    theirs, _ = by_the_package(textarena, config.make, 1, moves)
    assert [text.strip() for text in alone if text] == [without_moves(text) for text in theirs][: len(alone)]


@pytest.mark.parametrize("seed", range(4))
def test_a_game_of_two_against_a_random_player(seed):
    config = TextArena(make="TicTacToe-v0", players=2, max_turns=9)
    role = RandomPlayer()

    def first_free(shown):
        return listed_moves(shown[-1])[0]

    shown, reason, verdict = play(config, seed, first_free, role)
    assert reason == StopReason.ANSWER and verdict.reward in (-1.0, 0.0, 1.0) and verdict.components["ended"] == 1.0
    assert f"You are Player {seed % 2}" in shown[0]
    assert ("[Player 0] Player 0 placed" in shown[0] or "placed their symbol" in shown[0]) == bool(seed % 2)
    assert not any(f"[Player {seed % 2}]" in text for text in shown)  # its own moves
    assert play(config, seed, first_free, role) == (shown, reason, verdict)


def test_rewards_of_two_are_of_the_policys_seat():
    """The policy makes two invalid moves, and loses, on either seat."""
    config = TextArena(make="TicTacToe-v0", players=2, max_turns=9)
    for seed in (0, 1):
        _, reason, verdict = play(config, seed, lambda shown: "nothing", RandomPlayer())
        assert (reason, verdict.reward, verdict.components["solved"]) == (StopReason.ANSWER, -1.0, 0.0)


def test_a_random_player_needs_moves():
    config = TextArena(make="IteratedRockPaperScissors-v0", players=2, max_turns=30)
    with pytest.raises(RoleError, match=r"set config\.roles\.opponent\.moves"):
        play(config, 0, lambda shown: "[rock]", RandomPlayer())
    role = RandomPlayer(moves=("[rock]", "[paper]", "[scissors]"))
    assert play(config, 0, lambda shown: "[rock]", role)[1] == StopReason.ANSWER
    assert config.roles == ("opponent",) and TextArena(make="Nim-v0").roles == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"make": "NoSuchGame-v0"}, "NoSuchGame-v0 not found"),
        ({"make": "TicTacToe-v0"}, "players=1: AssertionError: The number of players has to be 2"),
        ({"make": "GuessTheNumber-v0", "players": 2}, "players=2: AssertionError"),
        ({"make": "GuessTheNumber-v0", "arguments": '{"colour": 1}'}, "colour"),
        ({"make": "GuessTheNumber-v0", "arguments": "[]"}, "JSON object"),
        ({"make": ""}, "name a game"),
    ],
)
def test_what_cannot_be_played_is_refused_at_start(settings, words):
    with pytest.raises(ConfigError, match=words), TextArena(**settings).open(OPENING):
        pass


@pytest.mark.parametrize(
    ("move", "error", "words"),
    [
        ("raise", RuntimeError, "out of cards"),
        ("hang", TimeoutError, "longer than 0.2 s"),
        ("nan", ValueError, "finite"),
    ],
)
def test_a_game_that_fails_is_a_failure(textarena, monkeypatch, move, error, words):
    from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

    def step(self, action):
        if "raise" in action:
            raise RuntimeError("out of cards")
        if "hang" in action:
            time.sleep(0.6)
        self.state.set_outcome(math.nan)
        return True, {}

    monkeypatch.setattr(GuessTheNumberEnv, "step", step)
    with pytest.raises(error, match=words):
        play(TextArena(make="GuessTheNumber-v0", step_timeout_s=0.2 if "hang" in move else 20.0), 0, lambda shown: move)
    time.sleep(0.5)
    assert ours._ONE_AT_A_TIME.acquire(timeout=5)  # nobody holds it any more
    ours._ONE_AT_A_TIME.release()
