"""Writes seeds of RAGEN's worlds as tasks, and demonstrations that act too little, or on the wrong arm.

    python -m data_pipelines.text_worlds --out=data/frozen_lake --world=frozen_lake --num=4000

A task is "seed 17". Demonstrations are for worlds without chance, and for the bandit:

    frozen_lake, sokoban   the shortest way, as many actions per turn as a turn may have, "Down || Down || Right".
                           Those with `--flawed_frac` write one action per turn and run out of turns.
    bandit                 the arm with the higher mean; those with `--flawed_frac` pull the other one

With demonstrations, tasks are those that one action per turn cannot solve and the shortest way can.

Writes, all at once or not at all:

    array_record, TFDS layout   splits train and heldout (worlds never seen in training)
    full.jsonl, texts.jsonl     demonstrations, and what a tokenizer is trained on

A task's split follows from its first state alone, so tasks of any two seeds never cross splits; the bandit has two
first states, and splits by seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxagent.config import ConfigError
from jaxagent.config.choice import Choice
from jaxagent.config.command import amount, count, exit_code, part
from jaxagent.data_pipelines import generated
from jaxagent.envs.ragen import texts
from jaxagent.envs.ragen.bandit import Bandit
from jaxagent.envs.ragen.environment import WORLDS, Ragen
from jaxagent.envs.ragen.world import State, World, chance

TRAIN, HELDOUT = "train", "heldout"
HELDOUT_FRAC = 0.2
MOST_DRAWS = 10_000  # seeds without a task, one after the other
ACTION_REPEATS = 100  # in the tokenizer's texts: an action should be one token


@dataclasses.dataclass(frozen=True)
class Draft:
    """One task and how it is solved."""

    seed: int
    first: str  # the first state as text
    way: tuple[str, ...]  # the actions of the shortest solution; () = it is not known

    @property
    def prompt(self) -> str:
        """Of the task."""
        return f"seed {self.seed}"


def solution(world: World, state: State) -> tuple[str, ...] | None:
    """The shortest way to solve a world without chance, within its `max_actions`; None where there is none."""
    if isinstance(world, Bandit):
        return (world.high_arm,)
    seen = {state}
    waiting: deque[tuple[State, tuple[str, ...]]] = deque([(state, ())])
    while waiting:
        at, way = waiting.popleft()
        if len(way) == world.max_actions:
            return None
        for action in world.actions:
            outcome = world.act(at, action, random.Random(0))
            if outcome.solved:
                return (*way, action)
            if not outcome.done and outcome.state not in seen:
                seen.add(outcome.state)
                waiting.append((outcome.state, (*way, action)))
    return None


def generate(environment: Ragen, seed: int, solved: bool) -> Iterator[Draft]:
    """Endless stream of tasks, no two with one seed.

    Args:
      environment: whose world, turns and actions per turn count.
      seed: of the draws.
      solved: only tasks with a known solution that needs several actions in a turn.
    """
    world, random_ = environment.world, random.Random(f"text_worlds/{seed}")
    seen: set[int] = set()
    barren = 0  # draws since the last task
    while True:
        drawn, barren = random_.randrange(2**31), barren + 1
        if barren > MOST_DRAWS:
            raise ConfigError(f"{barren} seeds of {world} hold no task that needs several actions in a turn.")
        state = world.begin(drawn)
        way = solution(world, state) if solved else ()
        if drawn in seen or way is None or (solved and not _needed(environment, len(way))):
            continue
        seen.add(drawn)
        barren = 0
        yield Draft(drawn, world.render(state), way)


def _needed(environment: Ragen, actions: int) -> bool:
    if isinstance(environment.world, Bandit):
        return True
    return environment.max_turns < actions <= environment.max_turns * environment.max_actions_per_turn


def split_of(world: World, draft: Draft) -> str:
    """By what the policy sees first."""
    key = draft.prompt if isinstance(world, Bandit) else draft.first
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return HELDOUT if int.from_bytes(digest, "big") < HELDOUT_FRAC * 2**32 else TRAIN


def row(name: str, draft: Draft) -> dict[str, Any]:
    """The task's row (`jaxagent.data.rows`)."""
    # No kind per length of the way: held-out tasks are drawn evenly over kinds, and hardly any way is long.
    return {"id": f"{name}/{draft.seed}", "prompt": draft.prompt, "answers": [], "kind": name}


def demonstration(environment: Ragen, name: str, draft: Draft, flawed_frac: float) -> dict[str, Any]:
    """An episode. Whether it is flawed depends on the task alone."""
    world, way = environment.world, draft.way
    flawed = random.Random(f"flawed/{name}/{draft.seed}").random() < flawed_frac
    per_turn = environment.max_actions_per_turn
    if flawed and isinstance(world, Bandit):
        way = (world.low_arm,)
    elif flawed:
        per_turn, way = 1, way[: environment.max_turns]
    state, turns, count = world.begin(draft.seed), [], 0
    for actions in (way[at : at + per_turn] for at in range(0, len(way), per_turn)):
        reward = 0
        for action in actions:
            outcome = world.act(state, action, chance(draft.seed, count))
            state, reward, count = outcome.state, reward + outcome.reward, count + 1
        shown = environment.state_text(len(turns) + 2, state, world.max_actions - count, reward)
        turns.append({"action": written(actions, environment.think), "observation": shown})
    turns[-1]["observation"] = ""
    return {"prompt": draft.prompt, "turns": turns, "id": f"{name}/{draft.seed}", "kind": name}


def written(actions: Sequence[str], think: bool) -> str:
    """What a policy writes."""
    answer = f"<answer>{f' {texts.SEPARATOR} '.join(actions)}</answer>"
    return f"<think></think>{answer}" if think else answer


def write(
    folder: Path, environment: Ragen, num: int, seed: int, num_demonstrations: int, flawed_frac: float = 0.0
) -> None:
    """Writes the dataset described in the module's docstring into `folder`, which must not exist yet.

    Args:
      folder: where it will stand.
      environment: whose world it is, and how demonstrations look.
      num: tasks, both splits together.
      seed: of the draws; the same seed gives the same bytes.
      num_demonstrations: rows of full.jsonl, from training tasks: first the dataset's, then further ones.
      flawed_frac: see `demonstration`.

    Raises:
      ConfigError: `num` is too small for two splits, or demonstrations are wanted of a world with chance.
    """
    world = environment.world
    name = Choice("jaxagent.envs.ragen.environment:WORLDS").name_of(world)
    if num_demonstrations and getattr(world, "slippery", False):
        raise ConfigError("There are no demonstrations for slippery ice: set env.world.slippery=false.")
    stream = generate(environment, seed, solved=num_demonstrations > 0)
    tasks: dict[str, list[Draft]] = {TRAIN: [], HELDOUT: []}
    for draft in itertools.islice(stream, num):
        tasks[split_of(world, draft)].append(draft)
    if not tasks[TRAIN] or not tasks[HELDOUT]:
        raise ConfigError(f"--num={num} is too few for a train and a heldout split.")
    training = itertools.chain(tasks[TRAIN], (draft for draft in stream if split_of(world, draft) == TRAIN))
    shown = [
        demonstration(environment, name, draft, flawed_frac) for draft in itertools.islice(training, num_demonstrations)
    ]
    rows = {split: (row(name, draft) for draft in tasks[split]) for split in tasks}
    read = shown or [row(name, draft) | {"turns": []} for draft in tasks[TRAIN][:500]]
    beside = {"texts.jsonl": generated.as_rows(tokenizer_texts(environment, read[:500]))}
    generated.write_dataset(folder, rows, beside | ({"full.jsonl": shown} if shown else {}), need_answers=False)


def tokenizer_texts(environment: Ragen, shown: Sequence[dict[str, Any]]) -> list[str]:
    """What occurs in episodes, and the actions often enough to be one token."""
    prompts = [message.content for row in shown for message in environment.messages(row["prompt"])]
    turns = [part for row in shown for turn in row["turns"] for part in turn.values() if part]
    actions = [f"{before}{action}" for action in environment.world.actions for before in ("", " ")]
    return prompts + turns + actions * ACTION_REPEATS


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="what to write; must not exist")
    parser.add_argument("--world", choices=tuple(WORLDS), default="sokoban", help="with its published settings")
    parser.add_argument("--num", type=count, default=4000, help="tasks, all splits together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=amount, default=0)
    parser.add_argument("--flawed_frac", type=part, default=0.0, help="demonstrations that do it wrong")

    def run(args: argparse.Namespace) -> None:
        environment = Ragen(world=WORLDS[args.world]())
        write(args.out, environment, args.num, args.seed, args.demonstrations, args.flawed_frac)

    return generated.finish(parser, argv, run)


if __name__ == "__main__":
    sys.exit(exit_code(main))
