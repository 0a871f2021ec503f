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
    """Encodes the prompts of tasks as a rollout would.

    Args:
      name: of the tasks, "held-out", for messages.
      tasks: all of them are looked at; see `some`.
      prompt: the environment's, a task -> its messages.
      conversation: an empty one.
      env: its `context_tokens` is the limit.
      note: called with a line about prompts that leave less than one full turn.

    Raises:
      ConfigError: prompts that leave no room for a single token of the policy.
    """
    tokens = [_length(prompt(task), conversation) for task in tasks]
    limit = env.context_tokens
    if not tokens or max(tokens) + env.turn_tokens <= limit:
        return
    longest = max(range(len(tokens)), key=tokens.__getitem__)
    example = f"the longest, of task '{tasks[longest].id}', has {tokens[longest]} tokens"
    least = f"a whole turn (env.turn_tokens={env.turn_tokens}) needs {tokens[longest] + env.turn_tokens} or more"
    if too_long := sum(length >= limit for length in tokens):
        raise ConfigError(
            f"env.context_tokens={limit} has no room for a turn after {too_long} of {len(tokens)} {name} prompts: "
            f"{example}; {least}. Raise it, or leave such tasks out."
        )
    tight = sum(length + env.turn_tokens > limit for length in tokens)
    note(f"env.context_tokens={limit} cuts the first turn of {tight} of {len(tokens)} {name} tasks: {example}; {least}")


def check_role_prompts(
    role: str,
    tasks: Sequence[Task],
    prompt: Callable[[str], Sequence[Message]],
    conversation: Callable[[], Conversation],
    context_tokens: int,
) -> None:
    """Encodes the least that a role is shown of tasks.

    Args:
      role: its name, for messages.
      tasks: all of them are looked at.
      prompt: a task's text -> the role's messages.
      conversation: an empty one.
      context_tokens: of the role.

    Raises:
      ConfigError: prompts that leave no room for a single token of the role's.
    """
    tokens = [_length(prompt(task.prompt), conversation) for task in tasks]
    if too_long := sum(length >= context_tokens for length in tokens):
        longest = max(range(len(tokens)), key=tokens.__getitem__)
        raise ConfigError(
            f"config.roles.{role}.context_tokens={context_tokens} has no room for a reply after the first prompt of "
            f"{too_long} of {len(tasks)} tasks: the longest, of task '{tasks[longest].id}', has {tokens[longest]} "
            "tokens. Raise it, or leave such tasks out."
        )


def some(tasks: Sequence[Task], count: int = SAMPLE) -> list[Task]:
    """At most `count` tasks, evenly spaced over all of them."""
    return [tasks[i * len(tasks) // count] for i in range(count)] if len(tasks) > count else list(tasks)


def _length(messages: Sequence[Message], conversation: Callable[[], Conversation]) -> int:
    """Tokens of a prompt, encoded as a rollout would."""
    rendered = conversation()
    rendered.add_prompt(messages)
    return len(rendered)
