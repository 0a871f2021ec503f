"""What RAGEN says to the policy, letter for letter as published, and how it reads the policy's answer."""

from __future__ import annotations

import re

from jaxagent.envs.ragen.world import World
from jaxagent.envs.tags import MAX_CHARS

SYSTEM = "You're a helpful assistant. "
SEPARATOR = "||"
MAX_WORDS = 100  # what the prompt names as the most; published for these three worlds
_FORMAT = {
    True: "<think> [Your thoughts] </think> <answer> [your answer] </answer>",
    False: "<answer> [your answer] </answer>",
}
_REMOVED = ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>")  # inside an answer
_BETWEEN = re.compile(r"</think>\s*<answer>")


def introduction(world: World) -> str:
    """The beginning of the prompt: what the world is, its symbols and its actions."""
    text = world.instruction
    if world.symbols:
        text += "\nThe meaning of each symbol in the state is:\n"
        text += ", ".join(f"{symbol}: {meaning}" for symbol, meaning in world.symbols.items())
        text += "\nYour available actions are:\n" + ", ".join(world.actions)
        text += f'\nYou can make up to {world.max_actions} actions, separated by the action separator " {SEPARATOR} "\n'
    return text


def turn(number: int, state: str, actions_left: int, think: bool) -> str:
    """What introduces a turn, counted from 1; `think`: the policy is to think first."""
    return (
        f"\nTurn {number}:\nState:\n{state}\nYou have {actions_left} actions left. Always output: {_FORMAT[think]} "
        f"with no extra text. Strictly follow this format. Max response length: {MAX_WORDS} words (tokens).\n"
    )


def reward(value: float) -> str:
    """What stands before the next turn. A turn whose actions were all invalid has the whole number 0, as published."""
    return f"Reward:\n{value}\n"


def parse(text: str, think: bool, most: int) -> list[str]:
    """The actions in an answer, valid or not, at most so many; none where the format is wrong.

    As published the first <think> counts and, behind it, the first </think> that <answer> follows; without `think`,
    the first <answer>. Actions behind the first `most` are dropped and not punished.
    """
    text = text[:MAX_CHARS]
    if think:
        think_start = text.find("<think>")
        answer_start = _BETWEEN.search(text, think_start) if think_start >= 0 else None
        at = answer_start.end() if answer_start else -1
    else:
        at = text.find("<answer>")
        at += len("<answer>") if at >= 0 else 0
    end = text.find("</answer>", at) if at >= 0 else -1
    if end < 0:
        return []
    content = text[at:end]
    for mark in _REMOVED:
        content = content.replace(mark, "").strip()
    return [action for part in content.split(SEPARATOR) if (action := part.strip())][:most]
