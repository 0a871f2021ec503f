"""Random programs at once, over HTTP, against an oracle that knows no trajectories: it writes every context down.

A context must be, id for id, the encoded template text with the sampled ids of every earlier answer in it; what is
trained must be the answers that the program was given, each once; and no word of another session is in it.
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

STEPS, PROGRAMS = 10, 6
LIMITS = sessions.SessionLimits(turn_tokens=60, context_tokens=100_000, requests=10_000)
STOPS = [[], [], [], ["e"], ["the", "\n"], ["é", "qu"], ["<|im_end|>"], ["x" * 60, "a"]]
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


def by_hand(messages, sampled, tools):
    """The context of a conversation; `sampled` has the ids of the assistant messages that were sampled."""
    tokenizer, ids, text = world.tokenizer(), [], ""
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if i == 0 and tools:
            text += "<|im_start|>system\n" + (content + "\n" if role == "system" else "")
            text += TOOLS % json.dumps(world.SHELL_JSON)
            if role == "system":
                continue
        if id(message) in sampled:
            own = sampled[id(message)]
            ids += [*tokenizer.encode(text + "<|im_start|>assistant\n"), *own]
            text = "\n" if own[-1] in tokenizer.eos_ids else "<|im_end|>\n"
        elif role == "tool":
            text += f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
        else:
            text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    return ids + tokenizer.encode(text + "<|im_start|>assistant\n")


class Walk:
    """One program: what it asks, what it was given, and how often it left."""

    def __init__(self, number, client, token):
        self.draw, self.client, self.token = random.Random(number), client, token
        self.word, self.tools = f"word{number}x", bool(number % 3)
        start = [{"role": "system", "content": "rules"}] * (number % 2)
        self.histories, self.left = [[*start, self.user()]], 0
        self.answers = {False: [], True: []}  # by whether it was asked for again
        self.sampled, self.messages = {}, []  # ids by the message, and the messages, so that no id() is used twice
        self.ids = {}  # of the first answer that says something

    def user(self):
        end = self.draw.choice(["", "  ", "<|im_end|>", "é", "PLACEHOLDER-0-END"])
        return {"role": "user", "content": f"{self.word} {self.draw.random():.6f} {end}"}

    async def ask(self, history, tools, retry=False, **more):
        """(the message, its ids)."""
        stream = self.draw.random() < 0.5
        body = {"messages": history, "stream": stream, "logprobs": True, "return_token_ids": True, **more}
        body |= {"tools": [world.SHELL_JSON]} if tools else {}
        headers = {"Authorization": f"Bearer {self.token}", "x-stainless-retry-count": str(int(retry))}
        async with self.client.post("/v1/chat/completions", json=body, headers=headers) as response:
            raw = await response.read()
            assert response.status == 200, raw
        parts = (
            [json.loads(line[6:]) for line in raw.splitlines() if line[6:7] == b"{"] if stream else [json.loads(raw)]
        )
        deltas = [part["choices"][0]["delta" if stream else "message"] for part in parts]
        said = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
        calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
        end, context = parts[-1]["choices"][0], parts[-1]["prompt_token_ids"]
        logprobs = np.float32([one["logprob"] for one in end["logprobs"]["content"]])
        assert context == by_hand(history, self.sampled, tools)
        answer = tuple(context), tuple(end["token_ids"]), logprobs.tobytes()
        if tools or not self.tools:  # what is asked without tools beside others with tools is not trained
            self.answers[retry].append(answer)
        self.ids.setdefault(meaning(said["content"], calls), end["token_ids"])
        return said | ({"tool_calls": calls} if calls else {}), end["token_ids"]

    async def step(self):
        draw = self.draw
        history = draw.choice(self.histories)
        more = {"stop": draw.choice(STOPS), "max_tokens": draw.choice([None, None, None, 1, 3])}
        what, retry = (
            draw.choice(["on"] * 6 + ["edit", "cut", "foreign", "drop", "leave", "twice", "title", "both"]),
            False,
        )
        if what == "title":
            await self.ask([self.user()], False, **more)
            return
        if what in ("edit", "cut", "foreign", "drop"):
            history = list(history)
            at = draw.choice([i for i, message in enumerate(history) if message["role"] in ("user", "tool")])
            if what == "edit":
                history[at] = self.user()
            elif what == "cut":
                history = [*history[:at], self.user()]
            elif what == "foreign":
                history += [{"role": "assistant", "content": f"never sampled {draw.random()}"}, self.user()]
            else:
                history = [*history[:at], *history[at + 2 :]] if at + 2 < len(history) else history
            if not history or history[-1]["role"] == "assistant":
                history.append(self.user())
            self.histories.append(history)
        if what == "leave":
            self.left += 1
            try:
                await asyncio.wait_for(self.ask(history, self.tools, **more), draw.choice((0.0, 0.002, 0.01)))
            except TimeoutError:
                retry = draw.random() < 0.5
        if what in ("twice", "both"):
            others = [self.ask(history, self.tools, again, **more) for again in (False, True, False)]
            if what == "both":
                others.append(self.ask([*history, self.user()], self.tools, **more))
            await asyncio.gather(*others)
        said, ids = await self.ask(history, self.tools, retry, **more)
        calls = said.get("tool_calls", ())
        if not (said["content"].strip() or calls) or self.ids[meaning(said["content"], calls)] != ids:
            return  # two ways to say one thing: nobody can tell from a history which of them was sampled
        said["content"] = draw.choice(["", "\n"]) + said["content"] + draw.choice(["", "  "])
        self.messages.append(said)
        self.sampled[id(said)] = ids
        result = {"role": "tool", "tool_call_id": "c", "content": f"saw {draw.random()}"}
        history += [said, result if calls else self.user()]


@pytest.mark.parametrize("seed", range(5))
def test_contexts_and_trained_tokens_are_what_an_oracle_says(seed, monkeypatch):
    monkeypatch.setattr(sessions, "LINGER_S", 0.003)
    policy = Noise(world.tokenizer(), lambda context, turn: "", piece=3, pause_s=0.001)
    numbers = range(seed * PROGRAMS, (seed + 1) * PROGRAMS)

    async def scene():
        ours = [world.session(policy, LIMITS, sample=number) for number in numbers]
        async with world.serving(*ours) as (_, tokens, client):

            async def program(walk):
                for _ in range(STEPS):
                    await walk.step()
                return walk

            programs = [program(Walk(number, client, token)) for number, token in zip(numbers, tokens, strict=True)]
            walks = await asyncio.gather(*programs)
            while any(one.running for one in ours):
                await asyncio.sleep(0.001)
        return ours, walks, [one.close() for one in ours]

    ours, walks, closed = world.run(scene)
    assert not policy.left_open
    contexts = {tuple(turn.context) for turn in policy.turns}  # as the policy saw them
    for walk, trajectories in zip(walks, closed, strict=True):
        expected = collections.Counter(walk.answers[False]) | collections.Counter({*walk.answers[True]})
        trained = [turn for one in trajectories for turn in turns_of(one)]
        lost = expected - collections.Counter(trained)
        assert not lost, f"{walk.word}: {len(lost)} answers are not trained"
        assert all(context in contexts for context, _, _ in trained)
        assert len(trained) - expected.total() <= walk.left, "what nobody was given is trained, or something twice"
        for trajectory in trajectories:
            text = world.tokenizer().decode(trajectory.tokens)
            assert [other.word for other in walks if other.word in text] == [walk.word]
    counts = {name: sum(one.counters[name] for one in ours) for name in ("forks", "retries_joined", "replayed")}
    assert counts["forks"] > 4 and counts["retries_joined"] + counts["replayed"] > 0


def meaning(text, calls):
    return text.strip(), tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls)


def turns_of(trajectory):
    """(context, ids, log-probs) of every turn."""
    for turn in np.unique(trajectory.turns[trajectory.kinds == TokenKind.ACTION]):
        at = np.flatnonzero((trajectory.kinds == TokenKind.ACTION) & (trajectory.turns == turn))
        assert np.array_equal(at, np.arange(at[0], at[-1] + 1))
        tokens = trajectory.tokens.tolist()
        yield tuple(tokens[: at[0]]), tuple(tokens[at[0] : at[-1] + 1]), trajectory.logprobs[at].tobytes()
