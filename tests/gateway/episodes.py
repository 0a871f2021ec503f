"""Episodes that agent programs play in real sandboxes over a scripted policy, and a look at what is left of them."""

import asyncio
import os

from jaxagent.agents.shell import Shell
from jaxagent.config import EnvConfig
from jaxagent.envs.agent_attempt import Place
from jaxagent.envs.base import Verdict
from jaxagent.gateway.harness import HarnessRollout
from jaxagent.gateway.server import Gateway
from jaxagent.rollout.templates import CHAT_DATE, Chat
from jaxagent.sandbox import choose
from jaxagent.types import Task
from tests.gateway import world
from tests.gateway.scripted import Scripted

WORK = "/home/user"
CONFIG = EnvConfig(max_turns=8, turn_tokens=400, context_tokens=4000, episode_timeout_s=60.0)
TASK = Task("task", "write hello", (), metadata={"domain": "d"})


async def hardly(sandbox):
    """Nothing to prepare."""


async def has_hello(sandbox):
    return float((await sandbox.read(f"{WORK}/hello.txt")) == b"hello\n")


class Attempt:
    """hello.txt is worth its content."""

    run_s, init_s, verify_s = 30.0, 30.0, 30.0

    def __init__(self, backend, spec, agent, **more):
        self._backend, self._spec, self.agent, self.sandbox, self.closed = backend, spec, agent, None, 0
        self.counters = {"seen": 1.0}
        self.ended, self.instruction = None, TASK.prompt
        self.prepare, self.judge = hardly, has_hello
        self.__dict__.update(more)

    async def start(self):
        self.sandbox = await self._backend.start(self._spec)
        await self.prepare(self.sandbox)
        return Place(self.sandbox, WORK, self.instruction)

    async def verify(self, ended):
        self.ended = ended
        reward = await self.judge(self.sandbox)
        return Verdict(reward, {"solved": reward})

    async def close(self):
        self.closed += 1
        if self.sandbox is not None:
            await self.sandbox.close()


class Scene:
    """Episodes over one scripted policy; afterwards there must be nothing left of them."""

    def __init__(self, machines):
        self._runner, self.backend = machines
        self.attempts = []
        self.renderer, self.spec, self.bound_s = world.renderer(), choose.Spec(), 120.0

    def play(self, policy, agent=None, config=CONFIG, around=None, request_timeout_s=30.0, **more):
        """The episode.

        Args:
          policy: an engine, or what a scripted policy replies.
          around: a coroutine function of the rollout, which plays it.
          more: attributes of the attempt.
        """
        self.policy = Scripted(world.tokenizer(), policy) if callable(policy) else policy

        def begin(task):
            self.attempts.append(Attempt(self.backend, self.spec, agent or Shell(python="/usr/bin/python3"), **more))
            return self.attempts[-1]

        async def scene():
            before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
            async with Gateway() as gateway:
                self.gateway = gateway
                rollout = HarnessRollout(
                    begin=begin,
                    policy=self.policy,
                    tokenizer=world.tokenizer(),
                    template=Chat(world.TEMPLATE, world.tokenizer().special_strings, CHAT_DATE),
                    config=config,
                    sampling=world.SAMPLING,
                    request_timeout_s=request_timeout_s,
                    shared=gateway,
                )
                object.__setattr__(rollout, "renderer", self.renderer)  # its template has been looked into
                episode = await (around(rollout) if around else rollout(TASK, 3))
                assert gateway.sessions == 0, "a session stays"
            assert not getattr(self.policy, "left_open", ()), "the engine's sequence stays"
            for attempt in self.attempts:
                assert attempt.closed == 1 and (attempt.sandbox is None or attempt.sandbox.is_closed)
            async with asyncio.timeout(20):
                while (len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))) > before:
                    await asyncio.sleep(0.05)
            return episode

        return self._runner.run(asyncio.wait_for(scene(), self.bound_s))


def says(*replies):
    """A reply per turn, an exception to raise, or a function to call; the last one again and again."""

    def reply(context, turn):
        said = replies[min(turn, len(replies) - 1)]
        said = said() if callable(said) else said
        if isinstance(said, Exception):
            raise said
        return said

    return reply
