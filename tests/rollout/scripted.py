"""A policy that plays a script: what a rollout sees of an engine, without one."""

import asyncio
import dataclasses

import numpy as np

from jaxagent.roles.base import Reply, TextRole
from jaxagent.types import Generation


@dataclasses.dataclass
class Session:
    tokens: list[int]
    closed: bool = False
    turns: int = 0


class ScriptedPolicy:
    """Turn k of sample s samples `script(task_id, s)[k]`: a text, an exception to raise, or "hang"."""

    def __init__(self, tokenizer, script, finish=None):
        self.tokenizer, self.script, self.finish = tokenizer, script, finish
        self.sessions, self.calls, self.running, self.most_running = [], [], 0, 0

    async def open(self, task_id, sample, group_size, domain, conversation=0):
        self.opened = (task_id, sample, group_size, domain)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        session = Session([])
        moves = self.script(task_id, sample)
        session.moves = list(moves[conversation] if isinstance(moves, dict) else moves)
        self.sessions.append(session)
        return session

    async def generate(self, session, new_tokens, max_tokens, sampling, turn, deadline_s, *, stop_strings):
        assert not session.closed and turn == session.turns and len(new_tokens)
        self.calls.append((list(new_tokens), max_tokens, sampling, turn))
        await asyncio.sleep(0)
        move = session.moves[turn]
        if isinstance(move, BaseException):
            raise move
        if move == "hang":
            async with asyncio.timeout(deadline_s):
                await asyncio.Event().wait()
        ids = self.tokenizer.encode(move)
        finish = "stop" if move.endswith(("</search>", "</answer>")) else "eos"
        if finish == "eos":
            ids.append(self.tokenizer.eos_ids[0])
        if len(ids) > max_tokens:
            ids, finish = ids[:max_tokens], "length"
        session.tokens += [*new_tokens, *ids]
        session.turns += 1
        n = len(ids)
        return Generation(
            np.array(ids, np.int32), -np.ones(n, np.float32), np.full(n, 7, np.int32), finish, decode_s=0.5
        )

    def close(self, session):
        assert not session.closed
        session.closed = True
        self.running -= 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines(TextRole):
    """A role that says its lines, one after the other; "fail" and "hang" are done."""

    lines: tuple[str, ...] = ()

    def speaker(self, task, sample, number):
        return self

    async def reply(self, messages, stop_strings, max_tokens):
        line = self.lines[sum(message.role == "assistant" for message in messages)]
        if line == "fail":
            raise ConnectionError("refused")
        if line == "hang":
            await asyncio.Event().wait()
        return Reply(line)
