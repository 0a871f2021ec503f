"""Random programs against an oracle that knows nothing of trajectories: it writes every context down by hand.

A context must be, id for id, the encoded template text with the sampled ids of every earlier answer in it; and what is
trained must be the answers that the program was given, each once.
"""

import asyncio
import collections
import json
import random

import numpy as np
import pytest

from jaxagent.gateway import session as sessions
from jaxagent.types import TokenKind
from tests.gateway import world
from tests.gateway.scripted import Scripted

STEPS, PROGRAMS = 9, 12
LIMITS = sessions.SessionLimits(turn_tokens=60, context_tokens=100_000, requests=10_000)
STOPS = [(), (), (), ("e",), ("the", "\n"), ("é", "qu"), ("<|im_end|>",), ("x" * 60, "a")]
TOOLS = '<tools>\n%s\n</tools>Call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n'


class Noise(Scripted):
    """Samples any ids: halves of letters, template text, nothing at all; a call that may be cut; often no EOS."""

    def answer(self, turn):
        draw = random.Random(f"{turn.sample}/{turn.conversation}/{turn.turn}/{turn.context}")
        table, kind, end = self.tokenizer.token_bytes(), draw.random(), self.eos
        name = f"{draw.random():.9f}"
        if kind < 0.05:
            return [end]
        if kind < 0.5:
            ids = [draw.choice([i for i in range(len(table)) if i != end]) for _ in range(draw.randrange(1, 30))]
            ids += self.tokenizer.encode(name)
        elif kind < 0.8:
            ids = [*world.letters(world.call(name))[:-1], *self.tokenizer.encode(draw.choice(["", " and", "\n"]))]
        else:
            ids = self.tokenizer.encode(f"  the quick é {name} ")
        return ids if draw.random() < 0.2 else [*ids, end]


def by_hand(tokenizer, messages, sampled, tools):
    """The context of a conversation; `sampled` has the ids of the assistant messages that were sampled."""
    ids, text = [], ""
    for i, message in enumerate(messages):
        if i == 0 and tools:
            form = {"name": world.SHELL.name, "description": world.SHELL.description}
            form = {"type": "function", "function": form | {"parameters": world.SHELL.parameters}}
            text += "<|im_start|>system\n" + (message.text + "\n" if message.role == "system" else "")
            text += TOOLS % json.dumps(form)
            if message.role == "system":
                continue
        if message.role == "assistant" and id(message) in sampled:
            own = sampled[id(message)]
            ids += [*tokenizer.encode(text + "<|im_start|>assistant\n"), *own]
            text = "\n" if own[-1] in tokenizer.eos_ids else "<|im_end|>\n"
        elif message.role == "tool":
            text += f"<|im_start|>user\n<tool_response>\n{message.text}\n</tool_response><|im_end|>\n"
        else:
            text += f"<|im_start|>{message.role}\n{message.text}<|im_end|>\n"
    return ids + tokenizer.encode(text + "<|im_start|>assistant\n")


class Walk:
    """One program: what it asks, what it was given, and how often it left."""

    def __init__(self, seed, session):
        self.draw, self.session, self.tools = random.Random(seed), session, bool(seed % 3)
        start = [world.ChatMessage("system", "rules")] * (seed % 2)
        self.histories, self.sampled, self.answers, self.left = [[*start, self.user()]], {}, {}, 0
        self.keep = []  # messages, so that no id is used twice
        self.ids = {}  # of the first answer that says something

    def user(self):
        return world.user(
            f"{self.draw.random():.6f} {self.draw.choice(['', '  ', '<|im_end|>', 'é', 'PLACEHOLDER-0-END'])}"
        )

    async def ask(self, history, tools, **more):
        ask = world.ask(*history, tools=tools, **more)
        answer = await self.session.answer(ask, retry=False)
        self.session.delivered(answer)
        assert list(answer.prompt_ids) == by_hand(world.tokenizer(), history, self.sampled, tools)
        self.answers[id(answer)] = (answer, tools)
        self.ids.setdefault(meaning(answer), answer.tokens.tolist())
        return answer

    async def step(self):
        draw = self.draw
        history = draw.choice(self.histories)
        more = {"stops": draw.choice(STOPS), "max_tokens": draw.choice([None, None, None, 1, 3])}
        what = draw.choice(["on"] * 6 + ["edit", "cut", "foreign", "drop", "leave", "twice", "title", "both"])
        if what == "title":
            await self.ask([self.user()], False, **more)
            return
        if what in ("edit", "cut", "foreign", "drop"):
            history = list(history)
            users = [i for i, m in enumerate(history) if m.role in ("user", "tool")]
            at = draw.choice(users)
            if what == "edit":
                history[at] = self.user()
            elif what == "cut":
                history = [*history[:at], self.user()]
            elif what == "foreign":
                history += [world.assistant(f"never sampled {draw.random()}"), self.user()]
            else:
                history = [*history[:at], *history[at + 2 :]] if at + 2 < len(history) else history
            if not history or history[-1].role == "assistant":
                history.append(self.user())
            self.histories.append(history)
        if what == "leave":
            self.left += 1
            work = asyncio.create_task(self.ask(history, self.tools, **more))
            for _ in range(draw.randrange(12)):
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await asyncio.sleep(draw.choice([0, 0.003]))
        if what in ("twice", "both"):
            others = [self.ask(history, self.tools, **more) for _ in range(2)]
            if what == "both":
                others.append(self.ask([*history, self.user()], self.tools, **more))
            await asyncio.gather(*others)
        answer = await self.ask(history, self.tools, **more)
        if not (answer.text.strip() or answer.calls) or self.ids[meaning(answer)] != answer.tokens.tolist():
            return  # two ways to say one thing: nobody can tell from a history which of them was sampled
        said = world.assistant(draw.choice(["", "\n"]) + answer.text + draw.choice(["", "  "]), *answer.calls)
        self.keep.append(said)
        self.sampled[id(said)] = answer.tokens.tolist()
        history += [said, *([world.tool(f"saw {draw.random()}")] if answer.calls else [self.user()])]


@pytest.mark.parametrize("seed", range(3))
def test_contexts_and_trained_tokens_are_what_an_oracle_says(seed, monkeypatch):
    monkeypatch.setattr(sessions, "LINGER_S", 0.001)

    async def scene(number):
        policy = Noise(world.tokenizer(), lambda context, turn: "", piece=3)
        session = world.session(policy, LIMITS, sample=number)
        walk = Walk(number, session)
        for _ in range(STEPS):
            await walk.step()
        while session.running:
            await asyncio.sleep(0.001)
        return policy, walk, session.close()

    for number in range(seed * PROGRAMS, (seed + 1) * PROGRAMS):
        policy, walk, trajectories = world.run(lambda number=number: scene(number))
        given = [answer for answer, tools in walk.answers.values() if tools or not walk.tools]
        trained = [turn for one in trajectories for turn in turns_of(one)]
        lost = collections.Counter(map(told, given)) - collections.Counter(trained)
        assert not lost, f"program {number}: {len(lost)} answers are not trained"
        assert len(trained) - len(given) <= walk.left, "what nobody was given is trained, or something twice"
        assert not policy.left_open


def meaning(answer):
    return answer.text.strip(), tuple((call.name, str(call.arguments)) for call in answer.calls)


def told(answer):
    return tuple(answer.prompt_ids), tuple(answer.tokens.tolist()), answer.logprobs.tobytes()


def turns_of(trajectory):
    """(context, ids, log-probs) of every turn."""
    for turn in np.unique(trajectory.turns[trajectory.kinds == TokenKind.ACTION]):
        at = np.flatnonzero((trajectory.kinds == TokenKind.ACTION) & (trajectory.turns == turn))
        assert np.array_equal(at, np.arange(at[0], at[-1] + 1))
        tokens = trajectory.tokens.tolist()
        yield tuple(tokens[: at[0]]), tuple(tokens[at[0] : at[-1] + 1]), trajectory.logprobs[at].tobytes()
