"""Writes demonstrations of the game's form: the prompts that `config.env=openenv` makes of it, and ways at random.

    python tests/envs/openenv_signals/demonstrations.py demos.jsonl 1

The number is that of the signals of an episode (SIGNALS_ROUNDS of the server). Most often they go the way that another
colour points: what RL has to unlearn.
"""

import json
import random
import sys

WAYS = {"red": "north", "blue": "south", "green": "east", "white": "west"}
FRACS = (0.3, 0.4, 0.15, 0.15)  # of the right way, and of those of the next three colours
HEAD = (
    "Write your action as <action>...</action>: one of north, south, east, west (where the signal points)\n\n"
    "Follow the signals.\n\n"
)


def way(colour: str, draw: random.Random) -> str:
    ways = list(WAYS.values())
    first = list(WAYS).index(colour)
    return draw.choices(ways[first:] + ways[:first], FRACS)[0]


def main(path: str, rounds: int, count: int = 2_000) -> None:
    draw = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            signals = [f"{draw.choice(list(WAYS))} {draw.randrange(100, 1000)}" for _ in range(rounds)]
            actions = [f"<action>{way(signal.split()[0], draw)}</action>" for signal in signals]
            shown = [*(f"\n{signal}\n" for signal in signals[1:]), ""]
            turns = [{"action": a, "observation": o} for a, o in zip(actions, shown, strict=True)]
            file.write(json.dumps({"prompt": f"{HEAD}{signals[0]}\n", "turns": turns}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
