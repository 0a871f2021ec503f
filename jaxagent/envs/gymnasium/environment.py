"""Any environment of the Gymnasium interface: what it shows becomes text, what the policy writes becomes an action.

    --config.env=gymnasium --config.env.make=FrozenLake-v1 --config.data.source=seeds
    --config.env=gymnasium --config.env.make=my_package.my_module:make_env --config.data.source=seeds

A task is a seed (`metadata["seed"]`), so a group's attempts begin alike; without one the task's id decides. The policy
writes `<action>...</action>`: a text for a Text space, a number or one of `actions` for a Discrete one, JSON for every
other (see `spaces`). What is no action of the space is answered with a warning, and the environment does not move.

Gymnasium's functions block: they run in a thread of their own, each within `step_timeout_s`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxagent.config import ConfigError
from jaxagent.config.choice import object_at
from jaxagent.config.errors import as_config_error
from jaxagent.config.ranges import FiniteFloat, Seconds
from jaxagent.envs import forms, tags
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.gymnasium import spaces
from jaxagent.envs.own_thread import OwnThread
from jaxagent.envs.seeds import seed_of
from jaxagent.types import StopReason, Task, TokenKind

SOLVED = "solved"
RETURN = "return"
OPENING, CLOSING = tags.pair("action")
ACTIONS = "{actions}"  # in the instructions: what an action is, in words
MARKED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)  # as gymnasium's colorize has it
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gymnasium(Environment):
    """One of Gymnasium's environments, or one of yours with its interface."""

    make: str = ""  # what gymnasium.make takes ("FrozenLake-v1"), or "module:function" that returns an environment
    arguments: str = "{}"  # of gymnasium.make or the function, a JSON object: '{"max_episode_steps": 20}'
    instructions: str = f"Write your action as <action>...</action>: {ACTIONS}."  # the beginning of every prompt
    actions: tuple[str, ...] = ()  # names of a Discrete space's actions; () = their numbers
    show: Literal["observation", "render", "both"] = "observation"  # render: the text of render_mode="ansi"
    pay: Literal["episode", "turn"] = "episode"  # the sum of rewards at the end, or each at its turn
    solved_return: FiniteFloat = 1.0  # from which sum of rewards an attempt counts as solved, in reports
    step_timeout_s: Seconds = 30.0

    score = SOLVED
    calls = "actions"
    observation_role = "user"
    stop_strings = ("</action>",)
    tokens = ("<action>", "</action>")

    def __post_init__(self) -> None:
        """Raises ConfigError where no environment is named, or one of a package that is not installed."""
        if not self.make:
            raise ConfigError("config.env.make is empty: name an environment, such as FrozenLake-v1.")
        if not _is_function(self.make) and importlib.util.find_spec("gymnasium") is None:
            raise ConfigError("config.env=gymnasium needs the package gymnasium: pip install gymnasium.")
        forms.json_object(self.arguments, "config.env.arguments")

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt, before what the environment shows at first."""
        instructions = self.instructions
        if ACTIONS in instructions:
            form = _action_form(self.make, self.arguments, self.actions, self.show)
            instructions = instructions.replace(ACTIONS, form)
        return (Message("user", "\n".join(filter(None, (instructions, text))) + "\n"),)

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], GymnasiumAttempt]]:
        """Makes one environment, to see that it can be made and that its actions can be written."""
        thread = OwnThread("gymnasium", self.step_timeout_s)
        form = functools.partial(_action_form, self.make, self.arguments, self.actions, self.show)
        try:
            opening.run(thread.call("making the environment", form), self.step_timeout_s + 1)
        except TimeoutError as error:
            raise ConfigError(f"config.env.make='{self.make}': {error}.") from None
        finally:
            thread.end()
        maker = _maker(self.make, self.arguments, self.show)
        yield lambda task: GymnasiumAttempt(task, self, maker)


class GymnasiumAttempt(Attempt):
    """One attempt: one environment, reset once."""

    def __init__(self, task: Task, config: Gymnasium, maker: Callable[[], Any]) -> None:
        self._task, self._config, self._maker = task, config, maker
        self._thread = OwnThread(
            "gymnasium", config.step_timeout_s, "the environment's "
        )  # which likes one thread best
        self._environment: Any = None
        self._rewards: list[float] = []  # one per turn
        self._success: bool | None = None  # where the environment says so itself
        self.stop_strings: Sequence[str] = config.stop_strings
        self.counters = {"actions": 0.0, "invalid_actions": 0.0}

    async def start(self) -> Sequence[Message]:
        """Makes and resets the environment; its first observation ends the prompt.

        Raises:
          ValueError: reset returns something else than an observation and a mapping.
        """
        self._environment = await self._thread.call("making the environment", self._maker)
        options = {"options": self._task.metadata["options"]} if "options" in self._task.metadata else {}
        reset = functools.partial(self._environment.reset, seed=seed_of(self._task), **options)
        result = await self._thread.call("reset", reset)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise ValueError(f"reset must return (observation, info), got {result!r:.100}")
        (prompt,) = self._config.messages(self._task.prompt)
        return (dataclasses.replace(prompt, content=f"{prompt.content}{await self._shown(result[0])}\n"),)

    async def step(self, action: str) -> Step:
        """Takes the last action written. Raises ValueError: the environment's answer is not as Gymnasium has it."""
        self._rewards.append(0.0)
        last = len(self._rewards) >= self._config.max_turns
        space_action, mistake = as_action(self._environment.action_space, self._config.actions, action)
        if mistake:
            self.counters["invalid_actions"] += 1
            if last:
                return Step(stop_reason=StopReason.TURN_LIMIT)
            return Step(Observation(((f"\n{mistake}\n", TokenKind.WARNING),), "user"))
        self.counters["actions"] += 1
        result = await self._thread.call("step", functools.partial(self._environment.step, space_action))
        observation, self._rewards[-1], terminated, truncated, info = outcome_of(result)
        if "is_success" in info or "success" in info:
            self._success = bool(info.get("is_success", info.get("success")))
        if terminated:
            return Step(stop_reason=StopReason.ANSWER)
        if truncated or last:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        return Step(self._config.observation(action, f"\n{await self._shown(observation)}\n"))

    @property
    def action_space(self) -> Any:
        """What is acted in, once the attempt has started."""
        return self._environment.action_space

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
        self._thread.end(None if self._environment is None else self._environment.close)

    async def _shown(self, observation: Any) -> str:
        shown = [] if self._config.show == "render" else [spaces.as_text(observation)]
        if self._config.show != "observation":
            picture = await self._thread.call("render", self._environment.render)
            if not isinstance(picture, str):
                raise ValueError(f"render must return a text, got {type(picture).__name__}")
            shown.append(ESCAPE.sub("", MARKED.sub(r"[\1]", picture)).rstrip("\n"))
        return "\n".join(shown)


def outcome_of(result: Any) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
    """(observation, reward, terminated, truncated, info) of what `step` returned. Raises ValueError: it is no such."""
    if not isinstance(result, tuple) or len(result) != 5:
        of = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise ValueError(
            "step must return (observation, reward, terminated, truncated, info), "
            f"got {type(result).__name__}{of}: {result!r:.100}"
        )
    observation, reward, *ends, info = result
    if getattr(reward, "shape", ()) != () or isinstance(reward, str) or not hasattr(reward, "__float__"):
        raise ValueError(f"step must return a number as reward, got {type(reward).__name__}: {reward!r:.100}")
    if not math.isfinite(reward):
        raise ValueError(f"step must return a finite reward, got {reward!r}")
    if not all(getattr(end, "shape", ()) == () and hasattr(end, "__bool__") for end in ends):
        raise ValueError(f"step must return terminated and truncated as True or False, got {ends!r:.100}")
    if not isinstance(info, Mapping):
        raise ValueError(f"step must return info as a mapping, got {type(info).__name__}: {info!r:.100}")
    return observation, float(reward), bool(ends[0]), bool(ends[1]), info


def _maker(make: str, arguments: str, show: str) -> Callable[[], Any]:
    """The function that makes an environment. "module:Name-v1" is gymnasium's own way to import a registration."""
    named = forms.json_object(arguments, "config.env.arguments")
    if _is_function(make):
        return functools.partial(object_at(make, "config.env.make"), **named)
    import gymnasium

    if show != "observation":
        named = {"render_mode": "ansi", **named}
    return functools.partial(gymnasium.make, make, **named)


@functools.lru_cache(maxsize=8)
def _action_form(make: str, arguments: str, actions: tuple[str, ...], show: str) -> str:
    """What the policy writes, in words. Raises ConfigError: the environment cannot be made, or not be played."""
    maker, place = _maker(make, arguments, show), f"config.env.make='{make}'"
    with as_config_error(place):
        environment = maker()
        if missing := [name for name in ("reset", "step", "action_space") if not hasattr(environment, name)]:
            raise ConfigError(f"{place} makes {type(environment).__name__}, which has no {', '.join(missing)}.")
        for name, kind in (("num_envs", "a vector environment"), ("possible_agents", "an environment of many agents")):
            if hasattr(environment, name):
                raise ConfigError(f"{place} makes {kind}: give one of a single game; attempts run side by side anyway.")
        space = environment.action_space
        if actions and int(getattr(space, "n", 0)) != len(actions):
            count = f"env.actions has {len(actions)} names"
            raise ConfigError(f"{count}, and the environment's actions are {space}.")
        spaces.check_writable(space)
        mode = getattr(environment, "render_mode", None)
        if show != "observation" and mode != "ansi":
            raise ConfigError(f"config.env.show='{show}' needs render_mode='ansi', and {place} has '{mode}'.")
        environment.close()
        return f"one of {', '.join(actions)}" if actions else spaces.form(space)


def _is_function(make: str) -> bool:
    return make.partition(":")[2].isidentifier()


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
    for value in _values(space, word):
        try:
            action = spaces.read(space, value)
        except (ValueError, OverflowError, RecursionError):
            continue
        if space.contains(action):
            return action, ""
    return None, f"An action is {spaces.form(space)}."


def _values(space: Any, word: str) -> Iterator[Any]:
    """What a word may stand for: JSON, and a text as it is. In quotes a text keeps what would be lost at its ends."""
    with contextlib.suppress(ValueError, RecursionError):
        yield json.loads(word, strict=False)
    if spaces.kind_of(space) == "Text":
        yield word
