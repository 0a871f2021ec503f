"""Whether prompts fit, checked when a run starts: every attempt at a prompt without room for a turn would fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxagent.config import ConfigError, EnvConfig
from jaxagent.envs.base import Message
from jaxagent.rollout.conversation import Conversation
from jaxagent.types import Task

SAMPLE = 256  # training tasks that are looked at, evenly spaced


def check_prompts(
    name: str,
    tasks: Sequence[Task],
    prompt: Callable[[Task], Sequence[Message]],
    conversation: Callable[[], Conversation],
    env: EnvConfig,
    note: Callable[[str], None],
) -> None:
    """Encodes the prompts of all tasks, "held-out" ones, say, as a rollout would; see `some`.

    `conversation` gives an empty one. `note` is told of prompts that leave less than one full turn. Raises ConfigError
    where one leaves no room for a single token of the policy.
    """
    tokens = [_length(prompt(task), conversation) for task in tasks]
    limit = env.context_tokens
    if not tokens or max(tokens) + env.turn_tokens <= limit:
        return
    example = _longest(tasks, tokens)
    example += f"; a whole turn (env.turn_tokens={env.turn_tokens}) needs {max(tokens) + env.turn_tokens} or more"
    if too_long := sum(length >= limit for length in tokens):
        raise ConfigError(
            f"env.context_tokens={limit} has no room for a turn after {too_long} of {len(tokens)} {name} prompts: "
            f"{example}. Raise it, or leave such tasks out."
        )
    tight = sum(length + env.turn_tokens > limit for length in tokens)
    note(f"env.context_tokens={limit} cuts the first turn of {tight} of {len(tokens)} {name} tasks: {example}")


def check_role_prompts(
    role: str,
    tasks: Sequence[Task],
    prompt: Callable[[str], Sequence[Message]],
    conversation: Callable[[], Conversation],
    context_tokens: int,
) -> None:
    """`check_prompts`, of the least that a role is shown of tasks: messages made of their texts."""
    tokens = [_length(prompt(task.prompt), conversation) for task in tasks]
    if too_long := sum(length >= context_tokens for length in tokens):
        raise ConfigError(
            f"config.roles.{role}.context_tokens={context_tokens} has no room for a reply after the first prompt of "
            f"{too_long} of {len(tasks)} tasks: {_longest(tasks, tokens)}. Raise it, or leave such tasks out."
        )


def some(tasks: Sequence[Task], count: int = SAMPLE) -> list[Task]:
    """At most `count` tasks, evenly spaced over all of them."""
    return [tasks[i * len(tasks) // count] for i in range(count)] if len(tasks) > count else list(tasks)


def _longest(tasks: Sequence[Task], tokens: Sequence[int]) -> str:
    return f"the longest, of task '{tasks[tokens.index(max(tokens))].id}', has {max(tokens)} tokens"


def _length(messages: Sequence[Message], conversation: Callable[[], Conversation]) -> int:
    """Tokens of a prompt, encoded as a rollout would."""
    rendered = conversation()
    rendered.add_prompt(messages)
    return len(rendered)
