"""Completions in a session: a prompt that begins as a trajectory goes on with its tokens, whatever was left out."""

import asyncio
import datetime
import json

import numpy as np
import pytest

from jaxagent.data.tokenizer import Tokenizer
from jaxagent.gateway.chat import Ask, BadRequest
from jaxagent.gateway.renderer import Renderer
from jaxagent.gateway.session import Session, SessionLimits
from jaxagent.types import StopReason, TokenKind
from tests.gateway import world
from tests.gateway.scripted import Scripted
from tests.gateway.world import post, user

PATH = "/v1/completions"
PROMPT = "the quick brown fox "


def scripted(reply=lambda context, turn: world.scrambled(f"in the shell {len(context)}"), **more):
    return Scripted(world.tokenizer(), reply, **more)


def prompted(prompt, **more):
    return Ask((), prompt=prompt, sampling=world.SAMPLING, **more)


async def told(session, prompt, **more):
    answer = await session.answer(prompted(prompt, **more))
    session.delivered(answer)
    return answer


def encode(text):
    return world.tokenizer().encode(text)


# -------------------------------------------------------------------- what goes on


def test_a_text_that_begins_as_a_trajectory_goes_on_with_its_tokens():
    policy = scripted()

    async def program(session):
        text = PROMPT
        for observation in (" says\n", " and runs\n", ""):
            answer = await told(session, text)
            text += answer.text + observation

    session, trajectories = world.played(policy, program)
    assert len(trajectories) == 1 and session.counters["forks"] == 0
    assert [t.new_tokens for t in policy.turns] == [encode(PROMPT), encode(" says\n"), encode(" and runs\n")]
    assert policy.turns[1].context[-len(encode(" says\n")) - 1] == world.tokenizer().eos_ids[0], "the EOS stays"
    (one,) = trajectories
    assert world.spans(one, TokenKind.PROMPT) == [encode(PROMPT)]
    assert world.spans(one, TokenKind.OBSERVATION) == [encode(" says\n"), encode(" and runs\n")]


def test_ids_that_begin_as_a_trajectory_go_on_with_it():
    policy = scripted()

    async def program(session):
        first = await told(session, PROMPT)
        ids = [*first.prompt_ids, *first.tokens.tolist(), *encode(" says")]
        second = await told(session, tuple(ids))
        assert list(second.prompt_ids) == ids
        await told(session, tuple([*ids, *second.tokens.tolist(), 5]))
        text = world.tokenizer().decode([*ids, *second.tokens.tolist(), 5])
        await told(session, text + world.tokenizer().decode(policy.turns[-1].sampled) + "!")
        await told(session, tuple(ids[:-1]))  # no turn ends there

    _, trajectories = world.played(policy, program)
    assert sorted(len(world.spans(t)) for t in trajectories) == [1, 4]
    assert policy.turns[1].new_tokens == encode(" says") and policy.turns[3].new_tokens == encode("!")


@pytest.mark.parametrize("sends", ["", " t", " the"])
@pytest.mark.parametrize("rest", ["\nsays", "."])
def test_a_stop_string_that_the_answer_left_out_stays_in_the_context(sends, rest):
    the = world.tokenizer().token_bytes().index(b" the")
    first = [*world.letters("fox")[:-1], the, *world.letters("never")]
    policy = scripted(lambda context, turn: [first, world.letters("quick"), world.letters("end")][turn])

    async def program(session):
        one = await told(session, PROMPT, stops=(" t",))
        assert (one.text, one.stop_string, one.tokens.tolist()) == ("fox", " t", first[:4])
        text = PROMPT + one.text + sends + rest
        two = await told(session, text)
        await told(session, text + two.text + rest)

    _, (trajectory,) = world.played(policy, program)
    end = world.tokenizer().eos_ids[0]
    ids = [*encode(PROMPT), *first[:4], *encode(rest), *world.letters("quick"), *encode(rest), *world.letters("end")]
    assert trajectory.tokens.tolist() == ids and ids.count(end) == 2


def test_a_turn_that_was_cut_goes_on_where_it_was_cut_also_within_a_character():
    accent = world.letters("x\u00e9\u00e8")[:-1]
    policy = scripted(lambda context, turn: accent if turn == 0 else "done")

    async def scene(count, *more):
        session = world.session(policy)
        one = await told(session, PROMPT, max_tokens=count)
        assert one.finish == "length"
        await told(session, PROMPT + one.text + "".join(more))
        return session.close()

    for count in (2, 3, 4):
        (whole,) = world.run(lambda count=count: scene(count))
        assert whole.tokens.tolist()[len(encode(PROMPT)) :] == [*accent[:count], *policy.turns[-1].sampled]
        (more,) = world.run(lambda count=count: scene(count, "\u00e8"))
        assert policy.turns[-1].new_tokens == encode("\u00e8") and more.turns[-1] == 1

    async def half():
        session = world.session(policy)
        await told(session, PROMPT, max_tokens=2)
        await told(session, PROMPT + "x\u00e9")  # the first of its two bytes was sampled
        return session.close()

    assert len(world.run(half)) == 2, "a text that goes on within the character is another text"


def test_a_prefix_of_the_tokenizer_stands_in_front_once():
    plain = world.tokenizer()
    config = json.loads(plain._files["tokenizer_config.json"]) | {"bos_token": "<|im_start|>", "add_bos_token": True}
    tokenizer = Tokenizer(plain._backend, dict(plain._files) | {"tokenizer_config.json": json.dumps(config)})
    policy = Scripted(tokenizer, lambda context, turn: "done")

    async def scene():
        renderer = Renderer(tokenizer, "", datetime.datetime(2026, 1, 1))
        session = Session(policy, renderer, tokenizer, world.LIMITS, world.SAMPLING, "task", 0)
        one = await told(session, PROMPT)
        two = await told(session, PROMPT + one.text + " says")
        whole = tokenizer.decode([*two.prompt_ids, *two.tokens.tolist()])
        await told(session, whole + "!")  # its own text has the prefix, too
        return session.close()

    (trajectory,) = world.run(scene)
    world.check(policy, (trajectory,))
    assert tokenizer.prefix_ids == (tokenizer.id_of("<|im_start|>"),)
    assert trajectory.tokens[0] == tokenizer.prefix_ids[0]
    assert world.contains(trajectory.tokens, list(tokenizer.prefix_ids)) == 1 and trajectory.turns[-1] == 2


# -------------------------------------------------------------------- what begins anew


def test_another_text_behind_an_earlier_turn_is_a_fork_with_its_tokens():
    policy = scripted()

    async def program(session):
        one = (await told(session, PROMPT)).text
        two = (await told(session, PROMPT + one + " a ")).text
        await told(session, PROMPT + one + " a " + two + " b ")
        await told(session, PROMPT + one + " c ")
        await told(session, "a" + PROMPT + one)

    session, trajectories = world.played(policy, program)
    assert len(trajectories) == 3 and session.counters["forks"] == 1
    whole = [*policy.turns[0].context, *policy.turns[0].sampled]
    assert policy.turns[3].new_tokens == [*whole, *encode(" c ")]
    context = policy.turns[3].context
    fork = next(t for t in trajectories if t.tokens.tolist()[: len(context)] == context)
    assert set(fork.kinds[: len(whole)].tolist()) == {int(TokenKind.PROMPT)}
    assert world.spans(fork, TokenKind.OBSERVATION) == [encode(" c ")]


def test_two_prompts_at_once_behind_one_turn_are_a_trajectory_and_a_fork():
    policy = scripted()

    async def program(session):
        one = PROMPT + (await told(session, PROMPT)).text
        both = await asyncio.gather(told(session, one + " a "), told(session, one + " c "))
        for text, answer in zip((" a ", " c "), both, strict=True):
            await told(session, one + text + answer.text + "!")

    session, trajectories = world.played(policy, program)
    assert sorted(len(world.spans(t)) for t in trajectories) == [2, 3] and session.counters["forks"] == 1


def test_of_two_turns_that_say_the_same_the_idle_one_goes_on():
    policy = scripted(lambda context, turn: "same")

    async def program(session):
        assert (await told(session, PROMPT)).text == (await told(session, PROMPT)).text
        await asyncio.gather(*(told(session, PROMPT + "same" + text) for text in "bc"))

    session, trajectories = world.played(policy, program)
    assert [len(world.spans(t)) for t in trajectories] == [2, 2] and session.counters["forks"] == 0


def test_what_looks_like_reasoning_is_text_in_a_completion():
    said = "<think>the fox</think>\n runs"
    policy = scripted(lambda context, turn: said)

    async def scene():
        renderer = Renderer(world.tokenizer(), world.TEMPLATE + "{# </think> #}", datetime.datetime(2026, 1, 1))
        session = Session(policy, renderer, world.tokenizer(), world.LIMITS, world.SAMPLING, "task", 0)
        assert (await session.answer(world.ask(user("a")))).text == "runs"
        assert (await told(session, PROMPT)).text == said

    world.run(scene)


def test_a_prompt_again_is_given_again_joined_or_sampled_again():
    policy = scripted(lambda context, turn: [world.tokenizer().eos_ids[0]] if context == PROMPT else "done")

    async def program(session):
        lost = await session.answer(prompted(PROMPT))
        assert await session.answer(prompted(PROMPT)) is lost and lost.text == ""
        session.delivered(lost)
        await told(session, PROMPT)  # an empty answer is in every prompt: this one asks again
        burst = await asyncio.gather(*(session.answer(prompted("a")) for _ in range(5)))
        assert all(answer is burst[0] for answer in burst)
        session.delivered(burst[0])
        await told(session, "adone")  # the EOS would be followed by nothing
        await told(session, PROMPT + "more")  # begins with a prompt whose answer said nothing

    session, trajectories = world.played(policy, program)
    assert (session.counters["replayed"], session.counters["retries_joined"]) == (1, 4)
    assert len(trajectories) == 5 and len({t.conversation for t in policy.turns}) == 5


def test_conversations_and_completions_do_not_go_on_with_each_other():
    policy = scripted(lambda context, turn: "done")

    async def program(session):
        chat = await session.answer(world.ask(user("a")))
        ids = [*chat.prompt_ids, *chat.tokens.tolist()]
        await told(session, tuple([*ids, 5]))
        await told(session, world.tokenizer().decode(ids) + "!")

    session, trajectories = world.played(policy, program)
    assert len(trajectories) == 3 and session.counters["forks"] == 0


# -------------------------------------------------------------------- limits and the wire


def test_a_prompt_that_has_no_room_or_no_tokens_is_refused():
    async def scene():
        session = world.session(scripted(), SessionLimits(turn_tokens=50, context_tokens=200, requests=2))
        for long in ("long " * 200, tuple([5] * 200), "a" * 10_000):
            with pytest.raises(BadRequest, match=r"prompt is too long") as refused:
                await session.answer(prompted(long))
            assert refused.value.code == "context_length_exceeded" and session.stop == StopReason.TOKEN_LIMIT
        for wrong, why in (("", "must not be empty"), ((), "must not be empty"), ((5, 10**6), "has the id 1000000")):
            with pytest.raises(BadRequest, match=why):
                await session.answer(prompted(wrong))
        await session.answer(prompted("b"))  # what was refused took none of the session's requests

    world.run(scene)


def test_openais_own_client_reads_whole_and_streamed_answers_and_goes_on_with_a_trajectory():
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    policy = scripted(lambda context, turn: world.letters("in the shell STOP") if turn == 0 else "done")
    asked = dict(prompt=PROMPT, max_tokens=40, stop="STOP", model="any", logprobs=1)

    def answers(url, token, stream):
        """(pieces, usage, id) of a first answer, and the texts of two more."""
        with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as client:
            create = client.completions.create
            if stream:
                *events, last = create(**asked, stream=True, stream_options={"include_usage": True})
                assert len(events) > 2 and not last.choices
            else:
                events = [last := create(**asked)]
                assert last.prompt_token_ids == encode(PROMPT)
            pieces, texts = [event.choices[0] for event in events], []
            text = PROMPT + "".join(piece.text for piece in pieces) + "STOP a"
            for _ in range(2):
                texts.append(create(model="any", prompt=text, max_tokens=40).choices[0].text)
                text += texts[-1] + " more"
            for wrong in (["a", "b"], [1, -1], [], [True]):
                with pytest.raises(openai.BadRequestError) as refused:
                    create(model="any", prompt=wrong)
                assert refused.value.param == "prompt"
            return pieces, last.usage, last.id, texts

    async def scene():
        ours = world.session(policy), world.session(policy, sample=1)
        async with world.serving(*ours) as (gateway, tokens, client):
            told = [
                await asyncio.to_thread(answers, gateway.url, *each) for each in zip(tokens, (False, True), strict=True)
            ]
            assert (await post(client, "wrong", PATH, prompt="a"))[0] == 401
        return told, [one.close() for one in ours]

    (((whole,), usage, ident, more), (pieces, *streamed)), closed = world.run(scene)
    assert whole.text == "".join(piece.text for piece in pieces) == "in the shell "
    for name in ("token_ids", "finish_reason", "stop_string", "logprobs"):
        assert getattr(whole, name) == getattr(pieces[-1], name)
    assert (streamed[0], streamed[2]) == (usage, more) and more == ["done"] * 2 and ident.startswith("cmpl-")
    length = len("in the shell STOP")
    assert (whole.finish_reason, whole.stop_string) == ("stop", "STOP") and usage.completion_tokens == length
    assert whole.token_ids == policy.turns[0].sampled[:length] and whole.logprobs.text_offset == list(range(length))
    for (trajectory,) in closed:
        assert np.unique(trajectory.turns).tolist() == [0, 1, 2]
