"""Whether two processes compute the same: a few turns that everybody samples from version 0, compared bit by bit.

The trainer writes what it got beside its versions when it publishes version 0. An engine samples the same before it
plays. This looks through everything at once: libraries and their flags, threads, processor, the weights as they came
over the network, their layout on the devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxagent.config import ConfigError
from jaxagent.config.errors import WaitedInVainError
from jaxagent.engine.driver import Driver
from jaxagent.io import files
from jaxagent.learner import peers
from jaxagent.models.params import Params
from jaxagent.runs.parts import Parts
from jaxagent.types import Generation

logger = logging.getLogger(__name__)

FILE = "probe.json"  # weight_server.SHARED has it
TASK = "probe"
TURNS = 4
TRIES = 2
MOST_NEW, MOST_PROMPT = 8, 48  # tokens
ASKED = ("numerics", "rl.sampling", "env.turn_tokens", "env.context_tokens")  # config fields that its turns follow


@dataclasses.dataclass(frozen=True)
class Probed:
    """What a process got."""

    digest: str
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, turns: Sequence[Generation]) -> Probed:
        """The record of the turns, in order."""
        checksum = hashlib.sha256()
        for turn in turns:
            checksum.update(np.asarray(turn.tokens, "<i4").tobytes() + np.asarray(turn.logprobs, "<f4").tobytes())
        tokens = tuple(tuple(map(int, turn.tokens)) for turn in turns)
        return cls(checksum.hexdigest(), tokens, tuple(tuple(map(float, turn.logprobs)) for turn in turns))


def probe(parts: Parts, driver: Driver) -> Probed:
    """Samples the probe from what the driver serves.

    Raises:
      EngineError: generation failed.
      WaitedInVainError: it took too long, twice.
    """
    new, vocabulary = min(MOST_NEW, parts.cfg.env.turn_tokens), parts.tokenizer.vocab_size
    length = max(1, min(MOST_PROMPT, parts.cfg.env.context_tokens - new - 1))

    async def sample_turn(number: int) -> Generation:
        prompt = [(7919 * (number + 1) + 104729 * place) % vocabulary for place in range(1 + number * length // TURNS)]
        session = await driver.open(TASK, number)
        try:
            timeout_s = parts.cfg.engine.request_timeout_s
            return await driver.generate(session, prompt, new, parts.cfg.rl.sampling, 0, timeout_s)
        finally:
            driver.close(session)

    async def every() -> list[Generation]:
        return list(await asyncio.gather(*map(sample_turn, range(TURNS))))

    limit_s = parts.cfg.engine.request_timeout_s
    for _ in range(TRIES):
        with contextlib.suppress(TimeoutError):  # also where this process was stopped for longer than that
            return Probed.of(parts.workers.run(every(), 2 * limit_s))
        logger.warning("A turn of the probe took more than engine.request_timeout_s (%g s).", limit_s)
    raise WaitedInVainError(
        f"The probe waited {TRIES} times {limit_s:g} s (engine.request_timeout_s) for {TURNS} turns of this process's "
        "engine, which gave none."
    )


def record(folder: pathlib.Path, parts: Parts, driver: Driver, facts: Mapping[str, Any]) -> None:
    """Writes what this process, the trainer, gets from version 0, which its driver serves; the first one's stays."""
    path = folder / FILE
    if not path.exists():
        row = {**dataclasses.asdict(probe(parts, driver)), "facts": dict(facts)}
        files.replace(path, json.dumps(row))


def renew(folder: pathlib.Path, driver: Driver, again: Callable[[], None], first: Params | None) -> str:
    """Has the trainer sample the probe anew (`again` records it), whose numbers round otherwise from now on.

    Returns what to tell of that. The driver has version 0 (`first`) inside afterwards; None: it is not to be had.
    """
    if peers.is_first():
        (folder / FILE).unlink(missing_ok=True)
    if first is None:
        return "engines cannot be compared by what they sample any more: their facts alone are"
    driver.update_params(first, 0)
    if peers.is_first():
        again()
    return "engines are compared with what this machine samples"


def compare(content: bytes, ours: Probed, facts: Mapping[str, Any]) -> str:
    """What differs from the trainer's, in one line; "" where nothing does.

    Args:
      content: of the trainer's file.

    Raises:
      ConfigError: the file is damaged.
    """
    try:
        row = json.loads(content)
        theirs = Probed(row["digest"], tuple(map(tuple, row["tokens"])), tuple(map(tuple, row["logprobs"])))
        facts_there = dict(row["facts"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"The trainer's {FILE} is damaged ({type(error).__name__}: {error}).") from None
    if theirs.digest == ours.digest:
        return ""
    facts_here = json.loads(json.dumps(dict(facts)))
    differs = [
        f"{name} is {facts_here.get(name)!r} here and {facts_there.get(name)!r} there"
        for name in sorted(facts_there.keys() | facts_here.keys())
        if name not in ("process", "host", "pid", "rank", "source") and facts_here.get(name) != facts_there.get(name)
    ]
    return f"{_first(theirs, ours)}; {'; '.join(differs) or 'all facts of the two processes are equal'}"


def _first(theirs: Probed, ours: Probed) -> str:
    for turn, (theirs_of_turn, ours_of_turn) in enumerate(zip(theirs.tokens, ours.tokens, strict=False)):
        if theirs_of_turn != ours_of_turn:
            return f"turn {turn} of the probe has other tokens than the trainer's"
    gaps = [
        abs(their_logprob - our_logprob)
        for theirs_of_turn, ours_of_turn in zip(theirs.logprobs, ours.logprobs, strict=False)
        for their_logprob, our_logprob in zip(theirs_of_turn, ours_of_turn, strict=False)
    ]
    return f"log-probs of the probe differ from the trainer's by up to {max(gaps, default=0.0):.3g}"
