"""Environments and roles that misbehave: the rollout returns an episode all the same, and tells the first reason."""

import asyncio
import dataclasses
import json

import pytest
from scripted import ScriptedPolicy
from test_play import LIMITS, SAMPLING, TASK, Asking, Attempt, Echo, play

from jaxagent.data import codec
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.envs.base import Message, Step
from jaxagent.envs.cast import Spliced, Tokens
from jaxagent.roles.base import Reply
from jaxagent.rollout.cast import Roles
from jaxagent.rollout.episode import SpeakerSettings
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.play import Play
from jaxagent.rollout.templates import Plain
from jaxagent.types import StopReason

HELLO = Message("user", "Hello ")


async def swallowed(awaited):
    """What an environment gets that swallows everything."""
    try:
        return await awaited
    except Exception:
        return None


def failed(episode, told, reason=StopReason.ENV_ERROR):
    assert episode.stop_reason is reason and told in episode.error, (episode.stop_reason, episode.error)
    assert episode.reward == 0.0 and episode.rewards == {}
    json.dumps(codec.encode_episode(episode), ensure_ascii=False).encode()  # as its log writes it


@pytest.mark.parametrize("whose", ["policy", "shown", "friend"])
@pytest.mark.parametrize(
    ("messages", "options", "told"),
    [
        ((), {}, "begins with one message or more"),
        ((HELLO,), {"max_tokens": 0}, "max_tokens=0"),
        ((HELLO,), {"stop_strings": "</s>"}, "stop_strings must be a tuple of texts"),
        ((HELLO,), {"stop_strings": ("",)}, "stop_strings must be a tuple of texts"),
        ((Message("user", "a\udc00"),), {}, "half of a surrogate pair"),
        ((Message("user", None),), {}, "content must be text, got NoneType"),
        ((Spliced("user", ("a", Tokens((5, 10**9), "x"))),), {}, "have the id 1000000000"),
        ((Spliced("user", ("a", Tokens((-5,), "x"))),), {}, "have the id -5"),
    ],
)
def test_a_misuse_that_is_swallowed_is_a_failure_with_its_reason(trained, whose, messages, options, told):
    async def body(cast):
        await cast.talk("policy").say(HELLO)
        talk = cast.talk("friend") if whose == "friend" else cast.talk("policy", trained=whose == "policy")
        for _ in range(3):
            assert await swallowed(talk.say(*messages, **options)) is None

    episode, policy = play(trained, body, {0: ["233"], 1: ["233"]}, {"friend": Echo()})
    failed(episode, told)
    assert len(policy.calls) == 1 and "friend_replies" not in episode.metrics


@pytest.mark.parametrize("whose", ["policy", "friend"])
def test_two_questions_at_once_in_one_conversation_are_refused(trained, whose):
    async def body(cast):
        talk = cast.talk(whose)
        await asyncio.gather(*(swallowed(talk.say(HELLO)) for _ in range(3)))

    failed(play(trained, body, {0: ["233"]}, {"friend": Odd(how="slow")})[0], f"{whose}: it has not answered yet")


def test_conversations_at_once_are_the_same_whoever_answers_first(trained):
    async def body(cast):
        talks = [cast.talk("policy") for _ in range(3)]
        await asyncio.gather(*(talk.say(Message("user", f"{k}: ")) for k, talk in reversed([*enumerate(talks)])))

    episode, _ = play(trained, body, {0: ["Ghana"], 1: ["233"], 2: ["café"]})
    assert episode.error == ""
    said = [trained.decode(t.tokens[t.action_mask][:-1]) for t in episode.trajectories]
    assert said == ["Ghana", "233", "café"]


def test_a_conversation_without_room_that_is_asked_again_is_told_and_heard(trained):
    async def body(cast):
        talk = cast.talk("policy", trained=False)
        assert (await talk.say(Message("user", "Ghana " * 300))).finish == "length"
        for _ in range(3):
            await swallowed(talk.say(HELLO))

    episode, _ = play(trained, body, {})
    failed(episode, "had no room for a reply")
    assert episode.heard[0].turns == (("Ghana " * 300, ""),)


def test_a_conversation_that_was_cancelled_cannot_go_on(trained):
    async def body(cast):
        talk = cast.talk("policy")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(talk.say(HELLO), 0.01)
        await swallowed(talk.say(HELLO))

    failed(play(trained, body, {0: ["hang"]})[0], "its conversation broke off")


@pytest.mark.parametrize("when", ["close", "verify"])
def test_nobody_speaks_after_the_end(trained, when):
    policy = ScriptedPolicy(trained, lambda task, sample: {0: ["233"], 1: ["Ghana"]})
    late = []

    class Late(Attempt):
        async def say(self):
            try:
                late.append(await self.cast.talk("policy").say(HELLO))
            except ValueError as error:
                late.append(str(error))

        async def verify(self, ended):
            if when == "verify":
                self.task = asyncio.create_task(self.say())
            return await super().verify(ended)

        async def close(self):
            await (self.say() if when == "close" else self.task)

    async def body(cast):
        await cast.talk("policy").say(HELLO)

    rollout = Play(
        lambda task, cast: Late(cast, body), policy, trained, Plain(), LIMITS, SAMPLING, 2.0, Roles({}, {})
    )  # fmt: skip
    episode = asyncio.run(rollout(TASK, 3))
    assert (
        late == ["policy: the episode is over, and nobody speaks any more"]
        and len(policy.sessions) == 1
        and policy.sessions[0].closed
    )
    assert len(episode.trajectories) == 1 and episode.turns == 1 and episode.reward == 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(Echo):
    """Says what is no text, or half of a surrogate pair; or cannot read the task."""

    def speaker(self, task, sample, number):
        if self.how == "unread":
            raise ValueError("the task has no facts")
        return self

    async def reply(self, messages, stop_strings, max_tokens):
        await asyncio.sleep(0)
        return Reply(None if self.how == "none" else "so \ud800", prompt_tokens=3)


@pytest.mark.parametrize(("how", "told"), [("none", "its reply is no text"), ("unread", "the task has no facts")])
def test_a_role_whose_reply_cannot_be_used_is_named(trained, how, told):
    async def body(cast):
        try:
            await cast.talk("friend").say(HELLO)
        except Exception:
            return

    failed(play(trained, body, {}, {"friend": Odd(how=how)})[0], f"friend: {'TypeError' if how == 'none' else 'Value'}")


def test_halves_of_surrogate_pairs_that_a_role_sends_do_not_reach_the_log(trained):
    async def body(cast):
        said = await cast.talk("friend").say(HELLO)
        assert said.text == "so \ufffd"
        await cast.talk("policy").say(Message("user", said.text))

    episode, _ = play(trained, body, {1: ["233"]}, {"friend": Odd()})
    assert episode.error == "" and episode.heard[0].turns == (("Hello ", "so \ufffd"),)
    json.dumps(codec.encode_episode(episode), ensure_ascii=False).encode()


def test_an_unknown_role_is_named(trained):
    async def body(cast):
        cast.talk("nobody")

    failed(play(trained, body, {}, {"friend": Echo()})[0], "there is no role 'nobody' in config.roles")


def test_tokens_of_another_tokenizer_pass_as_text(trained):
    other = Tokenizer.train(["other words for other ears Ghana"] * 9, 280, ())
    engine = ScriptedPolicy(other, lambda task, sample: {1: ["ears"]})
    voice = SpeakerSettings(engine, other, Plain(), SAMPLING, 20, 50, 50, 2.0, policys_ids=False)

    async def body(cast):
        memory = (await cast.talk("policy").say(HELLO)).tokens
        said = await cast.talk("friend").say(Spliced("user", ("Now: ", memory)))
        assert said.tokens is None and said.text == "ears"

    def ended(tokenizer, text):
        return [*tokenizer.encode(text), tokenizer.eos_ids[0]]

    if not other.eos_ids:
        pytest.skip("the scripted policy ends with an EOS")
    episode, _ = play(trained, body, {0: ["Ghana"]}, {"friend": Echo()}, {"friend": voice})
    assert episode.error == ""
    assert engine.sessions[0].tokens == [*other.encode("Now: Ghana"), *ended(other, "ears")]


class Chatting(Asking):
    """A multi-turn attempt that begins a conversation of the policy."""

    def __init__(self, task, cast):
        self._cast = cast

    async def step(self, action):
        await swallowed(asyncio.wait_for(self._other(), 1))
        return Step(stop_reason=StopReason.ANSWER)

    async def _other(self):
        return await self._cast.talk("policy").say(HELLO)


def test_a_second_trained_conversation_of_a_turn_by_turn_attempt_is_refused_and_not_dropped(trained):
    policy = ScriptedPolicy(trained, lambda task, sample: {0: ["<search> Ghana</search>"], 1: ["233"]})
    role = Echo()
    company = Roles({"friend": role}, {"friend": role.speaker})
    rollout = MultiTurn(Chatting, policy, trained, Plain(), LIMITS, SAMPLING, 2.0, company=company)
    failed(asyncio.run(rollout(TASK, 0)), "trains its own conversation and no other")
