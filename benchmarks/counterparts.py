"""What does a slow counterpart cost a step, and a second model on the mesh?

    python -m benchmarks.counterparts [--episodes=256] [--slots=64] [--repetitions=3]

A simulated user waits 1 to 3 seconds before each reply (random numbers keyed by task, attempt and turn). Episodes of
several turns are played against it by the real rollout, as many at once as the engine has slots ("before": all wait,
then all generate), and all at once (`env.concurrent_episodes`, "after"). No rollout can be faster than the waits of its
longest episode; the bound is these and the seconds in which the engine was busy. Then two engines with weights of
their own generate on one mesh, each alone and both at once in turns (`engine/turns.py`). The last line is JSON:

  idle_frac_before        of the rollout's wall-clock: the engine did nothing, with as many episodes as slots
  idle_frac_after         the same with all episodes at once
  step_ratio              wall-clock of all at once / its lower bound (goal: 1.25 at most)
  step_ratio_before       the same with as many episodes as slots
  speedup                 wall-clock before / after
  active_slots_before     slots that generated in a dispatch, mean
  active_slots_after      the same with all episodes at once
  second_model_overhead   both engines at once / the sum of each alone, less 1 (goal: 0.10 at most)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from benchmarks import tiny_model
from jaxagent.config import EngineConfig, EnvConfig, MeshConfig, SamplingConfig
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.engine import automaton
from jaxagent.engine.driver import Driver
from jaxagent.engine.lm import LanguageModel
from jaxagent.engine.requests import EngineSetup
from jaxagent.engine.turns import Turns
from jaxagent.envs.base import Message, Verdict
from jaxagent.envs.cast import Cast
from jaxagent.models import params, sharding
from jaxagent.roles.base import Reply, TextRole
from jaxagent.rollout.cast import Roles
from jaxagent.rollout.play import Play
from jaxagent.rollout.templates import Plain
from jaxagent.rollout.workers import Workers
from jaxagent.types import Episode, StopReason, Task

GROUP = 8
CONTEXT = 512
LEAST_WAIT_S, MOST_WAIT_S = 1.0, 3.0
TURNS = (2, 6)  # replies of the policy in an episode
TOKENS = (8, 48)  # of one of them
SPEC = dataclasses.replace(
    tiny_model.SPEC, vocab_size=512, padded_vocab_size=512, num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=2,
    head_dim=32, mlp_dim=384,
)  # fmt: skip
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
DEADLINE_S = 900.0


def _drawn(task: Task, sample: int, *what: int) -> np.random.Generator:
    return np.random.default_rng((task.metadata["number"], sample, *what))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowUser(TextRole):
    """Waits, and says a sentence."""

    def speaker(self, task: Task, sample: int, number: int) -> _Slow:
        """One conversation."""
        return _Slow(task, sample)


class _Slow:
    def __init__(self, task: Task, sample: int):
        self._task, self._sample, self._turn = task, sample, 0

    async def reply(self, messages: Sequence[Message], stop_strings: Sequence[str], max_tokens: int) -> Reply:
        """The next sentence, after a wait."""
        self._turn += 1
        await asyncio.sleep(_drawn(self._task, self._sample, self._turn).uniform(LEAST_WAIT_S, MOST_WAIT_S))
        return Reply(f"I say this for the time number {self._turn}.")


class Conversation:
    """Policy and user in turn; implements `envs.cast.PlayedAttempt`."""

    def __init__(self, task: Task, cast: Cast, sample: int):
        self.counters: Mapping[str, float] = {}
        self._task, self._sample, self._cast = task, sample, cast

    async def play(self) -> StopReason:
        """As many turns as this attempt has, of lengths of its own."""
        draw = _drawn(self._task, self._sample, 0)
        policy, user = self._cast.talk("policy"), self._cast.talk("user")
        shown = Message("user", self._task.prompt)
        for _ in range(draw.integers(TURNS[0], TURNS[1] + 1)):
            said = await policy.say(shown, max_tokens=int(draw.integers(TOKENS[0], TOKENS[1] + 1)))
            answer = await user.say(Message("user", said.text))
            shown = Message("user", answer.text)
        return StopReason.ANSWER

    async def verify(self, ended: StopReason) -> Verdict:
        """Nothing is judged here."""
        return Verdict(0.0)

    async def close(self) -> None:
        """Nothing is held."""


def mesh_of_one() -> jax.sharding.Mesh:
    """A mesh of one device."""
    return sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1))


@contextlib.contextmanager
def engine(slots: int, pages: int, seed: int = 0, turns: Turns | None = None) -> Iterator[Driver]:
    """A warm engine with random weights."""
    mesh = mesh_of_one()
    with jax.set_mesh(mesh):
        weights = params.init(SPEC, jax.random.key(seed), params.shardings(SPEC, mesh, sharding.TRAIN))
    cfg = EngineConfig(
        slots=slots,
        steps_per_dispatch=8,
        prefill_tokens=1024,
        pages=pages,
        page_tokens=16,
        tile_rows=64,
        cache_dtype="float32",
        kv_on_update="keep",
        request_timeout_s=DEADLINE_S,
    )
    stops = automaton.build((), [b"ab"] * SPEC.padded_vocab_size, SPEC.padded_vocab_size)
    setup = EngineSetup(cfg=cfg, context=CONTEXT, stops=stops, eos_ids=(), exact=False)
    with Driver(LanguageModel(SPEC, "float32"), weights, 0, setup, mesh, turns) as driver:
        driver.start(600.0)
        yield driver


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Seconds of one step's rollouts."""

    wall_s: float
    busy_s: float  # the engine computed
    longest_wait_s: float  # of the episode that waited longest for its user
    active_slots: float

    @property
    def idle_frac(self) -> float:
        """Of the wall-clock, without the engine."""
        return 1.0 - self.busy_s / self.wall_s

    @property
    def ratio(self) -> float:
        """Wall-clock over its lower bound."""
        return self.wall_s / (self.longest_wait_s + self.busy_s)


def rollouts(driver: Driver, tokenizer: Tokenizer, episodes: int, at_once: int, name: str) -> Rollouts:
    """Plays groups of episodes against the slow user. The same waits and lengths each time, and other prompts."""
    user = SlowUser(timeout_s=60.0)
    limits = EnvConfig(
        turn_tokens=TOKENS[1], observation_tokens=64, context_tokens=CONTEXT, episode_timeout_s=DEADLINE_S
    )
    tasks = [
        Task(f"{name} {i}", f"Customer {i}, {name}, asks what became of an order. ", (), metadata={"number": i})
        for i in range(episodes // GROUP)
    ]
    samples: dict[str, int] = {}  # attempts at a task begin in order

    def begin(task: Task, cast: Cast) -> Conversation:
        samples[task.id] = samples.get(task.id, -1) + 1
        return Conversation(task, cast, samples[task.id])

    company = Roles({"user": user}, {"user": user.speaker})
    play = Play(begin, driver, tokenizer, Plain(), limits, SAMPLING, DEADLINE_S, company, group_size=GROUP)
    before = driver.stats()
    with Workers(at_once) as workers:
        started = time.monotonic()
        groups = workers.collect(tasks, GROUP, play, DEADLINE_S)
        wall_s = time.monotonic() - started
    spent = {name: value - before.get(name, 0.0) for name, value in driver.stats().items()}
    played = [episode for group in groups for episode in group.episodes]
    _all_ended(played)
    return Rollouts(
        wall_s=wall_s,
        busy_s=spent["decode_s"] + spent["prefill_s"],
        longest_wait_s=max(episode.metrics["user_s"] for episode in played),
        active_slots=spent["decode_turns"] / spent["dispatches"],
    )


def _all_ended(episodes: Sequence[Episode]) -> None:
    if wrong := next((e for e in episodes if e.stop_reason != StopReason.ANSWER), None):
        raise RuntimeError(f"an episode ended with {wrong.stop_reason}: {wrong.error}")


async def generated(driver: Driver, name: str, sessions: int, turns: int, tokens: int) -> None:
    """Sessions of several turns, all at once."""

    async def one(i: int) -> None:
        text = np.random.default_rng((i, sum(name.encode())))
        session = await driver.open(f"{name} {i}", 0)
        for turn in range(turns):
            given = text.integers(1, SPEC.vocab_size, 24)
            await driver.generate(session, given, tokens, SAMPLING, turn, DEADLINE_S)
        driver.close(session)

    await asyncio.gather(*(one(i) for i in range(sessions)))


def second_model(slots: int, repetitions: int) -> tuple[float, list[float]]:
    """Both engines at once over the sum of each alone, less 1: the median, and every repetition's."""
    turns = Turns()
    pages = slots * CONTEXT // 16
    with engine(slots, pages, 1, turns) as a, engine(slots, pages, 2, turns) as b:

        def timed(repetition: int, *drivers: Driver) -> float:
            async def work() -> None:
                names = (f"{repetition} {len(drivers)} {driver is a}" for driver in drivers)
                await asyncio.gather(*(generated(d, n, slots, 3, 96) for d, n in zip(drivers, names, strict=True)))

            started = time.monotonic()
            asyncio.run(work())
            return time.monotonic() - started

        timed(-1, a, b)
        found = []
        for repetition in range(repetitions):
            alone = timed(repetition, a), timed(repetition, b)
            both = timed(repetition, a, b)
            found.append(both / sum(alone) - 1.0)
            print(f"  alone {alone[0]:.2f} s and {alone[1]:.2f} s, both {both:.2f} s: {found[-1]:+.3f}", flush=True)
        if a.stats().get("turn_wait_s", 0.0) <= 0 or b.stats().get("turn_wait_s", 0.0) <= 0:
            raise RuntimeError("the engines did not take turns")
    return statistics.median(found), found


def main() -> None:
    """Measures, prints tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3, help="of the two engines, interleaved")
    options = parser.parse_args()
    tokenizer = Tokenizer.train(
        [f"I say this for the time number {i}. Customer {i} asks." for i in range(999)], 512, ()
    )
    rows: dict[str, Rollouts] = {}
    with engine(options.slots, options.episodes * CONTEXT // 16) as driver:
        rollouts(driver, tokenizer, GROUP, GROUP, "first")  # the first is never like the others
        for name, at_once in {"before": options.slots, "after": options.episodes}.items():
            row = rows[name] = rollouts(driver, tokenizer, options.episodes, at_once, name)
            print(
                f"{name}: {options.episodes} episodes, {at_once} at once: {row.wall_s:.1f} s, engine busy "
                f"{row.busy_s:.1f} s, longest waits {row.longest_wait_s:.1f} s, {row.active_slots:.1f} slots "
                f"active, {row.ratio:.2f} times the bound",
                flush=True,
            )
    print("two engines:", flush=True)
    overhead, all_overheads = second_model(options.slots, options.repetitions)
    before, after = rows["before"], rows["after"]
    found = {
        "idle_frac_before": before.idle_frac,
        "idle_frac_after": after.idle_frac,
        "step_ratio": after.ratio,
        "step_ratio_before": before.ratio,
        "speedup": before.wall_s / after.wall_s,
        "active_slots_before": before.active_slots,
        "active_slots_after": after.active_slots,
        "second_model_overhead": overhead,
        "second_model_overheads": all_overheads,
        "episodes": options.episodes,
        "slots": options.slots,
    }
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}))


if __name__ == "__main__":
    main()
