"""The gateway with a session that plays: each request is answered by a given function, as deltas or whole."""

import asyncio
import contextlib

import numpy as np

from jaxagent.engine.requests import EngineError
from jaxagent.gateway import talk
from jaxagent.gateway.chat import Answer, Call, Ident, Reasoning, Text
from jaxagent.gateway.reading import Begun
from jaxagent.gateway.server import Gateway

IDENT = Ident("abc123", "toy", 1_700_000_000)


def answer(*deltas, finish=None, stop_string=None, cached=3):
    """The answer that the deltas make, of one token per delta."""
    calls = tuple(d for d in deltas if isinstance(d, Call))
    return Answer(
        text="".join(d.text for d in deltas if isinstance(d, Text)),
        reasoning="".join(d.text for d in deltas if isinstance(d, Reasoning)),
        calls=calls,
        finish=finish or ("tool_calls" if calls else "stop"),
        stop_string=stop_string,
        prompt_ids=(1, 2, 3, 4, 5),
        tokens=np.arange(7, 7 + len(deltas), dtype=np.int32),
        logprobs=-np.arange(1, 1 + len(deltas), dtype=np.float32),
        token_texts=tuple("t\ufffd" if i == 1 else f"t{i}" for i in range(len(deltas))),
        cached_tokens=cached,
    )


class Played:
    """A session. `play`: Ask -> (deltas, arguments of `answer`). Keeps the requests in `asks`, a refusal in `refusal`.

    stored: a stream has no deltas, as that of an answer that was there before. failing: it ends in the middle.
    """

    def __init__(self, play, stored=False, failing=False):
        self.play, self.stored, self.failing, self.asks, self.refusal = play, stored, failing, [], ""

    async def answer(self, ask, watch=None, retry=None, digests=None):
        self.asks.append(ask)
        deltas, more = self.play(ask)
        for delta in (Begun(5), *deltas) if watch is not None and not self.stored else ():
            watch(delta)
            await asyncio.sleep(2 * talk.PING_S)
        if self.failing:
            raise EngineError("it broke")
        return answer(*deltas, **more)

    def delivered(self, answer):
        """Nobody asks twice."""

    async def count(self, ask):
        return len(ask.messages)


def run(played, scene, limit_s=60):
    """Runs scene(the gateway's URL, the key of the session), in which every silence is filled with a ping."""

    async def whole():
        async with Gateway("toy") as gateway:
            return await asyncio.wait_for(scene(gateway.url, gateway.add(played)), limit_s)

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, talk, "PING_S", talk.PING_S)
        talk.PING_S = 0.001
        return asyncio.run(whole())
