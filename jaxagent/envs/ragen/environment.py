"""RAGEN's environments: a text world, several turns, and several actions per turn (Wang et al., arXiv 2504.20073).

    <think> The goal is below. </think><answer>Down || Down || Right</answer>

A task is nothing but a seed, "seed 17", of which `env.world` makes its world. Deliberate differences from the published
code: sampled tokens stay as they are (there, answers are parsed, written anew and encoded again), the policy writes its
first <think> or <answer> itself, and a generation ends at </answer>, behind which nothing was read anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from jaxagent.config import ConfigError
from jaxagent.config.choice import Choice
from jaxagent.config.ranges import NonNegativeFloat, PositiveInt
from jaxagent.envs.base import Attempt, Environment, Message, Opening, Step, Transcript, Verdict
from jaxagent.envs.ragen import texts
from jaxagent.envs.ragen.bandit import Bandit
from jaxagent.envs.ragen.frozen_lake import FrozenLake
from jaxagent.envs.ragen.sokoban import Sokoban
from jaxagent.envs.ragen.world import State, World, chance
from jaxagent.types import StopReason, Task

WORLDS: dict[str, type[World]] = {"bandit": Bandit, "frozen_lake": FrozenLake, "sokoban": Sokoban}
SEED = re.compile(r"seed (\d{1,18})")  # a task's prompt
SEARCHED = 20_000  # states, for a solution
TAGS = ("<think>", "</think>", "<answer>", "</answer>", texts.SEPARATOR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ragen(Environment):
    """A world of `WORLDS`, turn by turn, with at most `max_actions_per_turn` actions in each."""

    world: Annotated[Any, Choice("jaxagent.envs.ragen.environment:WORLDS")] = dataclasses.field(default_factory=Sokoban)
    # plain: the state alone, for a policy that learns the protocol from demonstrations
    prompt: Literal["published", "plain"] = "published"
    think: bool = True  # <think>...</think> before <answer>
    max_actions_per_turn: PositiveInt = 5  # what is written behind them is not read
    format_penalty: NonNegativeFloat = 0.1  # taken off for a turn with an action that is none, or without any action
    pay: Literal["episode", "turn"] = "episode"  # the sum of all rewards at the end, or each at its turn

    score = "solved"
    calls = "actions"
    observation_role = "user"
    stop_strings = ("</answer>",)

    @property
    def tokens(self) -> Sequence[str]:  # type: ignore[override]
        """The tags, and each symbol of the world."""
        return (*TAGS, *self.world.symbols)

    def seed(self, text: str) -> int:
        """The seed of a task's prompt. Raises ConfigError: it names none."""
        match = SEED.fullmatch(text.strip())
        if not match:
            raise ConfigError(f"a task of the environment 'ragen' has the prompt 'seed NUMBER', not {text[:60]!r}.")
        return int(match[1])

    def oracle(self, task: Task) -> Sequence[str] | None:
        """The shortest way to the goal, found by trying all; None where `SEARCHED` states do not hold one."""
        seed = self.seed(task.prompt)
        start = self.world.begin(seed)
        ways: list[tuple[State, tuple[str, ...]]] = [(start, ())]
        seen: set[tuple[int, State]] = set()
        for state, way in ways:
            if len(way) >= self.world.max_actions or len(ways) > SEARCHED:
                continue
            for name in self.world.actions:
                outcome = self.world.act(state, name, chance(seed, len(way)))
                if outcome.solved:
                    return self._as_turns((*way, name))
                if not outcome.done and (place := (len(way), outcome.state)) not in seen:
                    seen.add(place)
                    ways.append((outcome.state, (*way, name)))
        return None

    def _as_turns(self, actions: Sequence[str]) -> list[str]:
        """Actions as the policy writes them, as many to a turn as are read."""
        thought, most = "<think> </think>" if self.think else "", self.max_actions_per_turn
        parts = [actions[i : i + most] for i in range(0, len(actions), most)]
        return [f"{thought}<answer>{f' {texts.SEPARATOR} '.join(part)}</answer>" for part in parts]

    def messages(self, text: str) -> tuple[Message, ...]:
        """The prompt of a task: the world's introduction and its first state."""
        world = self.world
        state_text = self.state_text(1, world.begin(self.seed(text)), world.max_actions)
        if self.prompt == "plain":
            return (Message("user", state_text),)
        return (Message("system", texts.SYSTEM), Message("user", texts.introduction(world) + state_text))

    def state_text(self, number: int, state: State, actions_left: int, reward: float | None = None) -> str:
        """A state as the policy reads it, with the number of the turn that begins, from 1, and the last reward."""
        rendered = self.world.render(state)
        if self.prompt == "plain":
            return f"{rendered}\n" if reward is None else f"\n{rendered}\n"
        before = "" if reward is None else texts.reward(reward)
        return before + texts.turn(number, rendered, actions_left, self.think)

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[[Task], RagenAttempt]]:
        """Looks at the seeds of the held-out tasks."""
        for task in opening.tasks:
            self.seed(task.prompt)
        yield lambda task: RagenAttempt(task, self)


class RagenAttempt(Attempt):
    """One attempt at one seed."""

    stop_strings: Sequence[str] = Ragen.stop_strings

    def __init__(self, task: Task, config: Ragen) -> None:
        self._config, self._world = config, config.world
        self._prompt = task.prompt
        self._seed = config.seed(task.prompt)
        self._state: State = None
        self._names = {name.lower(): name for name in self._world.actions}
        self._rewards: list[float] = []  # of the world, one per turn
        self._penalties: list[float] = []  # likewise, 0 or more
        self._solved = False
        self.counters: dict[str, float] = dict.fromkeys(("actions", "ineffective_actions", "invalid_turns"), 0.0)

    async def start(self) -> Sequence[Message]:
        """The prompt."""
        self._state = self._world.begin(self._seed)
        return self._config.messages(self._prompt)

    async def step(self, action: str) -> Step:
        """Carries out the actions of one answer, until the world is over or no action is left."""
        config = self._config
        words = texts.parse(action, config.think, config.max_actions_per_turn)
        valid = [self._names[name] for word in words if (name := word.lower()) in self._names]
        self._judge_format(bool(valid) and len(valid) == len(words))
        reward, is_over = 0, False
        for name in valid:
            if self._actions_left <= 0 or is_over:
                break
            outcome = self._world.act(self._state, name, chance(self._seed, int(self.counters["actions"])))
            self.counters["actions"] += 1
            self.counters["ineffective_actions"] += outcome.state == self._state
            self._state, is_over, self._solved = outcome.state, outcome.done, outcome.solved
            reward += outcome.reward
        self._rewards.append(reward)
        if is_over:
            return Step(stop_reason=StopReason.ANSWER)
        if self._actions_left <= 0 or len(self._rewards) >= config.max_turns:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        text = config.state_text(len(self._rewards) + 1, self._state, self._actions_left, reward)
        return Step(config.observation(action, text))

    async def verify(self, transcript: Transcript) -> Verdict:
        """The sum of the world's rewards, less what was taken off for the format.

        A turn that ran out of tokens never came to `step`; as published, its format is wrong.
        """
        if len(transcript.turns) > len(self._rewards):
            self._judge_format(False)
            self._rewards.append(0)
        total, taken_off = float(sum(self._rewards)), sum(self._penalties)
        components = {"solved": float(self._solved), "return": total, "penalty": taken_off}
        if self._config.pay == "episode":
            return Verdict(total - taken_off, components)
        turns = (reward - penalty for reward, penalty in zip(self._rewards, self._penalties, strict=True))
        return Verdict(0.0, components, tuple(turns))

    @property
    def _actions_left(self) -> int:
        return self._world.max_actions - int(self.counters["actions"])

    def _judge_format(self, good: bool) -> None:
        self.counters["invalid_turns"] += not good
        self._penalties.append(0.0 if good else self._config.format_penalty)
