"""A sampled turn stays itself whatever a program makes of it: random sessions over every template, rewritten at random.

REWRITES has what Claude Code and opencode were seen to do, and more. The witness of the tokens is the policy, which saw
every context; that of the words is the chat template, which renders the conversation at once.
"""

import asyncio
import dataclasses
import datetime
import json
import random

import pytest

from jaxagent.gateway import session as sessions
from jaxagent.gateway.chat import ChatMessage
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.session import Session, SessionLimits
from jaxagent.rollout.templates import Chat
from tests.gateway import chat_templates, world
from tests.gateway.scripted import Scripted
from tests.gateway.world import ask, assistant, tool, user

DATE = datetime.datetime(2026, 1, 1)
LIMITS = SessionLimits(turn_tokens=2000, context_tokens=200_000, requests=100)


def arguments(change):
    return lambda one: dataclasses.replace(one, arguments=change(dict(one.arguments)))


REWRITES = {
    "as it was": lambda one: one,
    "defaults added": arguments(lambda said: said | {"replace_all": False, "timeout": 120}),
    "the folder stripped": arguments(lambda said: said | {"command": said["command"].removeprefix("cd /w && ")}),
    "blanks at line ends stripped": arguments(
        lambda said: {k: "\n".join(line.rstrip() for line in v.split("\n")) for k, v in said.items()}
    ),
    "types coerced": arguments(lambda said: said | {"n": int(said["n"])}),
    "an argument dropped": arguments(lambda said: {"n": said["n"]}),
    "all arguments dropped": arguments(lambda said: {}),
    "no JSON": lambda one: dataclasses.replace(one, arguments="{" + one.id),
    "renamed": lambda one: dataclasses.replace(one, name=one.name.upper()),
    "put into an error": lambda one: dataclasses.replace(
        one, name="invalid", arguments={"tool": one.name, "error": "?"}
    ),
}


def a_session(policy, template):
    tokenizer = world.tokenizer()
    return Session(policy, Renderer(tokenizer, template, DATE), tokenizer, LIMITS, world.SAMPLING, "task", 0)


PREFIXES = ("call_", "toolu_", "call_", "my-call.", "")


def written(template, said):
    """A reply with a call, in each template's own way to write it; byte by byte, as no tokenizer would encode it."""
    text = json.dumps({"name": "shell", "arguments": said})
    if "<function=" in template:
        parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in said.items())
        return f"<tool_call>\n<function=shell>\n{parameters}</function>\n</tool_call>"
    return (
        text.replace('"arguments"', '"parameters"') if "ipython" in template else f"<tool_call>\n{text}\n</tool_call>"
    )


@pytest.mark.parametrize("name", [name for name in chat_templates.TEMPLATES if name != "plain"])
@pytest.mark.parametrize("seed", range(2))
def test_calls_that_come_back_otherwise_are_the_same_turn(name, seed):
    template, _ = chat_templates.TEMPLATES[name]
    draw, one_only = random.Random(seed), name == "llama3.1"

    def reply(context, turn):
        calls = [
            {"command": f"cd /w && run {draw.random()}  \nthe quick fox  ", "n": f"{draw.randrange(9000)}"}
            for _ in range(1 if one_only else draw.randrange(1, 3))
        ]
        text = "" if one_only else draw.choice(("", "I look. "))
        text = f"hm</think>{text}" if name == "thinker" else text  # its template opens the thoughts
        return world.letters(text + "\n".join(written(template, said) for said in calls))

    policy = Scripted(world.tokenizer(), reply)
    text = {"type": "string"}
    shell = dataclasses.replace(world.SHELL, parameters={"type": "object", "properties": {"command": text, "n": text}})

    async def scene():
        session = a_session(policy, template)
        history, changed = [ChatMessage("system", "agent"), user("fix it")], set()
        for _ in range(len(REWRITES)):
            answer = await session.answer(dataclasses.replace(ask(*history), tools=(shell,)))
            session.delivered(answer)
            policy.last = answer
            assert answer.calls
            prefix, calls = draw.choice(PREFIXES), []
            for one in answer.calls[: draw.choice((1, 2, 2, 2))]:  # some programs drop a call that they cannot make
                back = draw.choice(list(REWRITES.values()))(one)
                if (back.name, back.arguments) != (one.name, one.arguments):
                    changed.add(one.id)
                calls.append(dataclasses.replace(back, id=prefix + one.id.removeprefix("call_")))
            if draw.random() < 0.2:  # as smolagents' ToolCallingAgent keeps them
                ids = [{"id": one.id, "function": {"name": one.name}} for one in answer.calls]
                history += [assistant(f"Calling tools:\n{ids}"), user("Observation: 3")]
                changed -= {one.id for one in answer.calls}
                continue
            said = draw.choice((answer.text, answer.text.strip(), answer.text + "\n", ""))
            if draw.random() < 0.3:  # every call in a message of its own
                for i, one in enumerate(calls):
                    history += [assistant("" if i else said, one), tool(f"saw {draw.random()}", one.id)]
            else:
                history += [assistant(said, *calls), *(tool(f"saw {draw.random()}", one.id) for one in calls)]
        return session, session.close(), changed

    session, trajectories, changed = world.run(scene)
    assert len(trajectories) == 1 and not session.counters["forks"] and not session.counters["retokenised_turns"]
    assert len(world.spans(trajectories[0])) == len(policy.turns) == len(REWRITES)
    world.check(policy, trajectories)
    last = {one.id for one in policy.last.calls}  # of an answer that has not come back
    assert len(changed - last) == session.counters["rewritten_calls"]


@pytest.mark.parametrize("name", chat_templates.TEMPLATES)
@pytest.mark.parametrize("stop", ["</code>", ""])
def test_a_text_with_words_of_the_programs_behind_it_is_the_same_turn(name, stop):
    """smolagents' CodeAgent writes the stop string and its own reading of the code behind what it was answered."""
    template, _ = chat_templates.TEMPLATES[name]
    draw, thought = random.Random(len(name)), "hm</think>" if name == "thinker" else ""
    policy = Scripted(
        world.tokenizer(), lambda context, turn: world.letters(f"{thought}<code>run({draw.random()}){stop}")
    )

    async def scene():
        session = a_session(policy, template)
        history, words = [user("fix it")], []
        for _ in range(6):
            answer = await session.answer(ask(*history, stops=(stop,) if stop else ()))
            session.delivered(answer)
            added = draw.choice(("", "\nCalling tools:\n[{'id': 'call_1'}]", "  # my words", "\n\n<|im_end|>"))
            text = answer.text + draw.choice((stop, stop, "" if not added else stop)) + added
            words.append(added)
            history += [assistant(text), user(f"Observation: {draw.random()}")]
        return session, session.close(), history, words

    session, (trajectory,), history, words = world.run(scene)
    assert session.counters["forks"] == session.counters["retokenised_turns"] == 0
    assert len(world.spans(trajectory)) == len(policy.turns) == 6 and any(words)
    world.check(policy, (trajectory,))
    if template and stop:  # what the template writes of the same conversation, where nothing closed a message before
        whole = Chat(template, world.tokenizer().special_strings, DATE).render(
            [{"role": message.role, "content": message.text} for message in history[:-2]]
        )
        text = world.tokenizer().decode(trajectory.tokens.tolist())
        ours = text[: text.rindex("<code>")]
        if all(added.strip() == added.rstrip() for added in words):
            assert "".join(ours.split()) == "".join(whole.split())


OTHERS = [("I", "In the shell"), ("no", "now it runs"), ("1", "12 files"), ("yes", "yes, and no")]
OTHERS += [("so we see the quick", "so we see the quickest fox")]


@pytest.mark.parametrize("sampled, sent", OTHERS)
def test_a_text_that_shares_first_letters_is_another(sampled, sent):
    policy = Scripted(world.tokenizer(), lambda context, turn: world.letters(sampled))

    async def program(session):
        session.delivered(await session.answer(ask(user("go"))))
        await session.answer(ask(user("go"), assistant(sent), user("more")))

    session, trajectories = world.played(policy, program)
    assert session.counters["retokenised_turns"] == 1 and len(trajectories) == 2
    assert f"assistant\n{sent}<|im_end|>" in world.tokenizer().decode(policy.turns[1].context)


@pytest.mark.parametrize(
    "text, counted",
    [("I look", 0), ("", 0), ("I look\nwell", 0), ("I look, then", 0), ("A person's", 1), ("I looked", 1)],
)
def test_another_text_beside_a_known_call_is_counted(text, counted):
    policy = Scripted(world.tokenizer(), lambda context, turn: world.letters("I look " + world.call("run")))

    async def scene():
        session = world.session(policy)
        one = await session.answer(ask(user("go"), tools=True))
        session.delivered(one)
        ident = one.calls[0].id
        await session.count(ask(user("go"), assistant("not asked", *one.calls), tool("x", ident), tools=True))
        await session.answer(ask(user("go"), assistant(text, *one.calls), tool("x", ident), tools=True))
        assert session.counters["rewritten_calls"] == counted
        await session.answer(ask(user("go"), assistant(f"I will not do {ident}"), user("why"), tools=True))
        assert session.counters["rewritten_calls"] == 1

    world.run(scene)


def test_an_answer_that_is_really_another_is_counted_once_and_its_successors_are_known():
    policy = Scripted(world.tokenizer(), lambda context, turn: world.letters(f"answer {len(context)}"))

    async def program(session):
        one = await session.answer(ask(user("a")))
        history = [user("a"), assistant(one.text.replace("answer", "ANSWER")), user("b")]
        for _ in range(3):
            said = await session.answer(ask(*history))
            session.delivered(said)
            history += [assistant(said.text), user("more")]
        few_shots = [user("q"), assistant("an example"), user("r")]
        await session.answer(ask(*few_shots))

    session, trajectories = world.played(policy, program)
    assert session.counters["retokenised_turns"] == 1 and sorted(len(world.spans(t)) for t in trajectories) == [1, 1, 3]


def test_ids_tell_turns_apart_that_say_the_same():
    """Two samples of one request, thought of differently: each goes on in its own trajectory."""
    thoughts = iter(("<think>first</think>", "<think>other</think>"))
    policy = Scripted(
        world.tokenizer(),
        lambda context, turn: next(thoughts) + written("", {"command": "ls"}) if turn == 0 else "done",
    )

    async def scene():
        session = a_session(policy, chat_templates.QWEN3)
        first = [await session.answer(ask(user("a"), tools=True), retry=False) for _ in range(2)]
        assert first[0].calls[0].id != first[1].calls[0].id and first[0].calls[0].arguments == {"command": "ls"}
        for answer in first:
            history = [user("a"), assistant(answer.text, *answer.calls), tool("a b", answer.calls[0].id)]
            said = await session.answer(ask(*history, tools=True))
            assert world.contains(said.prompt_ids, answer.tokens.tolist()) == 1
        return session.close()

    trajectories = world.run(scene)
    world.check(policy, trajectories)
    assert [len(world.spans(one)) for one in trajectories] == [2, 2]


# -------------------------------------------------------------------- samples


def test_requests_at_once_are_samples_unless_the_client_retries():
    """asyncio.gather of one body: both SDKs say that none of them is a retry; Codex says nothing."""
    number = iter(range(1000))

    async def scene(retry):
        policy = Scripted(world.tokenizer(), lambda context, turn: f"sample {next(number)}")
        session = world.session(policy)
        one = await session.answer(ask(user("a")))
        history = (user("a"), assistant(one.text), user("vote"))
        answers = await asyncio.gather(*(session.answer(ask(*history), retry=retry) for _ in range(8)))
        trajectories = session.close()
        world.check(policy, trajectories)
        return len({answer.text for answer in answers}), session.counters["retries_joined"], len(trajectories)

    assert world.run(lambda: scene(False)) == (8, 0, 8)
    assert world.run(lambda: scene(None)) == (1, 7, 1)
    assert world.run(lambda: scene(True)) == (1, 7, 1)


def test_who_asks_again_as_if_for_the_first_time_gets_what_nobody_has_taken(monkeypatch):
    """Claude Code retries by itself, and its client says each time that this is no retry."""
    monkeypatch.setattr(sessions, "TAKING_S", 0.02)
    policy = Scripted(world.tokenizer(), lambda context, turn: f"turn {len(context)}", pause_s=0.01)

    async def scene():
        session = world.session(policy)
        left = asyncio.create_task(session.answer(ask(user("a")), retry=False))
        while not policy.turns:
            await asyncio.sleep(0.001)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        joined = await session.answer(ask(user("a")), retry=False)  # cut while it was generated
        await asyncio.sleep(0.05)
        again = await session.answer(ask(user("a")), retry=False)  # cut while it was sent
        assert again is joined
        session.delivered(again)
        other = await session.answer(ask(user("a")), retry=False)
        assert other is not again
        return session, session.close()

    session, trajectories = world.run(scene)
    assert (session.counters["retries_joined"], session.counters["replayed"], len(trajectories)) == (1, 1, 2)
    world.check(policy, trajectories)
