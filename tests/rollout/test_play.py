"""Episodes of several conversations: their tokens, their numbers, and every way a role can fail. No engine."""

import asyncio
import dataclasses
from typing import ClassVar

import numpy as np
import pytest
from scripted import ScriptedPolicy

from jaxagent.config import SamplingConfig
from jaxagent.envs.base import Environment, Message, Observation, Step, Verdict
from jaxagent.envs.cast import RoleError, Spliced, Tokens
from jaxagent.roles.base import Reply, TextRole
from jaxagent.rollout.cast import Roles
from jaxagent.rollout.conversation import encode_prompt
from jaxagent.rollout.episode import SpeakerSettings
from jaxagent.rollout.multi_turn import MultiTurn
from jaxagent.rollout.play import Play
from jaxagent.rollout.templates import Chat, Plain
from jaxagent.types import StopReason, Task, TokenKind

TASK = Task("t1", "What is the calling code of Ghana?", ("233",))
SAMPLING = SamplingConfig(1.0, 1.0, 0, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(Environment):
    def attempt(self, task):
        raise NotImplementedError


LIMITS = Limits(turn_tokens=20, observation_tokens=100, context_tokens=200, episode_timeout_s=5.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Echo(TextRole):
    """Says what it was shown last, or does what `how` says."""

    how: str = ""

    def speaker(self, task, sample, number):
        return self

    async def reply(self, messages, stop_strings, max_tokens):
        if self.how == "fail":
            raise ConnectionError("refused")
        if self.how == "hang":
            await asyncio.Event().wait()
        return Reply(f"{len(messages)} {messages[-1].content}")


class Attempt:
    """Plays the function it is given."""

    def __init__(self, cast, play, reward=1.0):
        self.cast, self._play, self.counters, self._reward, self.closed = cast, play, {}, reward, False

    async def play(self):
        return await self._play(self.cast) or StopReason.ANSWER

    async def verify(self, ended):
        return Verdict(self._reward, {"solved": self._reward})

    async def close(self):
        self.closed = True


def play(tokenizer, body, said, roles=None, voices=None, **changes):
    """The episode of an attempt that plays `body(cast)`; conversation k of the policy says said[k][turn]."""
    roles = roles or {}
    policy = ScriptedPolicy(tokenizer, lambda task, sample: said)
    speakers = {name: role.speaker for name, role in roles.items() if isinstance(role, TextRole)}
    company = Roles(roles, speakers | (voices or {}))
    config = dataclasses.replace(LIMITS, **changes)
    rollout = Play(lambda task, cast: Attempt(cast, body), policy, tokenizer, Plain(), config, SAMPLING, 2.0, company)
    episode = asyncio.run(rollout(TASK, 3))
    assert all(session.closed for session in policy.sessions)
    return episode, policy


def test_each_conversation_of_the_policy_is_a_trajectory_of_the_engines_tokens(trained):
    async def body(cast):
        first = cast.talk("policy")
        one = await first.say(Message("user", "Question: "), stop_strings=("</search>",))
        assert (one.text == "<search> Ghana</search>" and one.finish == "eos") or one.finish == "stop"
        await first.say(Message("user", "233 "))
        await cast.talk("policy").say(Message("user", "café "))

    episode, policy = play(trained, body, {0: ["<search> Ghana</search>", "<answer> 233</answer>"], 1: ["Ghana"]})
    assert episode.stop_reason is StopReason.ANSWER and episode.reward == 1.0 and episode.turns == 3
    assert [t.tokens.tolist() for t in episode.trajectories] == [s.tokens for s in policy.sessions]
    first = episode.trajectories[0]
    assert trained.decode(first.tokens[first.kinds == TokenKind.OBSERVATION]) == "233 "
    assert first.turns.max() == 1 and episode.metrics["trajectories"] == 2


def test_what_is_only_shown_carries_no_gradient(trained):
    async def body(cast):
        await cast.talk("policy", trained=False).say(Message("user", "Question: "))
        await cast.talk("policy").say(Message("user", "again: "))

    episode, policy = play(trained, body, {0: ["Ghana"], 1: ["233"]})
    (heard,) = episode.heard
    assert len(episode.trajectories) == 1 and episode.trajectories[0].tokens.tolist() == policy.sessions[1].tokens
    assert heard.role == "policy" and heard.turns == (("Question: ", "Ghana"),) and heard.after == 0
    assert heard.trajectory.tokens.tolist() == policy.sessions[0].tokens


def test_spliced_tokens_are_not_encoded_again(trained):
    ids = trained.encode("Gh") + trained.encode("ana")  # not what encode("Ghana") gives
    assert ids != trained.encode("Ghana")
    message = Spliced("user", ("Memory: ", Tokens(tuple(ids), "Ghana"), "\n", Tokens((5, 6), "x"), "Now: "))
    got = encode_prompt(trained, Plain(), [Message("system", "SPLICED0X 1 "), message])
    encode = trained.encode
    assert got == [*encode("SPLICED0X 1 Memory: "), *ids, *encode("\n"), 5, 6, *encode("Now: ")]
    # Through a chat template that trims what it shows.
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}<assistant>"
    got = encode_prompt(trained, Chat(source, {}, _date()), [Spliced("user", (" ", Tokens((5, 6), "x"), "é "))])
    assert got == [*encode("<user>"), 5, 6, *encode("é</s><assistant>")]


def test_a_template_that_drops_a_spliced_piece_is_refused(trained):
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="once and in its place"):
        encode_prompt(trained, _Twice(source), [Spliced("user", (Tokens((5,), "x"),))])


class _Twice:
    after_message = ""

    def __init__(self, source):
        self.source = source

    def prompt(self, messages):
        return "".join(message.content * 2 for message in messages)


def _date():
    import datetime

    return datetime.datetime(2025, 1, 1)


def test_roles_are_counted_priced_and_heard(trained):
    async def body(cast):
        await cast.talk("policy").say(Message("user", "Question: "))
        friend = cast.talk("friend")
        said = await friend.say(Message("system", "Be kind."), Message("user", "one"))
        assert (said.text, said.tokens) == ("2 one", None)
        said = await friend.say(Message("user", "two"), stop_strings=("4",))
        assert (said.text, said.finish) == ("4", "stop")
        assert said.cost == pytest.approx((3.0 * said.prompt_tokens + 5.0 * said.reply_tokens) / 1e6)
        assert cast.names == ("friend",)

    roles = {"friend": Echo(price_prompt=3.0, price_reply=5.0)}
    episode, _ = play(trained, body, {0: ["Ghana"]}, roles)
    assert episode.error == "" and episode.metrics["friend_replies"] == 2
    count = lambda text: len(trained.encode(text))  # noqa: E731
    shown = [count("Be kind."), count("one")]
    prompts = sum(shown) + sum(shown) + count("2 one") + count("two")
    assert episode.metrics["friend_prompt_tokens"] == prompts
    replies = count("2 one") + count("4")
    assert episode.metrics["friend_cost"] == pytest.approx((3.0 * prompts + 5.0 * replies) / 1e6)
    (heard,) = episode.heard
    assert heard.turns == (("Be kind.\none", "2 one"), ("two", "4")) and heard.after == 1
    assert heard.trajectory is None


def test_an_engine_role_speaks_with_its_own_limits_and_is_not_trained(trained):
    other = ScriptedPolicy(trained, lambda task, sample: {1: ["Ghana café"]})
    voice = SpeakerSettings(other, trained, Plain(), SAMPLING, 2, 50, 50, 2.0)

    async def body(cast):
        await cast.talk("policy").say(Message("user", "Question: "))
        said = await cast.talk("friend").say(Message("user", "Hello"))
        assert said.finish == "length" and said.reply_tokens == 2 and len(said.tokens.ids) == 2

    episode, _ = play(trained, body, {0: ["233"]}, {"friend": Echo()}, {"friend": voice})
    (heard,) = episode.heard
    assert heard.trajectory.tokens.tolist() == other.sessions[0].tokens and len(episode.trajectories) == 1
    assert other.sessions[0].closed and np.isfinite(heard.trajectory.logprobs).all()


@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize(
    ("how", "raised", "reason", "told"),
    [
        ("fail", RoleError, StopReason.ENV_ERROR, "friend: ConnectionError: refused"),
        ("hang", TimeoutError, StopReason.TIMEOUT, "friend: no reply in its time"),
    ],
)
def test_a_role_that_fails_ends_the_episode_whatever_the_environment_makes_of_it(
    trained, how, raised, reason, told, swallow
):
    async def body(cast):
        await cast.talk("policy").say(Message("user", "Question: "))
        try:
            await cast.talk("friend").say(Message("user", "Hello"))
        except raised:
            if not swallow:
                raise

    episode, _ = play(trained, body, {0: ["233"]}, {"friend": Echo(how=how, timeout_s=0.05)})
    assert episode.stop_reason is reason and told in episode.error
    assert episode.reward == 0.0 and episode.rewards == {}


@pytest.mark.parametrize(
    ("move", "reason"), [(RuntimeError("device"), StopReason.ENGINE_ERROR), ("hang", StopReason.TIMEOUT)]
)
def test_a_policy_that_fails_is_the_engines_failure(trained, move, reason):
    async def body(cast):
        try:
            await cast.talk("policy").say(Message("user", "Question: "))
        except Exception:
            return StopReason.ANSWER  # as if nothing had happened

    episode, _ = play(trained, body, {0: [move]})
    assert episode.stop_reason is reason and episode.error


def test_no_room_is_a_reply_of_the_policy_and_a_failure_of_a_role(trained):
    async def body(cast):
        said = await cast.talk("policy").say(Message("user", "Ghana " * 300))
        assert (said.text, said.finish, said.reply_tokens) == ("", "length", 0)
        await cast.talk("friend").say(Message("user", "Ghana " * 300))

    voice = SpeakerSettings(
        ScriptedPolicy(trained, lambda task, sample: []), trained, Plain(), SAMPLING, 2, 50, 50, 2.0
    )
    episode, _ = play(trained, body, {}, {"friend": Echo()}, {"friend": voice})
    assert episode.stop_reason is StopReason.ENV_ERROR and "leaves no room in context_tokens=50" in episode.error
    assert episode.trajectories == () and episode.turns == 0


class Asking:
    """A multi-turn attempt whose every step asks a role."""

    stop_strings = ("</search>", "</answer>")
    counters: ClassVar[dict] = {}

    def __init__(self, task, cast):
        self._friend = cast.talk("friend")

    async def start(self):
        return [Message("user", "Question: ")]

    async def step(self, action):
        if "answer" in action:
            return Step(stop_reason=StopReason.ANSWER)
        said = await self._friend.say(Message("user", action))
        return Step(Observation(((said.text, TokenKind.OBSERVATION),)))

    async def verify(self, transcript):
        return Verdict(1.0, {"solved": 1.0})

    async def close(self):
        pass


@pytest.mark.parametrize("how", ["", "fail"])
def test_a_turn_by_turn_environment_may_have_roles(trained, how):
    policy = ScriptedPolicy(trained, lambda task, sample: ["<search> Ghana</search>", "<answer> 233</answer>"])
    role = Echo(how=how)
    company = Roles({"friend": role}, {"friend": role.speaker})
    rollout = MultiTurn(Asking, policy, trained, Plain(), LIMITS, SAMPLING, 2.0, company=company)
    episode = asyncio.run(rollout(TASK, 0))
    if how:
        assert episode.stop_reason is StopReason.ENV_ERROR and "friend: ConnectionError" in episode.error
        assert episode.heard[0].turns == (("<search> Ghana</search>", ""),)
    else:
        assert episode.stop_reason is StopReason.ANSWER and episode.metrics["friend_replies"] == 1
        assert episode.heard[0].turns == (("<search> Ghana</search>", "1 <search> Ghana</search>"),)


def test_a_context_that_the_policy_filled_is_its_limit_and_no_failure(trained):
    policy = ScriptedPolicy(trained, lambda task, sample: {0: ["Hi!"], 1: ["Hi!"]})
    voice = SpeakerSettings(policy, trained, Plain(), SAMPLING, 9, 30, 30, 2.0)
    friend = {"friend": Echo()}

    async def late(cast):
        said = await cast.talk("policy").say(Message("user", "Write!"))
        await cast.talk("friend").say(Message("user", said.text * 20))

    async def early(cast):
        await cast.talk("friend").say(Message("user", "much " * 40))

    episode, _ = play(trained, late, {0: ["much to say"]}, friend, {"friend": voice})
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TOKEN_LIMIT, 1.0, "")
    assert episode.metrics["friend_no_room"] == 1 and len(episode.trajectories) == 1
    episode, _ = play(trained, early, {0: ["much to say"]}, friend, {"friend": voice})
    assert episode.stop_reason is StopReason.ENV_ERROR and "leaves no room in context_tokens=30" in episode.error
    assert "friend_no_room" not in episode.metrics


def test_an_environments_step_that_meets_a_full_context_ends_as_the_policys_limit(trained):
    class Stepwise(Attempt):
        stop_strings = ()

        async def start(self):
            return (Message("user", "Say!"),)

        async def step(self, action):
            await self.cast.talk("friend").say(Message("user", "much " * 40))

    voice = SpeakerSettings(
        ScriptedPolicy(trained, lambda task, sample: []), trained, Plain(), SAMPLING, 9, 30, 30, 2.0
    )
    policy = ScriptedPolicy(trained, lambda task, sample: ["much to say"])
    company = Roles({"friend": Echo()}, {"friend": voice})
    rollout = MultiTurn(lambda task, cast: Stepwise(cast, None), policy, trained, Plain(), LIMITS, SAMPLING, 2.0,
                        company=company)  # fmt: skip
    episode = asyncio.run(rollout(TASK, 0))
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.TOKEN_LIMIT, 1.0, "")
    assert episode.metrics["friend_no_room"] == 1


@pytest.mark.parametrize("breaks", [ValueError("no such sequence"), asyncio.CancelledError()])
def test_what_an_attempt_holds_is_freed_although_hanging_up_fails(trained, breaks):
    """A second cancellation comes while a session ends at a gateway far away."""
    attempts = []

    class Breaks(Play.playing):
        async def _hang_up(self):
            raise breaks

    class Rollout(Play):
        playing = Breaks

    def begin(task, cast):
        attempts.append(Attempt(cast, lambda cast: asyncio.sleep(0)))
        return attempts[-1]

    rollout = Rollout(begin, ScriptedPolicy(trained, None), trained, Plain(), LIMITS, SAMPLING, 2.0, Roles({}, {}))
    with pytest.raises(type(breaks)):
        asyncio.run(rollout(TASK, 3))
    assert attempts[0].closed
