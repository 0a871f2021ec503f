"""Forks: attempts of a group that go on from a turn of an earlier attempt, as `rl.branching` chooses.

A fork is an attempt like any other, with a number of its own, which keys what it samples. It waits for the attempts
that its rule chooses from; these have lower numbers and begin before it, so at any concurrency somebody can go on. Then

  the environment  a fresh attempt of the task is given the parent's actions again, turn by turn. What it shows must be,
                   token for token, what the parent was shown: else the fork fails, and says where they part
  the policy       the fork's trajectory begins with the parent's tokens, as they are, as context (kind PROMPT): it has
                   not sampled them, and they have no log-probs and no loss in it. The engine finds their pages in its
                   prefix tree, and prefills what the tree lacks

The parent's own record has its log-probs, so nothing is written or learnt twice, and whoever counts, scores or replays
sampled tokens needs to know nothing of forks. `Episode.fork_of` and `forked_at` say where a fork came from.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent import contract
from jaxagent.algorithms.branching import Branching
from jaxagent.envs.base import Attempt, Step
from jaxagent.rollout.conversation import Conversation
from jaxagent.rollout.episode import Failed, seconds
from jaxagent.rollout.multi_turn import MultiTurn, TurnByTurn
from jaxagent.rollout.workers import guarded, no_episode
from jaxagent.types import Episode, Generation, StopReason, Task

GIVEN_UP = "the attempt was given up"


@dataclasses.dataclass(frozen=True)
class Played:
    """An attempt that is over, with what a fork needs of it."""

    episode: Episode
    conversation: Conversation | None = None
    generations: Sequence[Generation] = ()  # of its turns, those that it has copied included


class _Branchable(TurnByTurn):
    """An attempt from which others may go on, and which may itself go on from a turn of `parent`."""

    def __init__(self, rollout: MultiTurn, task: Task, sample: int, parent: Played | None, turn: int):
        super().__init__(rollout, task, sample)
        self._parent, self._turn = parent, turn
        self.generations: list[Generation] = []

    def played(self, episode: Episode) -> Played:
        """Its episode, with what a fork of it needs."""
        return Played(episode, self._conversation, self.generations)

    async def _converse(self, environment: Attempt) -> StopReason:
        if self._turn:
            await self._come_to_the_turn()
        return await super()._converse(environment)

    async def _come_to_the_turn(self) -> None:
        assert self._parent is not None
        self._compare("the prompt")
        try:
            for turn, generation in enumerate(self._parent.generations[: self._turn]):
                await self._copy(turn, generation)
        finally:  # a fork that fails on the way has sampled nothing
            self._conversation.copied()
        self._metrics |= {"copied_turns": float(self._turn), "copied_tokens": float(len(self._conversation))}

    async def _copy(self, turn: int, generation: Generation) -> None:
        action = self._conversation.add_action(generation)
        with seconds(self._metrics, "env_s"):
            step = await contract.awaited(self._attempt, "step", action, expected=Step)
        self._check()
        if step.observation is None:
            raise self._parted(f"turn {turn} ends the episode ({step.stop_reason})")
        self._conversation.add_observation(step.observation)
        self._compare(f"what follows turn {turn}")
        self.generations.append(generation)

    def _compare(self, what: str) -> None:
        assert self._parent is not None and self._parent.conversation is not None
        if self._conversation.differing(self._parent.conversation):
            raise self._parted(f"{what} is other text")

    def _parted(self, how: str) -> Failed:
        assert self._parent is not None
        of = f"a fork of attempt {self._parent.episode.sample} at turn {self._turn}, whose actions it was given"
        return Failed(StopReason.ENV_ERROR, f"{of}, is not where that was: {how}. The environment is not repeatable")

    async def _generate(self, session: Any, stop_strings: Sequence[str]) -> Generation:
        generation = await super()._generate(session, stop_strings)
        if self._turn and len(self.generations) == self._turn:
            # Of its context all but the last token, which decoding begins with.
            new = self._metrics["copied_tokens"] - 1 - generation.cached_tokens
            self._metrics["prefilled_tokens"] = new
        self.generations.append(generation)
        return generation


@dataclasses.dataclass(frozen=True)
class Branched:
    """Plays a step's attempts, some of them as forks. Attempts are numbered so that a group's first one is a multiple
    of its size.
    """

    rollout: Any  # the `MultiTurn` that plays attempts from the start
    rule: Branching
    seed: int  # of the run
    failed: Mapping[tuple[str, int], Episode] = dataclasses.field(default_factory=dict)  # that are not played again
    _table: dict[tuple[str, int], asyncio.Future[Played]] = dataclasses.field(default_factory=dict)

    async def __call__(self, task: Task, sample: int) -> Episode:
        """Runs one attempt, after those that it depends on. Only its cancellation passes through."""
        place = sample % self.rollout.group_size
        over, first = self._over(task, sample), sample - place
        done = Played(no_episode(task, sample, StopReason.CANCELLED, GIVEN_UP))
        try:
            if place < self.rule.roots:
                done = await self._play(task, sample, None, 0, {})
            else:
                number = self.rule.waits_for(place)
                if not 0 < number <= place:
                    raise contract.wrong(self.rule, f"{number}", f"1 to {place}", "waits_for")
                before = [await asyncio.shield(self._over(task, first + other)) for other in range(number)]
                parent, turn = self._choose(task, sample, before)
                at = {"fork_of": before[parent].episode.sample, "forked_at": turn}
                done = await self._play(task, sample, before[parent], turn, at)
        finally:
            if not over.done():
                over.set_result(done)
        return done.episode

    def _over(self, task: Task, sample: int) -> asyncio.Future[Played]:
        key = task.id, sample
        if key not in self._table:
            self._table[key] = asyncio.get_running_loop().create_future()
            if key in self.failed:
                self._table[key].set_result(Played(self.failed[key]))
        return self._table[key]

    def _choose(self, task: Task, sample: int, before: Sequence[Played]) -> tuple[int, int]:
        """The rule's choice: of the state's first owner, where that is one that a parent has copied."""
        place = sample % self.rollout.group_size
        key = hashlib.blake2b(f"fork\0{self.seed}\0{task.id}\0{sample}".encode(), digest_size=16).digest()
        rng, episodes = np.random.default_rng(int.from_bytes(key, "little")), [played.episode for played in before]
        parent, turn = contract.call(self.rule, episodes, place, rng, method="choose")
        places = {episode.sample: at for at, episode in enumerate(episodes)}
        while turn and (of := episodes[parent].fork_of) is not None and turn <= episodes[parent].forked_at:
            parent = places[of]
        if not 0 <= turn < max(1, len(before[parent].generations)) or (
            turn and episodes[parent].stop_reason.is_failure
        ):
            raise contract.wrong(
                self.rule, f"turn {turn} of attempt {parent}", "a turn of an attempt that did not fail", "choose"
            )
        return parent, turn

    async def _play(self, task: Task, sample: int, parent: Played | None, turn: int, fork: dict[str, int]) -> Played:
        playing: list[_Branchable] = []

        async def play(task: Task, sample: int) -> Episode:
            playing.append(_Branchable(self.rollout, task, sample, parent, turn))
            return await playing[-1].run()

        episode = dataclasses.replace(await guarded(play, task, sample), **fork)
        return playing[-1].played(episode) if playing else Played(episode)
