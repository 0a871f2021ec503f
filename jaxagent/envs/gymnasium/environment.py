"""Any environment of the Gymnasium interface: what it shows becomes text, what the policy writes becomes an action.

    --config.env=gymnasium --config.env.make=FrozenLake-v1 --config.data.source=seeds
    --config.env=gymnasium --config.env.make=my_package.my_module:make_env --config.data.source=seeds

A task is a seed (`metadata["seed"]`), so a group's attempts begin alike; without one the task's id decides. The policy
writes `<action>...</action>`: a text for a Text space, a number or one of `actions` for a Discrete one, JSON for every
other (see `spaces`). What is no action of the space is answered with a warning, and the environment does not move.

Gymnasium's functions block: they run in a thread of their own, each within `step_timeout_s`. A thread cannot be
killed, so an environment that hangs costs its attempt and a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from jaxagent.config import ConfigError
from jaxagent.config.choice import object_at
from jaxagent.config.errors import failure_line
from jaxagent.config.ranges import FiniteFloat, Seconds
from jaxagent.envs import tags
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.gymnasium import spaces
from jaxagent.types import StopReason, Task, TokenKind

SOLVED = "solved"
RETURN = "return"
OPENING, CLOSING = tags.pair("action")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gymnasium(Environment):
    """One of Gymnasium's environments, or one of yours with its interface."""

    make: str = ""  # what gymnasium.make takes ("FrozenLake-v1"), or "module:function" that returns an environment
    instructions: str = "Write your action as <action>...</action>."  # the beginning of every prompt
    actions: tuple[str, ...] = ()  # names of a Discrete space's actions; () = their numbers
    pay: Literal["episode", "turn"] = "episode"  # the sum of rewards at the end, or each at its turn
    solved_return: FiniteFloat = 1.0  # from which sum of rewards an attempt counts as solved, in reports
    step_timeout_s: Seconds = 30.0

    score = SOLVED
    calls = "actions"
    stop_strings = ("</action>",)
    tokens = ("<action>", "</action>")

    def __post_init__(self) -> None:
        """Raises ConfigError where no environment is named, or one of a package that is not installed."""
        if not self.make:
            raise ConfigError("config.env.make is empty: name an environment, such as FrozenLake-v1.")
        if not _is_function(self.make) and importlib.util.find_spec("gymnasium") is None:
            raise ConfigError("config.env=gymnasium needs the package gymnasium: pip install gymnasium.")

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt, before what the environment shows at first."""
        return (Message("user", "\n".join(filter(None, (self.instructions, text))) + "\n"),)

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], GymnasiumAttempt]]:
        """Makes one environment, to see that it can be made and that its actions can be written."""
        maker = _maker(self.make)
        try:
            trial = maker()
            if self.actions and int(getattr(trial.action_space, "n", 0)) != len(self.actions):
                count = f"env.actions has {len(self.actions)} names"
                raise ConfigError(f"{count}, and the environment's actions are {trial.action_space}.")
            spaces.check_writable(trial.action_space)
            trial.close()
        except ConfigError:
            raise
        except Exception as error:  # the user's code
            raise ConfigError(f"env.make='{self.make}': {failure_line(error)}.") from error
        yield lambda task: GymnasiumAttempt(task, self, maker)


class GymnasiumAttempt(Attempt):
    """One attempt: one environment, reset once."""

    def __init__(self, task: Task, config: Gymnasium, maker: Callable[[], Any]) -> None:
        self._task, self._config, self._maker = task, config, maker
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "gymnasium")  # environments like one thread best
        self._environment: Any = None
        self._rewards: list[float] = []  # one per turn
        self._success: bool | None = None  # where the environment says so itself
        self.stop_strings: Sequence[str] = config.stop_strings
        self.counters = {"actions": 0.0, "invalid_actions": 0.0}

    async def start(self) -> Sequence[Message]:
        """Makes and resets the environment; its first observation ends the prompt."""
        self._environment = await self._call(self._maker)
        observation, _ = await self._call(self._environment.reset, seed=seed_of(self._task))
        (prompt,) = self._config.messages(self._task.prompt)
        return (dataclasses.replace(prompt, content=f"{prompt.content}{spaces.as_text(observation)}\n"),)

    async def step(self, action: str) -> Step:
        """Takes the last action written."""
        self._rewards.append(0.0)
        last = len(self._rewards) >= self._config.max_turns
        space_action, mistake = as_action(self._environment.action_space, self._config.actions, action)
        if mistake:
            self.counters["invalid_actions"] += 1
            if last:
                return Step(stop_reason=StopReason.TURN_LIMIT)
            return Step(Observation(((f"\n{mistake}\n", TokenKind.WARNING),), "user"))
        self.counters["actions"] += 1
        observation, reward, terminated, truncated, info = await self._call(self._environment.step, space_action)
        self._rewards[-1] = float(reward)
        if "is_success" in info or "success" in info:
            self._success = bool(info.get("is_success", info.get("success")))
        if terminated:
            return Step(stop_reason=StopReason.ANSWER)
        if truncated or last:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        return Step(Observation(((f"\n{spaces.as_text(observation)}\n", TokenKind.OBSERVATION),), "user"))

    async def verify(self, transcript: Transcript) -> Verdict:
        """The rewards that the environment gave."""
        total = sum(self._rewards)
        solved = self._success if self._success is not None else total >= self._config.solved_return
        components = {SOLVED: float(solved), RETURN: total}
        if self._config.pay == "episode":
            return Verdict(total, components)
        turns = (*self._rewards, *[0.0] * (len(transcript.turns) - len(self._rewards)))  # the last one ran out of room
        return Verdict(0.0, components, turns)

    async def close(self) -> None:
        """Closes the environment, behind what it may still be doing."""
        if self._environment is not None:
            self._thread.submit(self._environment.close)
        self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._config.step_timeout_s):
            return await loop.run_in_executor(self._thread, lambda: function(*args, **named))


def _maker(make: str) -> Callable[[], Any]:
    """The function that makes an environment. "module:Name-v1" is gymnasium's own way to import a registration."""
    if _is_function(make):
        return object_at(make, "config.env.make")
    import gymnasium

    return lambda: gymnasium.make(make)


def _is_function(make: str) -> bool:
    return make.partition(":")[2].isidentifier()


def seed_of(task: Task) -> int:
    """The seed of a task, from its metadata or else from its id: below 2**31. Raises ValueError: the metadata's seed is
    no such number."""
    if "seed" not in task.metadata:
        return int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=4).digest(), "big") >> 1
    seed = task.metadata["seed"]
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise ValueError(f"metadata['seed'] of task {task.id!r} must be a whole number below 2**31, got {seed!r}")
    return seed


def as_action(space: Any, names: Sequence[str], text: str) -> tuple[Any, str]:
    """(the action that a text names, ""), or (None, what the policy has to write instead, in one line).

    Whatever a space raises is the environment's own failure, and no mistake of the policy's.
    """
    texts = tags.inside(OPENING, CLOSING, text)
    if not texts:
        return None, "Write <action>...</action>."
    word = texts[-1].strip()
    if names:
        if word not in names:
            return None, f"Actions are: {', '.join(names)}."
        return int(getattr(space, "start", 0)) + names.index(word), ""
    try:
        action = spaces.read(space, word if spaces.kind_of(space) == "Text" else json.loads(word))
    except (ValueError, OverflowError, RecursionError):
        return None, f"Actions are: {space}."
    return (action, "") if space.contains(action) else (None, f"Actions are: {space}.")
