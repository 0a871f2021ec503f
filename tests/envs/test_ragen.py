"""RAGEN's worlds and its protocol: hand-played games, published texts, hostile answers, generated data that replays."""

import asyncio
import itertools
import random
import re

import pytest

from data_pipelines import text_worlds
from jaxagent.config import ConfigError
from jaxagent.data import sources
from jaxagent.envs.base import Opening, Transcript
from jaxagent.envs.ragen import texts
from jaxagent.envs.ragen.bandit import Bandit
from jaxagent.envs.ragen.environment import Ragen, RagenAttempt
from jaxagent.envs.ragen.frozen_lake import FrozenLake
from jaxagent.envs.ragen.sokoban import Room, Sokoban
from jaxagent.rollout import demonstrations
from jaxagent.types import StopReason, Task

LAKE = (("__O_", "_O__", "____", "___G"), (0, 0))
DRY = FrozenLake(slippery=False)
NO_CHANCE = random.Random(0)


def walk(world, state, *actions):
    """The states as text after each action, the rewards, and whether the last one ended and solved the world."""
    shown, rewards, outcome = [], [], None
    for action in actions:
        outcome = world.act(state, action, NO_CHANCE)
        state = outcome.state
        shown.append(world.render(state))
        rewards.append(outcome.reward)
    return shown, rewards, (outcome.done, outcome.solved)


def test_a_lake_by_hand():
    assert DRY.render(LAKE) == "P_O_\n_O__\n____\n___G"
    shown, rewards, end = walk(DRY, LAKE, "Left", "Down", "Down", "Right", "Down", "Right", "Right")
    assert shown[0] == DRY.render(LAKE)  # against the edge
    assert shown[2] == "__O_\n_O__\nP___\n___G" and shown[-1] == "__O_\n_O__\n____\n___√"
    assert rewards == [0.0] * 6 + [1.0] and end == (True, True)
    shown, rewards, end = walk(DRY, LAKE, "Right", "Down")
    assert shown[-1] == "__O_\n_X__\n____\n___G" and rewards == [0.0, 0.0] and end == (True, False)


def test_ice_slips_to_the_sides_alone_and_each_third_of_the_time():
    middle, counts = (("___", "___", "__G"), (1, 1)), {}
    for i in range(3000):
        outcome = FrozenLake(size=3).act(middle, "Right", random.Random(i))
        counts[outcome.state[1]] = counts.get(outcome.state[1], 0) + 1
    assert set(counts) == {(1, 2), (0, 1), (2, 1)} and all(900 < count < 1100 for count in counts.values())


ROOM = Room(
    (5, 6),
    frozenset((row, column) for row in (1, 2, 3) for column in (1, 2, 3, 4)),
    frozenset({(2, 4)}),
    frozenset({(2, 2)}),
    (2, 1),
)


def test_a_room_by_hand():
    world = Sokoban(rows=5, columns=6)
    assert world.render(ROOM) == "######\n#____#\n#PX_O#\n#____#\n######"
    shown, rewards, end = walk(world, ROOM, "Left", "Right", "Right")
    assert shown[0] == world.render(ROOM) and shown[1] == "######\n#____#\n#_PXO#\n#____#\n######"
    assert shown[2] == "######\n#____#\n#__P√#\n#____#\n######"
    # A step costs .1; a box on its target pays 1, the last one 10 more.
    assert rewards == [-0.1, -0.1, pytest.approx(10.9)] and end == (True, True)
    two = Room(ROOM.size, ROOM.floor, frozenset({(2, 3), (1, 1)}), frozenset({(2, 3), (2, 4)}), (2, 2))
    assert world.act(two, "Right", NO_CHANCE).state == two  # a box behind a box
    off = Room(ROOM.size, ROOM.floor, frozenset({(2, 3), (1, 1)}), frozenset({(2, 3), (3, 1)}), (2, 2))
    assert walk(world, off, "Right")[1] == [pytest.approx(-1.1)]
    assert world.render(off) == "######\n#O___#\n#_P√_#\n#X___#\n######"
    assert walk(world, off, "Up", "Left")[0][-1] == "######\n#S___#\n#__√_#\n#X___#\n######"


@pytest.mark.parametrize("world", [DRY, FrozenLake(size=6, ice_frac=0.6), Sokoban(), Sokoban(8, 8, 2), Bandit()])
def test_a_seed_decides_the_whole_world(world):
    states = [world.begin(seed) for seed in range(60)]
    assert states == [world.begin(seed) for seed in range(60)] and len(set(states)) > 1
    if not isinstance(world, Bandit):
        assert len(set(states)) > 50


@pytest.mark.parametrize("world", [DRY, Sokoban(max_actions=60), FrozenLake(5, 0.5, False, 25)])
def test_every_world_can_be_solved(world):
    for seed in range(40):
        state = world.begin(seed)
        way = text_worlds.solution(world, state)
        assert way, world.render(state)
        for i in range(len(way)):  # and not by a part of the shortest way
            outcome = world.act(state, way[i], NO_CHANCE)
            state = outcome.state
            assert outcome.solved == (i == len(way) - 1)


def test_the_bandit_by_hand():
    bandit = Bandit()
    orders = {bandit.begin(seed) for seed in range(30)}
    assert orders == {("Phoenix", "Dragon"), ("Dragon", "Phoenix")}
    paid = [bandit.act(("Phoenix", "Dragon"), "Dragon", random.Random(i)) for i in range(2000)]
    assert all(p.done and p.solved for p in paid) and {p.reward for p in paid} == {0.0, 1.0}
    assert 0.22 < sum(p.reward for p in paid) / 2000 < 0.28
    low = bandit.act(("Phoenix", "Dragon"), "Phoenix", random.Random(0))
    assert (low.reward, low.done, low.solved, bandit.render(low.state)) == (0.1, True, False, "Phoenix: 0.1 points")
    for arms in (("", "Dragon"), ("dragon", "Dragon ")):
        with pytest.raises(ConfigError, match="two names"):
            Bandit(*arms)


def test_the_published_prompt_letter_for_letter():
    lake = next(seed for seed in range(1000) if DRY.render(DRY.begin(seed)).count("O") == 1)
    system, user = Ragen(world=DRY).messages(f"seed {lake}")
    assert (system.role, system.content) == ("system", "You're a helpful assistant. ")
    assert user.content == (
        "You are solving the FrozenLake puzzle. Forbid the whole and go to the target. You may move to the unintended "
        "direction due to the slippery ice. Example answer format: <think>To forbid the hole and go to the target, I "
        "should go left then go up.</think><answer>Left || Up</answer>\n"
        "The meaning of each symbol in the state is:\n"
        "P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal\n"
        "Your available actions are:\nLeft, Down, Right, Up\n"
        'You can make up to 10 actions, separated by the action separator " || "\n'
        "\nTurn 1:\nState:\n" + DRY.render(DRY.begin(lake)) + "\nYou have 10 actions left. Always output: "
        "<think> [Your thoughts] </think> <answer> [your answer] </answer> with no extra text. Strictly follow this "
        "format. Max response length: 100 words (tokens).\n"
    )
    _, user = Ragen(world=Bandit(), think=False).messages("seed 1")
    assert user.content.startswith("\nTurn 1:\nState:\nYou are playing a bandit game. Goal: Maximize")
    assert "Always output: <answer> [your answer] </answer> with no extra text" in user.content


def published_parse(text: str, think: bool, most: int) -> list[str]:
    """What the published code does with one regular expression, for texts short enough for it."""
    pattern = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>" if think else r"<answer>(.*?)</answer>"
    found = re.search(pattern, text, re.DOTALL)
    if not found:
        return []
    content = found[2 if think else 1]
    for mark in ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>"):
        content = content.replace(mark, "").strip()
    return [action.strip() for action in content.split("||") if action.strip()][:most]


def test_answers_are_read_as_published():
    random_, pieces = random.Random(0), ["<think>", "</think>", "<answer>", "</answer>", "||", " ", "\n", "Up", "x"]
    good = 0
    for _ in range(4000):
        text = "".join(random_.choices(pieces, k=random_.randint(0, 12)))
        if random_.random() < 0.5:
            text = f"<think>{text}</think> <answer>Up||{text}</answer>"
        for think in (True, False):
            assert texts.parse(text, think, 3) == published_parse(text, think, 3), text
            good += bool(texts.parse(text, think, 3))
    assert good > 1000


def play(environment, actions, seed=0, cut=False):
    """Plays a seed: the observations, the stop reason, the verdict and the counters."""

    async def played():
        attempt = RagenAttempt(Task(f"w/{seed}", f"seed {seed}", ()), environment)
        await attempt.start()
        turns, reason = [], None
        for action in actions:
            assert reason is None
            step = await attempt.step(action)
            turns.append((action, step.observation.text if step.observation else ""))
            reason = step.stop_reason
        turns += [("<answer>", "")] * cut
        verdict = await attempt.verify(Transcript("", tuple(turns)))
        await attempt.close()
        return [shown for _, shown in turns if shown], reason, verdict, attempt.counters

    return asyncio.run(played())


class Fixed(FrozenLake):
    """The hand-written lake, whatever the seed."""

    def begin(self, seed):
        return LAKE


def test_a_whole_attempt_by_hand():
    environment = Ragen(world=Fixed(slippery=False), think=False)
    shown, reason, verdict, counters = play(
        environment,
        [
            "<answer>down|| DOWN</answer>",  # names in any case
            "<answer>Jump || Right</answer>",  # one of two is none: the other is carried out, and .1 taken off
            "no answer",
            "<answer>Right || Right || Down || Left || Left || Left</answer>",  # over at the third
        ],
    )
    assert shown[0].startswith(
        "Reward:\n0.0\n\nTurn 2:\nState:\n__O_\n_O__\nP___\n___G\nYou have 8 actions left. Always"
    )
    assert shown[1].startswith("Reward:\n0.0\n\nTurn 3:\nState:\n__O_\n_O__\n_P__\n___G\nYou have 7 actions left.")
    assert shown[2].startswith("Reward:\n0\n\nTurn 4:")
    assert reason is StopReason.ANSWER and verdict.reward == pytest.approx(0.8)
    assert verdict.components == {"solved": 1.0, "return": 1.0, "penalty": pytest.approx(0.2)}
    assert counters == {"actions": 6.0, "ineffective_actions": 0.0, "invalid_turns": 2.0}


def test_turns_and_actions_are_limited():
    environment = Ragen(world=Fixed(slippery=False, max_actions=4), think=False, max_turns=3, max_actions_per_turn=3)
    _, reason, verdict, counters = play(
        environment, ["<answer>Up||Up||Up||Down||Down</answer>", "<answer>Up||Up</answer>"]
    )
    assert reason is StopReason.TURN_LIMIT and verdict.reward == 0.0  # what is written too much costs nothing
    assert counters == {"actions": 4.0, "ineffective_actions": 4.0, "invalid_turns": 0.0}
    _, reason, verdict, _ = play(environment, [""] * 3)
    assert reason is StopReason.TURN_LIMIT and verdict.reward == pytest.approx(-0.3)
    _, _, verdict, _ = play(environment, [""], cut=True)  # a turn without room to end has no format either
    assert verdict.reward == pytest.approx(-0.2)


def test_rewards_of_turns():
    environment = Ragen(world=Fixed(slippery=False), think=False, pay="turn")
    actions = ["<answer>Down||Down||x</answer>", "<answer>Right||Right||Right||Down</answer>"]
    _, _, verdict, _ = play(environment, actions)
    assert verdict.reward == 0.0 and verdict.turn_rewards == (pytest.approx(-0.1), 1.0)
    assert len(play(environment, actions[:1], cut=True)[2].turn_rewards) == 2


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("piece", ["<think>", "</think> ", "<answer>", "||", "Up||", "</think><answer>", "\0", "√"])
def test_hostile_texts_cost_time_that_grows_with_their_length_alone(piece, think):
    environment = Ragen(world=Fixed(slippery=False), think=think, max_turns=1)
    _, reason, verdict, counters = play(environment, ["<think>" + piece * 100_000])
    assert reason is StopReason.TURN_LIMIT and verdict.reward == pytest.approx(-0.1) and counters["actions"] == 0


def test_a_task_without_a_seed_is_refused():
    for prompt in ("Begin.", "seed -1", "seed 1 2", "seed " + "9" * 30):
        here = Opening(None, [Task("t", prompt, ())], lambda c, s: None, print)
        with pytest.raises(ConfigError, match="seed NUMBER"), Ragen().open(here):
            pass


LAPTOP = Ragen(world=DRY, think=False, prompt="plain", max_turns=2)
PLAIN_ROOM = Ragen(world=Sokoban(), max_turns=2)
ARMS = Ragen(world=Bandit(), max_turns=1, max_actions_per_turn=1)


@pytest.mark.parametrize("environment", [LAPTOP, PLAIN_ROOM, ARMS])
@pytest.mark.parametrize("flawed", [False, True])
def test_demonstrations_replay_word_for_word(environment, flawed):
    for draft in itertools.islice(text_worlds.generate(environment, 0, solved=True), 25):
        shown = text_worlds.demonstration(environment, "w", draft, float(flawed))
        assert demonstrations._problem(shown) == ""
        observed, reason, verdict, counters = play(environment, [t["action"] for t in shown["turns"]], draft.seed)
        assert observed == [turn["observation"] for turn in shown["turns"][:-1]]
        assert verdict.components["solved"] == float(not flawed) and counters["invalid_turns"] == 0
        ended = flawed and not isinstance(environment.world, Bandit)
        assert reason is (StopReason.TURN_LIMIT if ended else StopReason.ANSWER)


def test_a_whole_dataset_of_worlds(tmp_path, capsys):
    text_worlds.write(tmp_path / "data", LAPTOP, 150, 0, 30, 0.75)
    train = sources.load_tasks(tmp_path / "data", "train", need_answers=False)
    heldout = sources.load_tasks(tmp_path / "data", "heldout", need_answers=False)
    first = [{DRY.begin(LAPTOP.seed(task.prompt)) for task in split} for split in (train, heldout)]
    assert len(train) > len(heldout) > 10 and not first[0] & first[1]
    shown = demonstrations.load(tmp_path / "data/full.jsonl")
    assert len(shown) == 30 and 15 <= sum("||" not in row["turns"][0]["action"] for row in shown) <= 29
    with pytest.raises(ConfigError, match="slippery"):
        text_worlds.write(tmp_path / "x", Ragen(world=FrozenLake()), 10, 0, 5)
    assert text_worlds.main([f"--out={tmp_path / 'b'}", "--world=bandit", "--num=60"]) == 0
    assert "wrote" in capsys.readouterr().out and not (tmp_path / "b/full.jsonl").exists()
    assert text_worlds.main([f"--out={tmp_path / 'b'}"]) == 2 and "exists" in capsys.readouterr().err
