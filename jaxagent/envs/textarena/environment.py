"""Games of the package TextArena, alone or against others: text in, text out.

    --config.env=textarena --config.env.make=GuessTheNumber-v0 --config.data.source=seeds
    --config.env=textarena --config.env.make=TicTacToe-v0 --config.env.players=2 --config.data.source=seeds \
        --config.roles.opponent=random_player

A task is a seed (`metadata["seed"]`), and the policy's seat is the seed modulo `players`. The policy's message is its
move, whole, as the package has it: games read what stands in [brackets]. It is shown what the game tells its seat since
its last move, each line after [GAME] or a player's name; its own moves are not repeated. All other seats are played by
the role "opponent", in a conversation each. The reward is the game's own for the policy's seat; a game that is cut off
by a limit has given none, 0.

Games draw from Python's and NumPy's shared random numbers. So one call of a game is made at a time, with that game's
own state of them in place, and a group's attempts see one and the same game whatever is played beside them. A call that
hangs keeps all others waiting until they time out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.config.errors import as_config_error
from jaxagent.config.ranges import FiniteFloat, PositiveInt, Seconds
from jaxagent.envs import forms
from jaxagent.envs.base import Attempt, Environment, Message, Observation, Opening, Step, Transcript, Verdict
from jaxagent.envs.cast import Cast, RoleError, Scripted, Speaker, Talk, TextRole
from jaxagent.envs.own_thread import OwnThread
from jaxagent.envs.seeds import seed_of
from jaxagent.types import StopReason, Task, TokenKind

SOLVED = "solved"
OPPONENT = "opponent"
MOST_MOVES = 1_000  # of others, between two of the policy's
_ONE_AT_A_TIME = threading.Lock()
_LISTED = re.compile(r"(?:available|valid|legal|possible) (?:moves|actions|positions|columns)\b", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextArena(Environment):
    """One of TextArena's games."""

    make: str = ""  # what textarena.make takes: "GuessTheNumber-v0"
    arguments: str = "{}"  # of textarena.make, a JSON object
    players: PositiveInt = 1  # more than one: --config.roles.opponent says who plays the others
    solved_reward: FiniteFloat = 1.0  # from which reward a game counts as solved, in reports
    step_timeout_s: Seconds = 30.0

    score = SOLVED
    calls = "moves"

    def __post_init__(self) -> None:
        """Raises ConfigError where no game is named."""
        if not self.make:
            raise ConfigError("config.env.make is empty: name a game of TextArena, such as GuessTheNumber-v0.")
        forms.json_object(self.arguments, "config.env.arguments")

    @property
    def roles(self) -> Sequence[str]:  # type: ignore[override]
        """Who plays beside the policy."""
        return (OPPONENT,) if self.players > 1 else ()

    @contextlib.contextmanager
    def open(self, opening: Opening) -> Iterator[Callable[..., TextArenaAttempt]]:
        """Begins one game, to see that it can be made and takes so many players."""
        if importlib.util.find_spec("textarena") is None:
            raise ConfigError("config.env=textarena needs the package textarena: pip install textarena.")
        thread = OwnThread("textarena", self.step_timeout_s)
        begun = thread.call("beginning the game", lambda: _Game(self, 0).new_texts(0))
        try:
            with as_config_error(f"config.env.make='{self.make}' with env.players={self.players}"):
                opening.run(begun, self.step_timeout_s + 1)
        finally:
            thread.end()
        yield lambda task, cast=None: TextArenaAttempt(task, cast, self)


class TextArenaAttempt(Attempt):
    """One game, on one seat."""

    stop_strings: Sequence[str] = ()

    def __init__(self, task: Task, cast: Cast | None, config: TextArena) -> None:
        self._task, self._cast, self._config = task, cast, config
        self._thread = OwnThread("textarena", config.step_timeout_s, "the game's ")
        self._game: Any = None
        self._seat = 0
        self._talks: dict[int, Talk] = {}
        self.counters: dict[str, float] = {"moves": 0.0, "opponent_moves": 0.0, "invalid_actions": 0.0}

    async def start(self) -> Sequence[Message]:
        """Begins the game; others move first where it is their turn. The prompt is what the game then tells the seat.

        Raises:
          ValueError: the game is over before the policy's first move.
        """
        seed = seed_of(self._task)
        self._seat = seed % self._config.players
        self._game = await self._thread.call("move", lambda: _Game(self._config, seed))
        if self._cast is not None:
            others = [seat for seat in range(self._config.players) if seat != self._seat]
            self._talks = {seat: self._cast.talk(OPPONENT) for seat in others}
        if await self._others_move():
            raise ValueError("the game is over before the policy's first move")
        return (Message("user", f"{await self._news(self._seat)}\n"),)

    async def step(self, action: str) -> Step:
        """Makes the policy's move, then those of the others."""
        self.counters["moves"] += 1
        over = await self._thread.call("move", lambda: self._game.move(action))
        if over or await self._others_move():
            return Step(stop_reason=StopReason.ANSWER)
        if self.counters["moves"] >= self._config.max_turns:
            return Step(stop_reason=StopReason.TURN_LIMIT)
        return Step(Observation(((f"\n{await self._news(self._seat)}\n", TokenKind.OBSERVATION),), "user"))

    async def verify(self, transcript: Transcript) -> Verdict:
        """The game's reward for the seat. Raises ValueError: it is no finite number."""
        rewards, info = await self._thread.call("move", self._game.close)
        reward = (rewards or {}).get(self._seat, 0.0)
        if not isinstance(reward, (int, float, np.number)) or not math.isfinite(reward):
            raise ValueError(f"the game's reward must be a finite number, got {reward!r:.100}")
        of_seat = info.get(self._seat, {}) if isinstance(info, Mapping) else {}
        solved = float(reward >= self._config.solved_reward)
        self.counters["invalid_actions"] += bool(of_seat.get("invalid_move"))
        return Verdict(float(reward), {SOLVED: solved, "ended": float(bool(rewards))})

    async def close(self) -> None:
        """Lets the thread end."""
        self._thread.end()

    async def _others_move(self) -> bool:
        """Whether the game is over after them."""
        for _ in range(MOST_MOVES):
            seat = self._game.to_move
            if seat == self._seat:
                return False
            reply = await self._talks[seat].say(Message("user", await self._news(seat)))
            self.counters["opponent_moves"] += 1
            if await self._thread.call("move", lambda said=reply.text: self._game.move(said)):
                return True
        raise ValueError(f"the others have made {MOST_MOVES} moves, and it is not the policy's turn")

    async def _news(self, seat: int) -> str:
        return await self._thread.call("move", lambda: self._game.new_texts(seat))


class _Game:
    """A game with random numbers of its own. Blocks; any thread may call it, one at a time."""

    def __init__(self, config: TextArena, seed: int) -> None:
        self._random: Any = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())
        self._players = config.players
        self._game: Any = None
        with self._own_random():
            import textarena

            self._game = textarena.make(config.make, **forms.json_object(config.arguments, "config.env.arguments"))
            self._game.reset(num_players=config.players, seed=seed)
            self._core = self._game
            while isinstance(self._core, textarena.Wrapper):  # which repeat all that was said before at each turn
                self._core = self._core.env
            self._own_moves = textarena.ObservationType.PLAYER_ACTION

    @property
    def to_move(self) -> int:
        """The seat whose turn it is. Raises ValueError: there is no such seat."""
        seat = self._core.state.current_player_id
        if seat not in range(self._players):
            raise ValueError(f"it is the turn of player {seat!r} of {self._players}")
        return int(seat)

    def move(self, text: str) -> bool:
        """Moves for the seat whose turn it is. Whether the game is over."""
        with self._own_random():
            over, _ = self._game.step(action=text)
            return bool(over)

    def new_texts(self, seat: int) -> str:
        """What the game has told a seat since it was last asked, without the seat's own moves."""
        state = self._core.state
        told, state.observations[seat] = state.observations[seat], []
        names = {-1: "GAME", **state.role_mapping}
        return "\n".join(
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in told
            if sender != seat or kind != self._own_moves
        )

    def close(self) -> Any:
        """(rewards by seat, None where it is not over; what the game says of each seat)."""
        with self._own_random():
            return self._game.close()

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        with _ONE_AT_A_TIME:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
            try:
                yield
            finally:
                self._random = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomPlayer(TextRole):
    """A player of random moves: one of `moves`, or of those in brackets that the game lists last as available."""

    moves: tuple[str, ...] = ()  # ("[rock]", "[paper]", "[scissors]"); () = as the game lists them

    def speaker(self, task: Task, sample: int, number: int) -> Speaker:
        """Draws by task, attempt, conversation and turn."""

        def move(messages: Sequence[Message]) -> str:
            moves: Sequence[str] = self.moves or listed_moves(messages[-1].content)
            if not moves:
                raise RoleError("random_player: the game lists no moves; set config.roles.opponent.moves")
            return random.Random(f"{task.id}/{sample}/{number}/{len(messages)}").choice(moves)

        return Scripted(move)


def listed_moves(text: str) -> list[str]:
    """The moves in brackets behind the last words such as "Available Moves:"."""
    places = list(_LISTED.finditer(text))
    return _MOVE.findall(text, places[-1].end()) if places else []
