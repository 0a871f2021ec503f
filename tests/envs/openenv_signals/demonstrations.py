"""Writes demonstrations of the game's form: the prompts that `config.env=openenv` makes of it, and ways at random.

    python tests/envs/openenv_signals/demonstrations.py demos.jsonl

Nothing in them says what a colour means: three in four ways are wrong, which RL has to find out.
"""

import json
import random
import sys

COLOURS, WAYS = ("red", "blue", "green", "white"), ("north", "south", "east", "west")
HEAD = (
    "Write your action as <action>...</action>: one of north, south, east, west (where the signal points)\n\n"
    "Follow the signals.\n\n"
)


def main(path: str, count: int = 2_000) -> None:
    draw = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            signals = [f"{draw.choice(COLOURS)} {draw.randrange(100, 1000)}" for _ in range(3)]
            actions = [f"<action>{draw.choice(WAYS)}</action>" for _ in signals]
            shown = [*(f"\n{signal}\n" for signal in signals[1:]), ""]
            turns = [{"action": a, "observation": o} for a, o in zip(actions, shown, strict=True)]
            file.write(json.dumps({"prompt": f"{HEAD}{signals[0]}\n", "turns": turns}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
